"""Runs a split model from rank 0: sends each step to the workers, then computes its own shard.

KV blocks are read and written whole, assembled from the shards of all ranks, so that the tiers
below the device and other engines need not know how this model is split.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.distributed.shards import ModelShard
from nodeagent.engine.kernels.step_interrupt import StepInterrupt
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.scheduler.batch import BlockCopy
from nodeagent.engine.scheduler.forward_batch import ForwardBatch
from nodeagent.engine.workers.adapter_shards import AdapterDistributor, tensor_bytes
from nodeagent.engine.workers.commands import (
    ClearBlocks,
    CopyBlocks,
    ReadBlocks,
    WriteBlocks,
    run_step_command,
)
from nodeagent.engine.workers.worker_group import WorkerGroup


class Rank0Executor:
    """Executes steps on all ranks: on this process's runner and on the workers."""

    def __init__(
        self,
        runner: ModelRunner,
        workers: WorkerGroup,
        whole: DecoderShape,
        communicator: Communicator,
    ) -> None:
        split = communicator.split
        self._runner = runner
        self._workers = workers
        self._whole = whole
        self._communicator = communicator
        self._shards = [ModelShard(whole, split, rank) for rank in range(split.ranks)]
        self._adapters = AdapterDistributor(workers, runner, self._shards[0])

    def begin(
        self, batch: ForwardBatch, interrupt: StepInterrupt | None = None
    ) -> Callable[[], Tensor]:
        """Compute `batch` on all ranks; return a function that waits for its logits.

        `interrupt` has no effect: the other ranks would wait for this one.
        """
        self._adapters.update(batch.chunks)
        command = run_step_command(batch)
        self._workers.broadcast(command)
        self._runner.run(command)
        return self._communicator.wait_logits

    @property
    def can_copy_beside_steps(self) -> bool:
        """The ranks take commands in the order of the steps only."""
        return False

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` on all ranks."""
        self._workers.broadcast(ClearBlocks(list(blocks)))
        self._runner.clear(blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks on all ranks."""
        self._workers.broadcast(CopyBlocks(list(copies)))
        self._runner.copy(copies)

    def read_blocks(self, blocks: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the contents of `blocks`: [blocks, layers, tokens, keys and values, head_dim].

        They are copied to `out`, which has this form, if it is given.
        """
        replies = self._workers.gather(ReadBlocks(list(blocks)))
        parts = [self._runner.read_blocks(blocks)]
        for shard, reply in zip(self._shards[1:], replies, strict=True):
            parts.append(shard_blocks(reply, len(blocks), shard, self._runner.kv_dtype))
        _, _, tokens, _, width = parts[0].shape
        heads = 2 * self._whole.kv_heads
        whole = out
        if whole is None:
            whole = parts[0].new_empty(len(blocks), self._whole.layers, tokens, heads, width)
        for shard, part in zip(self._shards, parts, strict=True):
            whole[:, shard.layers.start : shard.layers.stop, :, _kv_rows(shard)] = part
        return whole

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Fill `blocks` with `contents`, as `read_blocks` returns them."""
        parts = []
        for shard in self._shards:
            layers = contents[:, shard.layers.start : shard.layers.stop]
            parts.append(layers[..., _kv_rows(shard), :].contiguous())
        numbers = list(blocks)
        self._workers.scatter([WriteBlocks(numbers, tensor_bytes(part)) for part in parts[1:]])
        self._runner.write_blocks(blocks, parts[0])


def shard_blocks(contents: bytes, blocks: int, shard: ModelShard, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a rank's blocks as a tensor of the shape that its runner uses."""
    flat = torch.frombuffer(bytearray(contents), dtype=dtype)
    heads = 2 * len(shard.kv_heads)
    return flat.view(blocks, len(shard.layers), BLOCK_TOKENS, heads, -1)


def _kv_rows(shard: ModelShard) -> list[int]:
    """Return the rows of keys and of values in a whole block that belong to `shard`."""
    heads = shard.kv_heads
    values = range(shard.whole.kv_heads + heads.start, shard.whole.kv_heads + heads.stop)
    return [*heads, *values]

"""LoRA adapters of a split model: rank 0 reads them whole and sends each rank its slices.

Rule 1: the matrices of a module are sliced like the module's weight. If that is sliced along its
rows, `up` is sliced the same way and every rank has all of `down`. If it is sliced along its
columns, `down` is sliced, and the sum over ranks includes the adapter.
Rule 2: a worker receives an adapter before the first step that uses it, so that nodes without its
files have it too. It forgets the adapter once nothing on rank 0 refers to it.
"""

from collections.abc import Iterable
from weakref import ref

import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.shards import ModelShard
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.scheduler.forward_batch import ForwardChunk
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.workers.commands import AddAdapter, RemoveAdapter
from nodeagent.engine.workers.worker_group import WorkerGroup


class AdapterDistributor:
    """Keeps the adapters of all ranks, rank 0 included, in step with the batches that run."""

    def __init__(self, workers: WorkerGroup, runner: ModelRunner, shard: ModelShard) -> None:
        self._workers = workers
        self._runner = runner
        self._shard = shard
        self._sent: dict[bytes, ref[LoraAdapter]] = {}

    def update(self, chunks: Iterable[ForwardChunk]) -> None:
        """Send the adapters of `chunks` that are new, and remove those nothing refers to."""
        for digest in [digest for digest, adapter in self._sent.items() if adapter() is None]:
            del self._sent[digest]
            self._workers.broadcast(RemoveAdapter(digest))
            self._runner.adapters.pop(digest)
        for chunk in chunks:
            adapter = chunk.adapter
            if not isinstance(adapter, LoraAdapter):
                continue
            if adapter.digest not in self._sent:
                command = add_adapter_command(adapter)
                self._workers.broadcast(command)
                keep_adapter_shard(command, self._runner, self._shard)
            # The same adapter, read again, may outlive the object that was sent.
            self._sent[adapter.digest] = ref(adapter)


def add_adapter_command(adapter: LoraAdapter) -> AddAdapter:
    """Return the command that sends `adapter`."""
    parts = {
        module: (tensor_bytes(down), tensor_bytes(up), down.shape[0])
        for module, (down, up) in adapter.pairs.items()
    }
    dtype = next(iter(adapter.pairs.values()))[0].dtype
    return AddAdapter(adapter.name, adapter.digest, str(dtype).removeprefix("torch."), parts)


def keep_adapter_shard(command: AddAdapter, runner: ModelRunner, shard: ModelShard) -> None:
    """Store this rank's shard of an adapter in `runner`."""
    dtype = getattr(torch, command.dtype)
    pairs = {}
    for module, (down, up, lora_rank) in command.parts.items():
        if module in runner.active_adapters.modules:
            down_whole = torch.frombuffer(bytearray(down), dtype=dtype).view(lora_rank, -1)
            up_whole = torch.frombuffer(bytearray(up), dtype=dtype).view(-1, lora_rank)
            down_here, up_here = _sliced(
                module, down_whole, up_whole, runner.active_adapters, shard
            )
            pairs[module] = (
                down_here.contiguous().to(runner.device),
                up_here.contiguous().to(runner.device),
            )
    size_bytes = sum(down.nbytes + up.nbytes for down, up in pairs.values())
    runner.adapters[command.digest] = LoraAdapter(command.name, pairs, command.digest, size_bytes)


def tensor_bytes(contents: Tensor) -> bytes:
    """Return the bytes of `contents`, a tensor on the host."""
    flat: bytes = contents.contiguous().view(torch.uint8).numpy().tobytes()
    return flat


def _sliced(
    module: str, down: Tensor, up: Tensor, adapters: ActiveAdapters, shard: ModelShard
) -> tuple[Tensor, Tensor]:
    """Return this rank's slices of the adapter matrices of `module`."""
    part = shard.slice_of(f"{module}.weight", adapters.modules[module])
    if part is None:
        return down, up
    if part.axis == 0:
        return down, up[part.start : part.end]
    return down[:, part.start : part.end], up

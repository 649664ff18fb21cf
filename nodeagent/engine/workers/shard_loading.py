"""Loads one rank's shard of a model: its memory is checked first, its weights read second."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError, MemoryShortage
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.distributed.shards import ModelShard, ParallelConfig
from nodeagent.engine.draft_loading import DraftModelFiles, Eagle3HeadFiles, TargetCheckpoint
from nodeagent.engine.kernels.selection import choose_linear
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.kv_format import DTYPES, KV_DTYPES, KvFormat
from nodeagent.engine.memory.memory_watch import available_bytes
from nodeagent.engine.model.families import build_model
from nodeagent.engine.speculative.draft_model import DraftModel
from nodeagent.engine.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

DraftFiles = DraftModelFiles | Eagle3HeadFiles


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """One rank's shard of a model, ready to run once `wait_weights` has returned."""

    runner: ModelRunner
    draft_model: DraftModel | None
    wait_weights: Callable[[], None]
    """Waits for the matrices that are still being read."""
    weight_regions: Callable[[], list[Tensor]]
    """Returns the memory of all matrices, as `LinearBackend.weight_regions` does."""


def parallel_config(config: EngineConfig) -> ParallelConfig:
    """Return into how many parts the model of `config` is split."""
    return ParallelConfig(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)


def local_ranks(config: EngineConfig) -> range:
    """Return the ranks on this node: all of them, unless it is one of a group's nodes."""
    node, nodes = (config.group.place, config.group.nodes) if config.group else (0, 1)
    return parallel_config(config).ranks_on_node(node, nodes)


def rendezvous_file(config: EngineConfig) -> Path:
    """Return the file through which the ranks of one node connect to each other."""
    return Path(f"{config.socket}.ranks")


def connect_ranks(config: EngineConfig, communicator: Communicator, store: Store | None) -> None:
    """Connect this rank to the others, through `store` if some are on other nodes.

    Every wait for another rank is limited to `stall_s`.
    """
    device = device_of(config, communicator.rank)
    communicator.connect(store or rendezvous_file(config), device, config.stall_s)


def device_of(config: EngineConfig, rank: int) -> str:
    """Return the torch device of `rank`: on GPUs each local rank has its own."""
    if config.device == "cpu":
        return "cpu"
    kind, _, number = config.device.partition(":")
    return f"{kind}:{int(number) + rank - local_ranks(config).start}"


def kv_format(config: EngineConfig) -> KvFormat:
    """Return the format of keys and values: `kv_dtype`, or the dtype of the model by default."""
    return KvFormat(KV_DTYPES[config.kv_dtype or config.dtype])


def load_shard(
    config: EngineConfig,
    source: Checkpoint,
    communicator: Communicator,
    draft: DraftFiles | None = None,
) -> LoadedShard:
    """Load the shard of the communicator's rank, and its draft model if `draft` is given."""
    torch.set_num_threads(config.threads)
    dtype, shape, device = DTYPES[config.dtype], source.shape, device_of(config, communicator.rank)
    linear, reason = choose_linear(device, dtype, config.quantisation)
    log.info("linear backend", extra={"fields": {"name": linear.name, "because": reason}})
    context = min(config.context_tokens_max, shape.context_tokens)
    model = build_model(shape, source, device, dtype, context, linear, communicator)
    blocks, kv = _kv_blocks(config, shape, dtype, draft), kv_format(config)
    runner = ModelRunner(model, blocks, device, dtype, kv)
    log.info("kv", extra={"fields": {"blocks": blocks, "kept": str(kv.dtype)}})
    if draft is None:
        return LoadedShard(runner, None, model.wait_for_weights, linear.weight_regions)
    draft_model = draft.load(config, runner, model, TargetCheckpoint(source, shape, communicator))
    return LoadedShard(runner, draft_model, model.wait_for_weights, linear.weight_regions)


def check_memory(
    config: EngineConfig, source: Checkpoint, rank: int, draft: DraftFiles | None = None
) -> None:
    """Raise MemoryShortage if the shard of `rank` does not fit into its device's memory.

    Host memory is shared by the ranks of a node: the first of them checks it for all.
    """
    shape, split = source.shape, parallel_config(config)
    device, local = device_of(config, rank), local_ranks(config)
    ranks, host_bytes = range(rank, rank + 1), 0
    if device == "cpu":
        ranks, host_bytes = local, config.kv_host_bytes
        if rank != local.start:
            return
    parameters = sum(ModelShard(shape, split, each).parameters() for each in ranks)
    weights_bytes = int(parameters * bytes_per_weight(config, source))
    weights_bytes += draft.weights_bytes(DTYPES[config.dtype]) if draft else 0
    kv_bytes = config.kv_memory_bytes * len(ranks) + host_bytes
    available = available_bytes(device)
    if device == "cpu" and config.memory_max_bytes:
        available = min(available, config.memory_max_bytes)
    if weights_bytes + kv_bytes > available:
        raise MemoryShortage(
            f"cannot load {config.model_path} on {device}: not enough memory, {weights_bytes} bytes"
            f" of weights and {kv_bytes} of KV are needed, {available} are available"
        )


def bytes_per_weight(config: EngineConfig, source: Checkpoint) -> float:
    """Return the average bytes per weight once loaded on the device."""
    dtype, filed = DTYPES[config.dtype], source.filed_bits()
    linear, _ = choose_linear(config.device.partition(":")[0], dtype, config.quantisation)
    kept = sum(count * linear.bytes_per_weight(dtype, bits) for bits, count in filed.items())
    return kept / max(filed.total(), 1)


def _kv_blocks(
    config: EngineConfig, shape: DecoderShape, dtype: torch.dtype, draft: DraftFiles | None
) -> int:
    """Return the number of KV blocks of every rank: as many as fit beside the largest shard."""
    split = parallel_config(config)
    shards = [ModelShard(shape, split, rank).shape for rank in range(split.ranks)]
    token_bytes = max(kv_format(config).bytes_per_token(shard) for shard in shards)
    if draft is not None:
        token_bytes += draft.bytes_per_token(dtype)
    block_bytes = token_bytes * BLOCK_TOKENS
    blocks = config.kv_memory_bytes // block_bytes
    if blocks < 2:
        raise CheckpointError(
            f"cannot serve with kv_memory_bytes {config.kv_memory_bytes}: one block of"
            f" {BLOCK_TOKENS} tokens takes {block_bytes}, and at least two are needed"
        )
    return blocks

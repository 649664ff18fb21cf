"""From a configuration to an engine ready to step: memory asked first, weights read second."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch._C._distributed_c10d import Store

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.distributed.shards import ModelShard, ParallelConfig
from nodeagent.engine.draft_loading import DraftModelFiles, Eagle3HeadFiles, TargetModel, open_draft
from nodeagent.engine.kernels.huge_pages import trim_heap
from nodeagent.engine.kernels.selection import choose_linear
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.kvcache.kv_format import DTYPES, KV_DTYPES, KvFormat
from nodeagent.engine.kvcache.tier_setup import open_tiers
from nodeagent.engine.memory import memory_uses
from nodeagent.engine.model.families import adapters_of, build_model, check_weights
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.pipeline_depth import PipelineDepth
from nodeagent.engine.scheduler.prefill_budget import PrefillBudget
from nodeagent.engine.speculative.draft_model import DraftModel
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.tokenizer.loading import read_vocabulary
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import Checkpoint, open_checkpoint
from nodeagent.engine.workers.commands import LoadShard
from nodeagent.engine.workers.rank0 import Rank0Executor
from nodeagent.engine.workers.rendezvous import WorkerRendezvous
from nodeagent.engine.workers.worker_group import WorkerGroup

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with what its server must know of the model."""

    engine: EngineCore
    vocabulary: Vocabulary
    template: ChatTemplate | None
    context_tokens: int
    weights_bytes: int
    load_s: float
    dtype: torch.dtype
    adding: ActiveAdapters
    """What adapters may change of the model."""


def load_engine(config: EngineConfig, crew: WorkerGroup | None = None) -> LoadedEngine:
    """Load what `config` names, or raise CheckpointError in words before memory is spent.

    What is wrong with a vocabulary alone shows only once weights are there. Where the model is
    split, `crew` are the other ranks, and what is loaded is the front.
    """
    started_s = time.monotonic()
    dtype, split = DTYPES[config.dtype], parallel_config(config)
    source, vocabulary, draft = open_checkpoint(Path(config.model_path)), None, None
    try:
        shape = source.shape
        if config.draft_path:
            vocabulary = _vocabulary(config, source)
            draft = open_draft(config, shape, vocabulary)
        context = min(config.context_tokens_max, shape.context_tokens)
        weights_bytes = int(shape.parameters() * bytes_per_weight(config, source))
        if draft is not None:
            weights_bytes += draft.weights_bytes(dtype)
        split.check(shape)
        check_memory(config, source, 0, draft)
        check_weights(shape, source, split)
        gathering = wait_for_remote_workers(config, crew) if crew is not None else None
        if crew is not None:
            crew.tell(LoadShard())
        ranks = Communicator(split)
        own, ahead, arrived = load_shard(config, source, ranks, draft)
        try:
            # Only then, for it keeps the interpreter to itself: meanwhile matrices are read.
            vocabulary = vocabulary or _vocabulary(config, source)
        finally:
            arrived()
        adding = own.active_adapters if split.ranks == 1 else adapters_of(shape, source)
    finally:
        source.close()
        if draft is not None:
            draft.close()
    if config.graphs and split.ranks == 1:
        own.capture(config.sequences_max, context)
    runner: ModelRunner | Rank0Executor = own
    if crew is not None and crew.members:
        crew.wait_loaded()
        rendezvous_file(config).unlink(missing_ok=True)
        crew.join(config.stall_s, draft.layers if isinstance(draft, Eagle3HeadFiles) else ())
        connect_ranks(
            config, ranks, gathering.store(split.ranks, config.stall_s) if gathering else None
        )
        runner = Rank0Executor(own, crew, shape, ranks)
    trim_heap()
    template = vocabulary.chat_template
    return LoadedEngine(
        engine=_engine(config, runner, own.blocks, shape, ahead),
        vocabulary=vocabulary,
        template=(
            ChatTemplate(
                *(template, vocabulary.bos_token, vocabulary.eos_token, vocabulary.special_tokens)
            )
            if template
            else None
        ),
        context_tokens=context,
        weights_bytes=weights_bytes,
        load_s=round(time.monotonic() - started_s, 3),
        dtype=dtype,
        adding=adding,
    )


def _vocabulary(config: EngineConfig, source: Checkpoint) -> Vocabulary:
    vocabulary = read_vocabulary(source)
    if vocabulary.size > source.shape.vocabulary:
        raise CheckpointError(
            f"cannot load {config.model_path}: {vocabulary.size} tokens, but embeddings for"
            f" {source.shape.vocabulary}"
        )
    return vocabulary


def parallel_config(config: EngineConfig) -> ParallelConfig:
    """Return into what the model is to be split."""
    return ParallelConfig(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)


def local_ranks(config: EngineConfig) -> range:
    """Return the ranks on this node: all of them, unless it is one of a group's."""
    place, nodes = (config.group.place, config.group.nodes) if config.group else (0, 1)
    return parallel_config(config).on(place, nodes)


def wait_for_remote_workers(config: EngineConfig, crew: WorkerGroup) -> WorkerRendezvous | None:
    """Wait for the ranks on other nodes, if there are any, and take them into the crew."""
    if config.group is None:
        return None
    gathering = WorkerRendezvous(config.group)
    others = range(local_ranks(config).stop, parallel_config(config).ranks)
    crew.add(gathering.wait(others, config.join_s))
    return gathering


def load_shard(
    config: EngineConfig,
    source: Checkpoint,
    ranks: Communicator,
    draft: DraftModelFiles | Eagle3HeadFiles | None = None,
) -> tuple[ModelRunner, DraftModel | None, Callable[[], None]]:
    """Load what one of `ranks` holds of the model, and what drafts for it.

    The last of what is returned waits for matrices still on their way; see `Weights.begin`.
    """
    torch.set_num_threads(config.threads)
    dtype, shape, device = DTYPES[config.dtype], source.shape, _device(config, ranks.rank)
    linear, reason = choose_linear(device, dtype, config.quantisation)
    log.info("linear backend", extra={"fields": {"name": linear.name, "because": reason}})
    context = min(config.context_tokens_max, shape.context_tokens)
    model = build_model(shape, source, device, dtype, context, linear, ranks)
    blocks, form = _kv_blocks(config, shape, dtype, draft), kv_format(config)
    runner = ModelRunner(model, blocks, device, dtype, form)
    log.info("kv", extra={"fields": {"blocks": blocks, "kept": str(form.dtype)}})
    if draft is None:
        return runner, None, model.wait_for_weights
    ahead = draft.load(config, runner, model, TargetModel(source, shape, ranks))
    return runner, ahead, model.wait_for_weights


def kv_format(config: EngineConfig) -> KvFormat:
    """Return how keys and values are kept: as they are computed where nothing is said."""
    return KvFormat(KV_DTYPES[config.kv_dtype or config.dtype])


def connect_ranks(config: EngineConfig, ranks: Communicator, store: Store | None = None) -> None:
    """Have this rank meet the others, by `store` where some are on other nodes.

    Each wait for another is bounded by `stall_s`.
    """
    ranks.join(store or rendezvous_file(config), _device(config, ranks.rank), config.stall_s)


def rendezvous_file(config: EngineConfig) -> Path:
    """Return the file by which ranks meet."""
    return Path(f"{config.socket}.ranks")


def _device(config: EngineConfig, rank: int) -> str:
    if config.device == "cpu":
        return "cpu"
    kind, _, number = config.device.partition(":")
    return f"{kind}:{int(number) + rank - local_ranks(config).start}"


def _engine(
    config: EngineConfig,
    runner: ModelRunner | Rank0Executor,
    blocks: int,
    shape: DecoderShape,
    ahead: DraftModel | None,
) -> EngineCore:
    stages = parallel_config(config).pipeline
    mover = open_tiers(config, runner, shape, kv_format(config))
    batching = BatchScheduler(
        StepLimits(config.batch_tokens_max, config.sequences_max),
        BlockPool(blocks),
        # A token comes once a batch has passed through each stage.
        PrefillBudget(config.interval_ms / 1000 / stages),
        PipelineDepth(stages),
        lower_tiers=mover.host if mover else frozenset(),
        swap_or_recompute=mover.swap_or_recompute if mover else None,
    )
    speculation = None
    if config.draft_tokens_max:
        speculation = Speculation(config.draft_tokens_max, config.batch_tokens_max, ahead)
    return EngineCore(runner, batching, mover, speculation)


def _kv_blocks(
    config: EngineConfig,
    shape: DecoderShape,
    dtype: torch.dtype,
    draft: DraftModelFiles | Eagle3HeadFiles | None,
) -> int:
    """Return how many blocks each rank has: as many as the one with the largest share."""
    split = parallel_config(config)
    shares = [ModelShard(shape, split, rank).shape for rank in range(split.ranks)]
    token_bytes = max(kv_format(config).bytes_per_token(share) for share in shares)
    if draft is not None:
        token_bytes += draft.bytes_per_token(dtype)
    block_bytes = token_bytes * BLOCK_TOKENS
    blocks = config.kv_memory_bytes // block_bytes
    if blocks < 2:
        raise CheckpointError(
            f"cannot serve with kv_memory_bytes {config.kv_memory_bytes}: one block of"
            f" {BLOCK_TOKENS} tokens takes {block_bytes}, and two are the least"
        )
    return blocks


def bytes_per_weight(config: EngineConfig, source: Checkpoint) -> float:
    """Return what the device keeps of each weight, on the whole."""
    dtype, filed = DTYPES[config.dtype], source.filed_bits()
    linear, _ = choose_linear(config.device.partition(":")[0], dtype, config.quantisation)
    kept = sum(count * linear.bytes_per_weight(dtype, bits) for bits, count in filed.items())
    return kept / max(filed.total(), 1)


def check_memory(
    config: EngineConfig,
    source: Checkpoint,
    rank: int,
    draft: DraftModelFiles | Eagle3HeadFiles | None = None,
) -> None:
    """Raise CheckpointError where the rank's share is too much for its device.

    The host's memory all ranks on it share: the first of them asks for all.
    """
    shape, split = source.shape, parallel_config(config)
    device, here = _device(config, rank), local_ranks(config)
    ranks, host_bytes = range(rank, rank + 1), 0
    if device == "cpu":
        ranks, host_bytes = here, config.kv_host_bytes
        if rank != here.start:
            return
    weights = sum(ModelShard(shape, split, each).parameters() for each in ranks)
    weights_bytes = int(weights * bytes_per_weight(config, source))
    weights_bytes += draft.weights_bytes(DTYPES[config.dtype]) if draft else 0
    kv_bytes = config.kv_memory_bytes * len(ranks) + host_bytes
    available = available_bytes(device)
    if device == "cpu" and config.memory_max_bytes:
        available = min(available, config.memory_max_bytes)
    if weights_bytes + kv_bytes > available:
        raise CheckpointError(
            f"cannot load {config.model_path} on {device}: {weights_bytes} bytes of weights"
            f" and {kv_bytes} of KV are needed, {available} are available"
        )


def available_bytes(device: str) -> int:
    """Return what may still be taken of the device's memory, or refuse a device that is none."""
    if device != "cpu":
        if not torch.cuda.is_available():
            raise CheckpointError(f"cannot use {device}: torch sees no CUDA device")
        return int(torch.cuda.mem_get_info(device)[0])
    free = [int(psutil.virtual_memory().available)]
    return min(free + [use.ceiling_bytes - use.used_bytes for use in memory_uses(0)])

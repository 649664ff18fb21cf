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
from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.core.step import Engine
from nodeagent.engine.distributed.collectives import Ranks
from nodeagent.engine.distributed.commands import Load
from nodeagent.engine.distributed.rank0 import Front
from nodeagent.engine.distributed.rendezvous import Gathering
from nodeagent.engine.distributed.shards import Share, Split
from nodeagent.engine.distributed.worker_group import Crew
from nodeagent.engine.kernels.cpu.huge_pages import give_back
from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.kvcache.tier_setup import open_tiers
from nodeagent.engine.memory import uses
from nodeagent.engine.model.families import adding_of, build, survey
from nodeagent.engine.model.layers.kv_format import DTYPES, KV_DTYPES, KvFormat
from nodeagent.engine.model.layers.linear import bytes_kept, choose
from nodeagent.engine.model.layers.lora import Adding
from nodeagent.engine.model.shape import CheckpointError, ModelShape
from nodeagent.engine.scheduler.batching import Batching, Limits
from nodeagent.engine.scheduler.pipeline_depth import Underway
from nodeagent.engine.scheduler.prefill_budget import Pace
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS
from nodeagent.engine.speculative.draft_loading import DraftModel, Head, Served, open_draft
from nodeagent.engine.speculative.draft_model import Ahead
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.tokenizer.chat_template import ChatTemplate
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import Checkpoint, open_checkpoint

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine with what its server must know of the model."""

    engine: Engine
    vocabulary: Vocabulary
    template: ChatTemplate | None
    context_tokens: int
    weights_bytes: int
    load_s: float
    dtype: torch.dtype
    adding: Adding
    """What adapters may change of the model."""


def load(config: EngineConfig, crew: Crew | None = None) -> Loaded:
    """Load what `config` names, or raise CheckpointError in words before memory is spent.

    What is wrong with a vocabulary alone shows only once weights are there. Where the model is
    split, `crew` are the other ranks, and what is loaded is the front.
    """
    started_s = time.monotonic()
    dtype, split = DTYPES[config.dtype], split_of(config)
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
        need_memory(config, source, 0, draft)
        survey(shape, source, split)
        gathering = gather(config, crew) if crew is not None else None
        if crew is not None:
            crew.tell(Load())
        ranks = Ranks(split)
        own, ahead, arrived = open_share(config, source, ranks, draft)
        try:
            # Only then, for it keeps the interpreter to itself: meanwhile matrices are read.
            vocabulary = vocabulary or _vocabulary(config, source)
        finally:
            arrived()
        adding = own.adding if split.ranks == 1 else adding_of(shape, source)
    finally:
        source.close()
        if draft is not None:
            draft.close()
    if config.graphs and split.ranks == 1:
        own.capture(config.sequences_max, context)
    runner: Runner | Front = own
    if crew is not None and crew.members:
        crew.wait_loaded()
        meeting(config).unlink(missing_ok=True)
        crew.join(config.stall_s, draft.layers if isinstance(draft, Head) else ())
        meet(config, ranks, gathering.store(split.ranks, config.stall_s) if gathering else None)
        runner = Front(own, crew, shape, ranks)
    give_back()
    template = vocabulary.chat_template
    return Loaded(
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
    vocabulary = source.vocabulary()
    if vocabulary.size > source.shape.vocabulary:
        raise CheckpointError(
            f"cannot load {config.model_path}: {vocabulary.size} tokens, but embeddings for"
            f" {source.shape.vocabulary}"
        )
    return vocabulary


def split_of(config: EngineConfig) -> Split:
    """Return into what the model is to be split."""
    return Split(config.tensor_parallel, config.pipeline_parallel, config.expert_parallel)


def ranks_here(config: EngineConfig) -> range:
    """Return the ranks on this node: all of them, unless it is one of a group's."""
    place, nodes = (config.group.place, config.group.nodes) if config.group else (0, 1)
    return split_of(config).on(place, nodes)


def gather(config: EngineConfig, crew: Crew) -> Gathering | None:
    """Wait for the ranks on other nodes, if there are any, and take them into the crew."""
    if config.group is None:
        return None
    gathering = Gathering(config.group)
    others = range(ranks_here(config).stop, split_of(config).ranks)
    crew.add(gathering.wait(others, config.join_s))
    return gathering


def open_share(
    config: EngineConfig,
    source: Checkpoint,
    ranks: Ranks,
    draft: DraftModel | Head | None = None,
) -> tuple[Runner, Ahead | None, Callable[[], None]]:
    """Load what one of `ranks` holds of the model, and what drafts for it.

    The last of what is returned waits for matrices still on their way; see `Weights.begin`.
    """
    torch.set_num_threads(config.threads)
    dtype, shape, device = DTYPES[config.dtype], source.shape, _device(config, ranks.rank)
    keeping, why = choose(device, dtype, config.quantisation)
    log.info("matrices", extra={"fields": {"kept": keeping, "because": why}})
    context = min(config.context_tokens_max, shape.context_tokens)
    model = build(shape, source, device, dtype, context, keeping, ranks)
    blocks, form = _kv_blocks(config, shape, dtype, draft), kv_format(config)
    runner = Runner(model, blocks, device, dtype, form)
    log.info("kv", extra={"fields": {"blocks": blocks, "kept": str(form.dtype)}})
    if draft is None:
        return runner, None, model.arrived
    ahead = draft.load(config, runner, model, Served(source, shape, ranks))
    return runner, ahead, model.arrived


def kv_format(config: EngineConfig) -> KvFormat:
    """Return how keys and values are kept: as they are computed where nothing is said."""
    return KvFormat(KV_DTYPES[config.kv_dtype or config.dtype])


def meet(config: EngineConfig, ranks: Ranks, store: Store | None = None) -> None:
    """Have this rank meet the others, by `store` where some are on other nodes.

    Each wait for another is bounded by `stall_s`.
    """
    ranks.join(store or meeting(config), _device(config, ranks.rank), config.stall_s)


def meeting(config: EngineConfig) -> Path:
    """Return the file by which ranks meet."""
    return Path(f"{config.socket}.ranks")


def _device(config: EngineConfig, rank: int) -> str:
    if config.device == "cpu":
        return "cpu"
    kind, _, number = config.device.partition(":")
    return f"{kind}:{int(number) + rank - ranks_here(config).start}"


def _engine(
    config: EngineConfig,
    runner: Runner | Front,
    blocks: int,
    shape: ModelShape,
    ahead: Ahead | None,
) -> Engine:
    stages = split_of(config).pipeline
    batching = Batching(
        Limits(config.batch_tokens_max, config.sequences_max),
        Blocks(blocks),
        # A token comes once a batch has passed through each stage.
        Pace(config.interval_ms / 1000 / stages),
        underway=Underway(stages),
    )
    mover = open_tiers(config, runner, shape, kv_format(config))
    if mover is not None:
        batching.below, batching.trade = mover.host, mover.trade
    speculation = None
    if config.draft_tokens_max:
        speculation = Speculation(config.draft_tokens_max, config.batch_tokens_max, ahead)
    return Engine(runner, batching, mover, speculation)


def _kv_blocks(
    config: EngineConfig, shape: ModelShape, dtype: torch.dtype, draft: DraftModel | Head | None
) -> int:
    """Return how many blocks each rank has: as many as the one with the largest share."""
    split = split_of(config)
    shares = [Share(shape, split, rank).shape for rank in range(split.ranks)]
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
    keeping, _ = choose(config.device.partition(":")[0], dtype, config.quantisation)
    kept = sum(count * bytes_kept(keeping, dtype, bits) for bits, count in filed.items())
    return kept / max(filed.total(), 1)


def need_memory(
    config: EngineConfig,
    source: Checkpoint,
    rank: int,
    draft: DraftModel | Head | None = None,
) -> None:
    """Raise CheckpointError where the rank's share is too much for its device.

    The host's memory all ranks on it share: the first of them asks for all.
    """
    shape, split = source.shape, split_of(config)
    device, here = _device(config, rank), ranks_here(config)
    ranks, host_bytes = range(rank, rank + 1), 0
    if device == "cpu":
        ranks, host_bytes = here, config.kv_host_bytes
        if rank != here.start:
            return
    weights = sum(Share(shape, split, each).parameters() for each in ranks)
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
    return min(free + [use.ceiling_bytes - use.used_bytes for use in uses(0)])

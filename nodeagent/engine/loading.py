"""Loads the engine of a decoder from its configuration; on a split model, as rank 0."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.chat.chat_template import ChatTemplate
from nodeagent.engine.core.first_touch import FirstTouch, first_touch
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.parked_model import ParkedModel
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.draft_loading import Eagle3HeadFiles, open_draft
from nodeagent.engine.kernels.huge_pages import trim_heap
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.kvcache.kv_format import DTYPES
from nodeagent.engine.kvcache.tier_setup import KvBlockForm, block_form, open_tiers
from nodeagent.engine.model.families import adapters_of, check_weights
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.pipeline_depth import PipelineDepth
from nodeagent.engine.scheduler.prefill_budget import PrefillBudget
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.tokenizer.loading import read_vocabulary
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import Checkpoint, open_checkpoint
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.gguf_header import KnownHeader
from nodeagent.engine.workers.commands import LoadShard
from nodeagent.engine.workers.rank0 import Rank0Executor
from nodeagent.engine.workers.rendezvous import WorkerRendezvous
from nodeagent.engine.workers.shard_loading import (
    DraftFiles,
    LoadedShard,
    bytes_per_weight,
    check_memory,
    connect_ranks,
    kv_format,
    load_shard,
    local_ranks,
    parallel_config,
    rendezvous_file,
)
from nodeagent.engine.workers.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine core, and what its server needs to know of the model."""

    engine: EngineCore
    vocabulary: Vocabulary
    template: ChatTemplate | None
    context_tokens: int
    weights_bytes: int
    load_s: float
    dtype: torch.dtype
    kv_blocks: KvBlockForm
    active_adapters: ActiveAdapters
    """The modules of the whole model that adapters can change."""
    known: KnownHeader | None
    """The header of the model's GGUF file, to load it again after a sleep."""
    parked: ParkedModel
    first_touch: FirstTouch


def load_engine(config: EngineConfig, workers: WorkerGroup | None = None) -> LoadedEngine:
    """Load the engine of `config`; on a split model this process is rank 0 of `workers`.

    Raises CheckpointError before memory is spent, if the model cannot be loaded. Some faults of a
    vocabulary are found only after the weights are read.
    """
    started_s = time.monotonic()
    dtype, split = DTYPES[config.dtype], parallel_config(config)
    source, draft = open_checkpoint(Path(config.model_path)), None
    communicator, vocabulary = Communicator(split), None
    try:
        shape = source.shape
        if config.draft_path:
            vocabulary = _read_vocabulary(config, source)
            draft = open_draft(config, shape, vocabulary)
        context_tokens = min(config.context_tokens_max, shape.context_tokens)
        weights_bytes = int(shape.parameters() * bytes_per_weight(config, source))
        weights_bytes += draft.weights_bytes(dtype) if draft is not None else 0
        split.check(shape)
        check_memory(config, source, 0, draft)
        check_weights(shape, source, split)
        rendezvous = _start_workers_loading(config, workers) if workers is not None else None
        shard = load_shard(config, source, communicator, draft)
        try:
            # While matrices are being read, because it holds the interpreter lock.
            vocabulary = vocabulary or _read_vocabulary(config, source)
        finally:
            shard.wait_weights()
        adapters = shard.runner.active_adapters if split.ranks == 1 else adapters_of(shape, source)
    finally:
        source.close()
        if draft is not None:
            draft.close()
    if config.graphs and split.ranks == 1:
        shard.runner.capture(config.sequences_max, context_tokens)
    executor: ModelRunner | Rank0Executor = shard.runner
    if workers is not None and workers.workers:
        _connect_workers(config, workers, communicator, rendezvous, draft)
        executor = Rank0Executor(shard.runner, workers, shape, communicator)
    trim_heap()
    parked = ParkedModel(shard.weight_regions, Path(config.socket).parent)
    if config.sleeps and can_sleep(config):
        parked.prepare()
    return LoadedEngine(
        engine=_build_core(config, executor, shard, shape),
        vocabulary=vocabulary,
        template=_chat_template(vocabulary),
        context_tokens=context_tokens,
        weights_bytes=weights_bytes,
        load_s=round(time.monotonic() - started_s, 3),
        dtype=dtype,
        kv_blocks=block_form(config, shape, kv_format(config)),
        active_adapters=adapters,
        known=source.known if isinstance(source, GgufFile) else None,
        parked=parked,
        first_touch=first_touch(executor, config.memory_max_bytes, sleeps=config.sleeps),
    )


def can_sleep(config: EngineConfig) -> bool:
    """Return whether the model of this process can be dropped and loaded again by itself."""
    return parallel_config(config).ranks == 1 and not config.draft_path


def reload_runner(config: EngineConfig, known: KnownHeader | None) -> ModelRunner:
    """Load the model of an engine that slept. Raises CheckpointError.

    The vocabulary, the scheduler and the tiers of the KV cache were kept, and the header `known` of
    its file.
    """
    source = open_checkpoint(Path(config.model_path), known)
    try:
        check_memory(config, source, 0)
        shard = load_shard(config, source, Communicator(parallel_config(config)))
        shard.wait_weights()
    finally:
        source.close()
    if config.graphs:
        shard.runner.capture(
            config.sequences_max, min(config.context_tokens_max, source.shape.context_tokens)
        )
    return shard.runner


def _read_vocabulary(config: EngineConfig, source: Checkpoint) -> Vocabulary:
    vocabulary = read_vocabulary(source)
    if vocabulary.size > source.shape.vocabulary:
        raise CheckpointError(
            f"cannot load {config.model_path}: {vocabulary.size} tokens, but embeddings for"
            f" {source.shape.vocabulary}"
        )
    return vocabulary


def _chat_template(vocabulary: Vocabulary) -> ChatTemplate | None:
    if not vocabulary.chat_template:
        return None
    return ChatTemplate(
        vocabulary.chat_template,
        vocabulary.bos_token,
        vocabulary.eos_token,
        vocabulary.special_tokens,
    )


def _start_workers_loading(config: EngineConfig, workers: WorkerGroup) -> WorkerRendezvous | None:
    """Wait for the workers on other nodes, if there are any, then have all load their shards."""
    rendezvous = None
    if config.group is not None:
        rendezvous = WorkerRendezvous(config.group)
        remote = range(local_ranks(config).stop, parallel_config(config).ranks)
        workers.add(rendezvous.wait(remote, config.join_s))
    workers.broadcast(LoadShard())
    return rendezvous


def _connect_workers(
    config: EngineConfig,
    workers: WorkerGroup,
    communicator: Communicator,
    rendezvous: WorkerRendezvous | None,
    draft: DraftFiles | None,
) -> None:
    """Wait until the workers have loaded, then connect all ranks."""
    workers.wait_loaded()
    rendezvous_file(config).unlink(missing_ok=True)
    workers.join(config.stall_s, draft.layers if isinstance(draft, Eagle3HeadFiles) else ())
    ranks = communicator.split.ranks
    store = rendezvous.open_store(ranks, config.stall_s) if rendezvous is not None else None
    connect_ranks(config, communicator, store)


def _build_core(
    config: EngineConfig,
    executor: ModelRunner | Rank0Executor,
    shard: LoadedShard,
    shape: DecoderShape,
) -> EngineCore:
    stages = parallel_config(config).pipeline
    mover = open_tiers(config, executor, shape, kv_format(config))
    scheduler = BatchScheduler(
        StepLimits(config.batch_tokens_max, config.sequences_max),
        BlockPool(shard.runner.blocks, time.monotonic),
        # A token is produced once a batch has passed through every stage.
        PrefillBudget(config.interval_ms / 1000 / stages),
        PipelineDepth(stages),
        lower_tiers=mover.host if mover is not None else frozenset(),
        swap_or_recompute=mover.swap_or_recompute if mover is not None else None,
    )
    speculation = None
    if config.draft_tokens_max:
        speculation = Speculation(
            config.draft_tokens_max, config.batch_tokens_max, shard.draft_model
        )
    return EngineCore(executor, scheduler, mover, speculation)

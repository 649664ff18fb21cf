"""From a configuration to an engine ready to step: memory asked first, weights read second."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.checkpoint.opening import open_checkpoint
from nodeagent.engine.decide.batching import Batching, Limits
from nodeagent.engine.decide.blocks import Blocks
from nodeagent.engine.decide.pace import Pace
from nodeagent.engine.decide.sequence import BLOCK_TOKENS
from nodeagent.engine.kv_tiers.opening import open_tiers
from nodeagent.engine.layers.linear import choose
from nodeagent.engine.layers.lora import Adding
from nodeagent.engine.models.families import build, survey
from nodeagent.engine.models.shape import CheckpointError, ModelShape
from nodeagent.engine.runner import Runner
from nodeagent.engine.speculate.ahead import Ahead
from nodeagent.engine.speculate.opening import DraftModel, Head, open_draft
from nodeagent.engine.speculate.speculation import Speculation
from nodeagent.engine.step import Engine
from nodeagent.engine.template import ChatTemplate
from nodeagent.engine.vocabulary import Vocabulary

log = logging.getLogger(__name__)

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED: Final = Path("/sys/fs/cgroup/memory.current")


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


def load(config: EngineConfig) -> Loaded:
    """Load what `config` names, or raise CheckpointError in words before memory is spent."""
    started_s = time.monotonic()
    torch.set_num_threads(config.threads)
    dtype = _DTYPES[config.dtype]
    source, vocabulary = open_checkpoint(Path(config.model_path))
    draft = None
    try:
        shape = source.shape
        draft = open_draft(config, shape, vocabulary)
        context = min(config.context_tokens_max, shape.context_tokens)
        weights_bytes = shape.parameters() * dtype.itemsize
        if draft is not None:
            weights_bytes += draft.weights_bytes(dtype)
        blocks = _kv_blocks(config, shape, dtype, draft)
        _need_memory(config, weights_bytes)
        if vocabulary.size > shape.vocabulary:
            raise CheckpointError(
                f"cannot load {config.model_path}: {vocabulary.size} tokens, but embeddings for"
                f" {shape.vocabulary}"
            )
        survey(shape, source)
        keeping, why = choose(config.device, dtype, config.quantisation == "file")
        log.info("matrices", extra={"fields": {"kept": keeping, "because": why}})
        model = build(shape, source, config.device, dtype, context, keeping)
        runner = Runner(model, blocks, config.device, dtype)
        ahead = draft.load(config, runner, model, keeping) if draft is not None else None
    finally:
        source.close()
        if draft is not None:
            draft.close()
    limits = Limits(config.batch_tokens_max, config.sequences_max)
    template = vocabulary.chat_template
    return Loaded(
        engine=_engine(
            config,
            runner,
            Batching(limits, Blocks(blocks), Pace(config.interval_ms / 1000)),
            shape,
            dtype,
            ahead,
        ),
        vocabulary=vocabulary,
        template=(
            ChatTemplate(template, vocabulary.bos_token, vocabulary.eos_token) if template else None
        ),
        context_tokens=context,
        weights_bytes=weights_bytes,
        load_s=round(time.monotonic() - started_s, 3),
        dtype=dtype,
        adding=model.adding,
    )


def _engine(
    config: EngineConfig,
    runner: Runner,
    batching: Batching,
    shape: ModelShape,
    dtype: torch.dtype,
    ahead: Ahead | None,
) -> Engine:
    mover = open_tiers(config, runner, shape, dtype)
    if mover is not None:
        batching.below, batching.trade = mover.host, mover.trade
    return Engine(runner, batching, mover, _speculation(config, ahead))


def _speculation(config: EngineConfig, ahead: Ahead | None) -> Speculation | None:
    if config.draft_tokens_max == 0:
        return None
    return Speculation(config.draft_tokens_max, rows_max=config.batch_tokens_max, ahead=ahead)


def _kv_blocks(
    config: EngineConfig, shape: ModelShape, dtype: torch.dtype, draft: DraftModel | Head | None
) -> int:
    token_bytes = shape.kv_bytes_per_token(dtype)
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


def _need_memory(config: EngineConfig, weights_bytes: int) -> None:
    needed = weights_bytes + config.kv_memory_bytes
    if config.device == "cpu":
        needed += config.kv_host_bytes
    available = available_bytes(config.device)
    if needed > available:
        raise CheckpointError(
            f"cannot load {config.model_path} on {config.device}: {weights_bytes} bytes of weights"
            f" and {config.kv_memory_bytes} of KV are needed, {available} are available"
        )


def available_bytes(device: str) -> int:
    """Return what may still be taken of the device's memory, or refuse a device that is none."""
    if device != "cpu":
        if not torch.cuda.is_available():
            raise CheckpointError(f"cannot use {device}: torch sees no CUDA device")
        return int(torch.cuda.mem_get_info(device)[0])
    available = int(psutil.virtual_memory().available)
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
        if limit.isdigit():
            available = min(available, int(limit) - int(_CGROUP_USED.read_text()))
    except OSError:
        # No cgroup v2 here: the machine's own figure is the limit.
        return available
    return available

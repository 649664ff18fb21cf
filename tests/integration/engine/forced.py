"""Runs a model over known tokens and returns the logits that predict each of them."""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import ModelExecutor
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.model.families import build_model, check_weights
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.weights.lora_adapter import LoraAdapter, prefix_cache_salt
from nodeagent.engine.weights.weight_source import WeightSource
from ops.golden import tiny

BLOCKS = 24


def logits_of(
    shape: DecoderShape,
    source: WeightSource,
    prompts: list[list[int]],
    budget: int,
    adapters: Ordered[LoraAdapter | None] = (),
) -> list[list[Tensor]]:
    """Run `prompts` together with their last tokens forced as output; return the logits of those.

    With `adapters` each prompt runs with its own.
    """
    check_weights(shape, source)
    runner = ModelRunner(
        build_model(shape, source, "cpu", torch.float32, 128), BLOCKS, "cpu", torch.float32
    )
    return logits_by(runner, prompts, budget, adapters)


def logits_by(
    executor: ModelExecutor,
    prompts: list[list[int]],
    budget: int,
    adapters: Ordered[LoraAdapter | None] = (),
) -> list[list[Tensor]]:
    """Do the same with an executor."""
    scheduler = BatchScheduler(StepLimits(budget, 4), BlockPool(BLOCKS))
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for number, tokens in enumerate(prompts):
        prompt = tokens[: -tiny.ANSWER_TOKENS]
        adapter = adapters[number] if adapters else None
        stop = StopConditions(tiny.ANSWER_TOKENS, frozenset())
        scheduler.submit(Sequence(number, prompt, stop, prefix_cache_salt(b"", adapter), adapter))
    while scheduler.has_work:
        batch = scheduler.next_batch()
        logits = executor.begin(batch)()
        for chunk in batch.chunks:
            scheduler.mark_computed(chunk)
        due = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        for sequence, row in zip(due, logits, strict=True):
            rows[sequence.number].append(row.clone())
            if sequence.append(prompts[sequence.number][len(sequence.tokens)]):
                scheduler.remove(sequence)
    return rows

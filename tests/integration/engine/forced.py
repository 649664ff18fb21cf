"""Running a model over known tokens and keeping the logits that told each."""

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.core.step import Computes
from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.model.families import build, survey
from nodeagent.engine.model.layers.lora import Adapter, salted
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.scheduler.batching import Batching, Limits
from nodeagent.engine.scheduler.sequence import Ending, Sequence
from nodeagent.engine.weights.weight_loading import WeightSource
from ops.golden import tiny

BLOCKS = 24


def logits_of(
    shape: ModelShape,
    source: WeightSource,
    prompts: list[list[int]],
    budget: int,
    adapters: Ordered[Adapter | None] = (),
) -> list[list[Tensor]]:
    """Run `prompts` together, their last tokens forced as output; return what told each.

    Where `adapters` are given, each prompt runs with its own.
    """
    survey(shape, source)
    runner = Runner(build(shape, source, "cpu", torch.float32, 128), BLOCKS, "cpu", torch.float32)
    return logits_by(runner, prompts, budget, adapters)


def logits_by(
    runner: Computes,
    prompts: list[list[int]],
    budget: int,
    adapters: Ordered[Adapter | None] = (),
) -> list[list[Tensor]]:
    """Do the same by a runner."""
    batching = Batching(Limits(budget, 4), Blocks(BLOCKS))
    rows: list[list[Tensor]] = [[] for _ in prompts]
    for number, tokens in enumerate(prompts):
        prompt = tokens[: -tiny.ANSWER_TOKENS]
        adapter = adapters[number] if adapters else None
        ending = Ending(tiny.ANSWER_TOKENS, frozenset())
        batching.submit(Sequence(number, prompt, ending, salted(b"", adapter), adapter))
    while batching.busy:
        batch = batching.next_batch()
        logits = runner.begin(batch)()
        for chunk in batch.chunks:
            batching.computed(chunk)
        due = [chunk.sequence for chunk in batch.chunks if chunk.samples]
        for sequence, row in zip(due, logits, strict=True):
            rows[sequence.number].append(row.clone())
            if sequence.append(prompts[sequence.number][len(sequence.tokens)]):
                batching.remove(sequence)
    return rows

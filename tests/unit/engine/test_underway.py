"""Several steps under way at once, one in each stage: the answers are what they would have been."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.core.step import Engine
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.batching import Batch, Limits
from nodeagent.engine.scheduler.pipeline_depth import Underway
from tests.unit.engine.test_ahead import GREEDY, drafting_with, engine_of, prompts, run, submit
from tests.unit.engine.tiny import llama

DRAWN = SamplingParams(temperature=1.0, seed=3)


class Stages:
    """A runner that is watched: which batches are under way, and that they end in their order."""

    def __init__(self, blocks: int) -> None:
        self._runner = Runner(llama(1), blocks, "cpu", torch.float32)
        self.underway: list[Batch] = []
        self.seen: list[list[Batch]] = []

    def begin(self, batch: Batch) -> Callable[[], Tensor]:
        self.underway.append(batch)
        self.seen.append(list(self.underway))
        logits = self._runner.run(batch)

        def wait() -> Tensor:
            assert self.underway.pop(0) is batch
            return logits

        return wait

    def clear(self, blocks: list[int]) -> None:
        self._runner.clear(blocks)


def staged(underway: int, blocks: int = 64, seed: int | None = None) -> tuple[Engine, Stages]:
    stages = Stages(blocks)
    engine = engine_of(drafting_with(seed, blocks), blocks, stages, Limits(24, 12))  # type: ignore[arg-type]
    engine.batching.underway = Underway(underway)
    return engine, stages


@pytest.mark.parametrize(
    ("params", "blocks", "seed"),
    [(GREEDY, 9, None), (GREEDY, 64, 2), (DRAWN, 64, None), (DRAWN, 9, 1)],
)
def test_the_answers_are_those_of_one_step_at_a_time(
    params: SamplingParams, blocks: int, seed: int | None
) -> None:
    told = []
    for underway in (1, 3):
        engine, _ = staged(underway, blocks, seed)
        held = [submit(engine, n, p, params) for n, p in enumerate(prompts(5))]
        run(engine)
        told.append([sequence.tokens for sequence in held])
        assert (engine.batching.preemptions > 0) is (blocks == 9)
    assert told[0] == told[1]


def test_decodes_fall_into_even_parts_and_a_prompts_chunks_follow_one_another() -> None:
    engine, stages = staged(2)
    for number, prompt in enumerate(prompts(6)):
        submit(engine, number, prompt, tokens_max=12)
    run(engine)
    pairs = [pair for pair in stages.seen if len(pair) == 2]
    # Between the last prompt and the first end.
    decodes = [pair for pair in pairs if [one.tokens for one in pair] == [3, 3]]
    assert len(decodes) > 10
    for first, second in decodes:
        assert len(first.decodes) == len(second.decodes) == 3
        assert not {c.sequence for c in first.decodes} & {c.sequence for c in second.decodes}
    stages.seen.clear()
    submit(engine, 9, list(range(90)), tokens_max=2)
    run(engine)
    starts = [[one.chunks[0].start for one in pair] for pair in stages.seen]
    assert starts[:4] == [[0], [0, 24], [24, 48], [48, 72]]


def test_what_was_computed_for_one_that_left_is_nobodys() -> None:
    engine, stages = staged(2)
    alone, _ = staged(1)
    first, second, third = prompts(3)
    wanted = submit(alone, 2, second)
    run(alone)
    left = submit(engine, 1, first)
    stays = submit(engine, 2, second)
    while not any(chunk.sequence is left for one in stages.underway for chunk in one.chunks):
        engine.step()
    engine.cancel(1)
    # Who comes next gets its blocks while they are still written.
    submit(engine, 3, third)
    while engine.busy:
        assert all(delta.number != 1 for delta in engine.step().deltas)
    assert stays.tokens == wanted.tokens
    assert (engine.batching.blocks.held, stages.underway) == (0, [])


def test_the_way_that_serves_more_is_found_for_each_size_and_the_other_tried_again() -> None:
    def seconds(rows: int, count: int) -> float:
        # Up to four rows a batch cost what one does; many cost each its own.
        return max(rows / count, 4.0) if count > 1 else 2 * max(rows, 4.0) * 0.9

    underway = Underway(2)
    assert underway.choose(1, prompts=False) == underway.choose(8, prompts=True) == 2
    for rows, better in ((5, 1), (64, 2)):
        chosen = []
        for _ in range(400):
            count = underway.choose(rows, prompts=False)
            chosen.append(count)
            underway.note(rows // count, seconds(rows, count))
        assert chosen[0] == 2
        assert set(chosen) == {1, 2}
        assert chosen.count(better) > 350, rows
        assert chosen[-1] == better
    for _ in range(1200):
        count = underway.choose(64, prompts=False)
        underway.note(64 // count, 1.0 if count == 1 else 8.0)
    assert count == 1

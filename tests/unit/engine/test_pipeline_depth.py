"""Several batches in flight, one per pipeline stage: the outputs are those of one at a time."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.scheduler.batch import Batch, StepLimits
from nodeagent.engine.scheduler.pipeline_depth import PipelineDepth
from tests.unit.engine.test_draft_model import (
    GREEDY,
    drafting_with,
    engine_of,
    prompts,
    run,
    submit,
)
from tests.unit.engine.tiny import llama

DRAWN = SamplingParams(temperature=1.0, seed=3)


class Stages:
    """A runner that records the batches in flight, and checks that they finish in order."""

    def __init__(self, blocks: int) -> None:
        self._runner = ModelRunner(llama(1), blocks, "cpu", torch.float32)
        self.in_flight: list[Batch] = []
        self.seen: list[list[Batch]] = []

    def begin(self, batch: Batch) -> Callable[[], Tensor]:
        self.in_flight.append(batch)
        self.seen.append(list(self.in_flight))
        logits = self._runner.run(batch)

        def wait() -> Tensor:
            assert self.in_flight.pop(0) is batch
            return logits

        return wait

    def clear(self, blocks: list[int]) -> None:
        self._runner.clear(blocks)


def staged(batches: int, blocks: int = 64, seed: int | None = None) -> tuple[EngineCore, Stages]:
    stages = Stages(blocks)
    engine = engine_of(drafting_with(seed, blocks), blocks, stages, StepLimits(24, 12))  # type: ignore[arg-type]
    engine.scheduler.pipeline_depth = PipelineDepth(batches)
    return engine, stages


@pytest.mark.parametrize(
    ("params", "blocks", "seed"),
    [(GREEDY, 9, None), (GREEDY, 64, 2), (DRAWN, 64, None), (DRAWN, 9, 1)],
)
def test_outputs_equal_those_of_one_batch_at_a_time(
    params: SamplingParams, blocks: int, seed: int | None
) -> None:
    outputs = []
    for batches in (1, 3):
        engine, _ = staged(batches, blocks, seed)
        sequences = [submit(engine, n, p, params) for n, p in enumerate(prompts(5))]
        run(engine)
        outputs.append([sequence.tokens for sequence in sequences])
        assert (engine.scheduler.queues.preemptions > 0) is (blocks == 9)
    assert outputs[0] == outputs[1]


def test_decodes_are_divided_evenly_and_prompt_chunks_follow_each_other() -> None:
    engine, stages = staged(2)
    for number, prompt in enumerate(prompts(6)):
        submit(engine, number, prompt, tokens_max=12)
    run(engine)
    pairs = [pair for pair in stages.seen if len(pair) == 2]
    # After the last prompt and before the first sequence ends.
    decodes = [pair for pair in pairs if [batch.tokens for batch in pair] == [3, 3]]
    assert len(decodes) > 10
    for first, second in decodes:
        assert len(first.decodes) == len(second.decodes) == 3
        assert not {c.sequence for c in first.decodes} & {c.sequence for c in second.decodes}
    stages.seen.clear()
    submit(engine, 9, list(range(90)), tokens_max=2)
    run(engine)
    starts = [[batch.chunks[0].start for batch in pair] for pair in stages.seen]
    assert starts[:4] == [[0], [0, 24], [24, 48], [48, 72]]


def test_results_for_a_cancelled_sequence_are_discarded() -> None:
    engine, stages = staged(2)
    alone, _ = staged(1)
    first, second, third = prompts(3)
    wanted = submit(alone, 2, second)
    run(alone)
    left = submit(engine, 1, first)
    stays = submit(engine, 2, second)
    while not any(chunk.sequence is left for batch in stages.in_flight for chunk in batch.chunks):
        engine.step()
    engine.cancel(1)
    # The next sequence gets its blocks while they are still being written.
    submit(engine, 3, third)
    while engine.has_work:
        assert all(delta.number != 1 for delta in engine.step().deltas)
    assert stays.tokens == wanted.tokens
    assert (engine.scheduler.pool.used_blocks, stages.in_flight) == (0, [])


def test_the_faster_depth_is_found_for_each_size_and_the_other_is_retried() -> None:
    def seconds(rows: int, count: int) -> float:
        # A batch of up to four rows costs as much as one row; larger batches cost per row.
        return max(rows / count, 4.0) if count > 1 else 2 * max(rows, 4.0) * 0.9

    depth = PipelineDepth(2)
    assert depth.choose(1, has_prompts=False) == depth.choose(8, has_prompts=True) == 2
    for rows, better in ((5, 1), (64, 2)):
        chosen = []
        for _ in range(400):
            count = depth.choose(rows, has_prompts=False)
            chosen.append(count)
            depth.record_step(rows // count, seconds(rows, count))
        assert chosen[0] == 2
        assert set(chosen) == {1, 2}
        assert chosen.count(better) > 350, rows
        assert chosen[-1] == better
    for _ in range(1200):
        count = depth.choose(64, has_prompts=False)
        depth.record_step(64 // count, 1.0 if count == 1 else 8.0)
    assert count == 1

"""A client's request ends a step of the lowest priority early; the step is computed again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nodeagent.engine.core.generation import Generation
from nodeagent.engine.core.generation_thread import GenerationThread
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kernels.linear_backend import LinearBackend
from nodeagent.engine.kernels.step_interrupt import StepInterrupt, StepInterrupted
from nodeagent.engine.kernels.torch.linear import PlainBackend
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.batch import Batch, BatchChunk, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import PRIORITY_LOWEST, SchedulingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from tests.unit.engine.byte_vocabulary import VOCABULARY
from tests.unit.engine.test_whole import WIDE, build, native, needs_kernels

LETTERS = "abcdefgh"


class Interrupting:
    """A model that spells LETTERS, and looks at the interrupt like one with layers.

    `during` is called with the number of each step while that step runs.
    """

    def __init__(self, during: Callable[[int], None]) -> None:
        self.begun: list[list[int]] = []
        self._during = during

    def begin(self, batch: Batch, interrupt: StepInterrupt | None = None) -> Callable[[], Tensor]:
        self.begun.append([chunk.sequence.number for chunk in batch.chunks])
        self._during(len(self.begun))
        if interrupt is not None:
            interrupt.check()
        outputs = [chunk.sequence.output_tokens for chunk in batch.chunks if chunk.samples]
        logits = torch.zeros(len(outputs), 257)
        for row, output in enumerate(outputs):
            logits[row, ord(LETTERS[output])] = 1.0
        return lambda: logits


def generation(number: int, priority: int, tokens: int = 4) -> Generation:
    return Generation(
        Sequence(
            number,
            [65] * 20,
            StopConditions(tokens, frozenset({256})),
            scheduling=SchedulingParams(priority=priority),
        ),
        Sampler(SamplingParams(temperature=0), []),
        StreamDetokenizer(VOCABULARY),
        StopStrings(()),
    )


def engine_of(model: Interrupting) -> EngineCore:
    return EngineCore(model, BatchScheduler(StepLimits(64, 4), BlockPool(16)))  # type: ignore[arg-type]


def texts(engine: EngineCore, steps_max: int = 40) -> dict[int, str]:
    """Run the engine to its end; return what each generation said."""
    said: dict[int, str] = {}
    for _ in range(steps_max):
        for delta in engine.step().deltas:
            said[delta.number] = said.get(delta.number, "") + delta.text
        if not engine.has_work:
            break
    assert engine.scheduler.pool.used_blocks == 0
    return said


def test_an_interrupted_step_is_computed_again_after_the_clients_prompt() -> None:
    def during(step: int) -> None:
        if step == 3:
            engine.submit(generation(2, 50))
            engine.interrupt.set()

    engine = engine_of(model := Interrupting(during))
    engine.submit(generation(1, PRIORITY_LOWEST))
    for _ in range(3):
        output = engine.step()
    assert (output.rows, output.deltas) == (0, []), "the third step has no result"
    engine.interrupt.clear()
    assert texts(engine) == {1: "cd", 2: "abcd"}, "the first two letters came before"
    assert [sorted(numbers) for numbers in model.begun[2:5]] == [[1], [2], [1, 2]]


def test_no_two_steps_in_a_row_are_interrupted() -> None:
    engine = engine_of(model := Interrupting(lambda step: engine.interrupt.set()))
    engine.submit(generation(1, PRIORITY_LOWEST))
    assert texts(engine) == {1: "abcd"}
    assert len(model.begun) == 8, "each of four steps was begun twice"


def test_a_step_with_a_clients_prompt_is_not_interrupted() -> None:
    engine = engine_of(model := Interrupting(lambda step: engine.interrupt.set()))
    engine.submit(generation(1, 50, tokens=1))
    assert texts(engine) == {1: "a"}
    assert len(model.begun) == 1


@pytest.mark.parametrize(("priority", "interrupts"), [(PRIORITY_LOWEST, False), (1, True)])
def test_a_submission_interrupts_unless_it_yields_itself(priority: int, interrupts: bool) -> None:
    engine = engine_of(Interrupting(lambda step: None))
    worker = GenerationThread(engine, lambda deltas: None, lambda: None)
    worker.submit(generation(1, priority))
    assert engine.interrupt.is_set is interrupts
    worker._receive()
    assert not engine.interrupt.is_set, "the next step has it among its sequences"


@needs_kernels
@pytest.mark.parametrize("backend", [native, PlainBackend])
def test_layers_end_early_and_give_the_same_logits_later(
    backend: Callable[[], LinearBackend],
) -> None:
    model = build(WIDE, backend())
    assert (model._fused is not None) == (backend is native)
    runner, interrupt = ModelRunner(model, 16, "cpu", torch.float32), StepInterrupt()
    sequence = Sequence(1, list(range(3, 40)), StopConditions(9, frozenset()))
    sequence.blocks = [5, 2, 9]
    step = Batch((), (BatchChunk(sequence, 0, 37),))
    wanted = runner.begin(step, interrupt)().clone()
    interrupt.set()
    with pytest.raises(StepInterrupted):
        runner.begin(step, interrupt)
    torch.testing.assert_close(runner.begin(step)(), wanted)

"""Draft models: they do not change the output, and their own KV is correct."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from nodeagent.engine.core.generation import Generation
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.speculative.draft_length import choose_model_draft_length
from nodeagent.engine.speculative.draft_model import DraftModel, DraftModelTraits
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.structured import grammar
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from tests.unit.engine.byte_vocabulary import VOCABULARY
from tests.unit.engine.test_speculation import statistic
from tests.unit.engine.test_structured import COMPILER
from tests.unit.engine.tiny import SHAPE, llama

GREEDY = SamplingParams(temperature=0)
NEVER: frozenset[int] = frozenset()
LIMITS = StepLimits(128, 40)
LETTERS = grammar.regex_grammar("[a-e]{5,40}", "x")


def drafting_with(seed: int | None, blocks: int, read_tokens_max: int = 64) -> DraftModel | None:
    """A draft model; that of the served model's own seed is always right."""
    if seed is None:
        return None
    runner = ModelRunner(llama(seed), blocks, "cpu", torch.float32)
    # Its passes take no time by this clock, so that only acceptance counts.
    return DraftModel(runner, DraftModelTraits("model"), lambda: 0.0, read_tokens_max, 256, 0.01)


def engine_of(
    ahead: DraftModel | None,
    blocks: int,
    served: ModelRunner | None = None,
    limits: StepLimits = LIMITS,
) -> EngineCore:
    speculation = Speculation(4, rows_max=200, model=ahead)
    runner = served or ModelRunner(llama(1), blocks, "cpu", torch.float32)
    return EngineCore(runner, BatchScheduler(limits, BlockPool(blocks)), speculation=speculation)


def submit(
    engine: EngineCore,
    number: int,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    tokens_max: int = 30,
    constrained_to: grammar.Grammar | None = None,
) -> Sequence:
    sequence = Sequence(number, list(prompt), StopConditions(tokens_max, NEVER))
    constraint = COMPILER.compile_now(constrained_to) if constrained_to else None
    assert engine.speculation is not None
    sampler = Sampler(params, [], constraint)
    drafter = engine.speculation.drafter(constraint)
    engine.submit(
        Generation(sequence, sampler, StreamDetokenizer(VOCABULARY), StopStrings(()), drafter)
    )
    return sequence


def run(engine: EngineCore, row_cost: float = 0.01) -> int:
    steps = 0
    while engine.has_work:
        stepped = engine.step()
        engine.record_timing(stepped, 1 + row_cost * stepped.rows)
        steps += 1
    assert engine.scheduler.pool.used_blocks == 0
    return steps


def prompts(count: int, tokens: int = 20) -> list[list[int]]:
    chance = Random(7)
    shared = [chance.randrange(250) for _ in range(tokens)]
    return [shared + [chance.randrange(250) for _ in range(3 + n)] for n in range(count)]


def generated(
    seed: int | None,
    params: SamplingParams = GREEDY,
    blocks: int = 64,
    constrained_to: grammar.Grammar | None = None,
) -> tuple[list[list[int]], EngineCore, int]:
    engine = engine_of(drafting_with(seed, blocks), blocks)
    found = [
        submit(engine, n, p, params, constrained_to=constrained_to)
        for n, p in enumerate(prompts(3))
    ]
    steps = run(engine)
    return [sequence.tokens for sequence in found], engine, steps


@pytest.mark.parametrize("blocks", [64, 9])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("params", "constrained_to"),
    [
        (GREEDY, None),
        (SamplingParams(temperature=1.0, seed=3), None),
        (SamplingParams(temperature=0.8, seed=4, frequency_penalty=0.3), None),
        (GREEDY, LETTERS),
        (SamplingParams(temperature=1.0, seed=5), LETTERS),
    ],
    ids=str,
)
def test_the_output_is_the_same_with_a_draft_model_and_without(
    params: SamplingParams, constrained_to: grammar.Grammar | None, seed: int, blocks: int
) -> None:
    plain, _, _ = generated(None, params, blocks, constrained_to)
    drafted, engine, _ = generated(seed, params, blocks, constrained_to)
    assert drafted == plain
    assert engine.speculation is not None
    if blocks == 64 and constrained_to is None:
        assert engine.speculation.counts_by_kind["model"].drafted > 0


@pytest.mark.parametrize("read_tokens_max", [64, 7])
def test_a_draft_model_equal_to_the_target_is_always_accepted(read_tokens_max: int) -> None:
    engine = engine_of(drafting_with(1, 64, read_tokens_max), 64)
    for number, prompt in enumerate(prompts(3)):
        submit(engine, number, prompt)
    run(engine)
    # Another that shares the prefix, in blocks that were read for others.
    submit(engine, 9, prompts(4)[3])
    steps = run(engine)
    assert engine.speculation is not None
    tally = engine.speculation.counts_by_kind["model"]
    assert tally.drafted == tally.accepted > 40
    assert engine.speculation.counts()["accepted_by_model_tokens_total"] == tally.accepted
    assert steps < 12 or read_tokens_max == 7


def test_a_shared_prefix_is_read_once() -> None:
    ahead = drafting_with(1, 64)
    assert ahead is not None
    rows = Counted(ahead)
    engine = engine_of(ahead, 64)
    first, second = prompts(2, tokens=64)
    submit(engine, 1, first, tokens_max=6)
    run(engine)
    assert rows.rows >= len(first)
    before = rows.rows
    submit(engine, 2, second, tokens_max=3)
    run(engine)
    assert rows.rows - before < 24


class Counted:
    """Counts the rows that a model that drafts computes."""

    def __init__(self, ahead: DraftModel) -> None:
        self._runner = ahead.runner
        self.rows = 0
        ahead.runner = self

    def run(self, batch):  # type: ignore[no-untyped-def]
        self.rows += batch.tokens
        return self._runner.run(batch)


def test_its_kv_is_correct_after_a_preemption() -> None:
    engine = engine_of(drafting_with(1, 9), 9)
    for number, prompt in enumerate(prompts(3)):
        submit(engine, number, prompt)
    run(engine)
    assert engine.scheduler.queues.preemptions > 0
    assert engine.speculation is not None
    tally = engine.speculation.counts_by_kind["model"]
    assert tally.drafted == tally.accepted > 0


def test_a_cancelled_sequence_does_not_affect_others() -> None:
    engine = engine_of(drafting_with(1, 64), 64)
    kept = [submit(engine, n, p) for n, p in enumerate(prompts(3))]
    for _ in range(4):
        engine.record_timing(engine.step(), 1.0)
    engine.cancel(1)
    run(engine)
    plain, _, _ = generated(None)
    assert [kept[0].tokens, kept[2].tokens] == [plain[0], plain[2]]


def test_a_wrong_draft_model_is_turned_off_and_tried_again() -> None:
    ahead = drafting_with(2, 64)
    assert ahead is not None
    rows = Counted(ahead)
    engine = engine_of(ahead, 64)
    submit(engine, 1, prompts(1)[0], tokens_max=200)
    run(engine, row_cost=0.5)
    assert engine.speculation is not None
    assert 0 < engine.speculation.counts_by_kind["model"].drafted < 60
    before = rows.rows
    submit(engine, 2, prompts(1)[0], SamplingParams(temperature=1.0, seed=1), tokens_max=200)
    run(engine, row_cost=0.5)
    # Tried every 64 steps: what came meanwhile is read then, and little is drafted.
    assert 0 < rows.rows - before < 260


@pytest.mark.parametrize(
    ("chances", "drafting", "rows", "rows_max", "row_cost", "pass_s", "wanted"),
    [
        ([0.9, 0.9, 0.9], 1, 1, 99, 0.0, 0.1, 3),
        ([0.9, 0.9, 0.1], 1, 1, 99, 0.0, 0.2, 2),
        ([0.9, 0.9, 0.9], 1, 1, 99, 0.0, 1.0, 0),
        ([0.1, 0.9, 0.9], 1, 1, 99, 0.1, 0.1, 0),
        ([0.9, 0.9, 0.9], 4, 4, 12, 0.0, 0.1, 2),
        ([0.9, 0.9, 0.9], 8, 8, 99, 0.5, 0.1, 0),
        ([], 1, 1, 99, 0.0, 0.1, 0),
    ],
)
def test_a_model_drafts_as_many_tokens_as_pay_off(
    chances: list[float],
    drafting: int,
    rows: int,
    rows_max: int,
    row_cost: float,
    pass_s: float,
    wanted: int,
) -> None:
    depth = choose_model_draft_length(
        chances, drafting, rows, rows_max, lambda n: 1 + row_cost * (n - 1), pass_s
    )
    assert depth == wanted


def test_samples_have_the_same_distribution_with_a_draft_model() -> None:
    """Pearson's chi-square over the third token of many answers, with drafts and without."""
    shape = replace(SHAPE, vocabulary=8)
    counts = []
    for seed in (None, 1):
        served = ModelRunner(llama(1, shape), 64, "cpu", torch.float32)
        ahead = None
        if seed is not None:
            runner = ModelRunner(llama(seed, shape), 64, "cpu", torch.float32)
            ahead = DraftModel(runner, DraftModelTraits("model"), lambda: 0.0, 256, 256, 0.01)
        engine = engine_of(ahead, 64, served)
        assert engine.speculation is not None
        # A machine on which steps of all sizes take equally long.
        engine.speculation.costs.record(1, 1.0)
        engine.speculation.costs.record(256, 1.0)
        found: Counter[int] = Counter()
        for first in range(0, 400, 40):
            # Other seeds with drafts than without: the two samples are independent.
            begin = first + (1000 if seed else 0)
            sequences = [
                submit(engine, n, [1, 2, 3], SamplingParams(seed=n), tokens_max=5)
                for n in range(begin, begin + 40)
            ]
            run(engine, row_cost=0.0)
            found.update(sequence.tokens[5] for sequence in sequences)
        if ahead is not None:
            tally = engine.speculation.counts_by_kind["model"]
            assert 50 < tally.accepted < tally.drafted - 50
        counts.append(found)
    plain, drafted = (torch.tensor([float(found[token]) for token in range(8)]) for found in counts)
    expected = (plain + drafted) / 2
    common = expected > 0
    value = statistic(plain[common], expected[common]) + statistic(
        drafted[common], expected[common]
    )
    # The critical value for 7 degrees of freedom at one in a thousand.
    assert value < 24.32

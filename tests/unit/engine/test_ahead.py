"""Models that draft: the output is what it would have been, and their own KV is right."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.core.step import Engine, Generation
from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.batching import Batching, Limits
from nodeagent.engine.scheduler.sequence import Ending, Sequence
from nodeagent.engine.speculative.draft_length import choose_ahead
from nodeagent.engine.speculative.draft_model import Ahead, Habits
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.structured import grammar
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText
from tests.unit.engine.test_constrain import GRAMMARS
from tests.unit.engine.test_speculate import statistic
from tests.unit.engine.test_text import VOCABULARY
from tests.unit.engine.tiny import SHAPE, llama

GREEDY = SamplingParams(temperature=0)
NEVER: frozenset[int] = frozenset()
LIMITS = Limits(128, 40)
LETTERS = grammar.of_regex("[a-e]{5,40}", "x")


def drafting_with(seed: int | None, blocks: int, read_tokens_max: int = 64) -> Ahead | None:
    """A draft model; that of the served model's own seed is always right."""
    if seed is None:
        return None
    runner = Runner(llama(seed), blocks, "cpu", torch.float32)
    # Its passes take no time by this clock, so that only acceptance counts.
    return Ahead(runner, Habits("model"), lambda: 0.0, read_tokens_max, 256, 0.01)


def engine_of(
    ahead: Ahead | None, blocks: int, served: Runner | None = None, limits: Limits = LIMITS
) -> Engine:
    speculation = Speculation(4, rows_max=200, ahead=ahead)
    runner = served or Runner(llama(1), blocks, "cpu", torch.float32)
    return Engine(runner, Batching(limits, Blocks(blocks)), speculation=speculation)


def submit(
    engine: Engine,
    number: int,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    tokens_max: int = 30,
    held_to: grammar.Grammar | None = None,
) -> Sequence:
    sequence = Sequence(number, list(prompt), Ending(tokens_max, NEVER))
    constraint = GRAMMARS.build(held_to) if held_to else None
    assert engine.speculation is not None
    sampler = Sampler(params, [], constraint)
    drafter = engine.speculation.drafter(constraint)
    engine.submit(Generation(sequence, sampler, TokenText(VOCABULARY), StopStrings(()), drafter))
    return sequence


def run(engine: Engine, row_cost: float = 0.01) -> int:
    steps = 0
    while engine.busy:
        stepped = engine.step()
        engine.timed(stepped, 1 + row_cost * stepped.rows)
        steps += 1
    assert engine.batching.blocks.held == 0
    return steps


def prompts(count: int, tokens: int = 20) -> list[list[int]]:
    chance = Random(7)
    shared = [chance.randrange(250) for _ in range(tokens)]
    return [shared + [chance.randrange(250) for _ in range(3 + n)] for n in range(count)]


def generated(
    seed: int | None,
    params: SamplingParams = GREEDY,
    blocks: int = 64,
    held_to: grammar.Grammar | None = None,
) -> tuple[list[list[int]], Engine, int]:
    engine = engine_of(drafting_with(seed, blocks), blocks)
    found = [submit(engine, n, p, params, held_to=held_to) for n, p in enumerate(prompts(3))]
    steps = run(engine)
    return [sequence.tokens for sequence in found], engine, steps


@pytest.mark.parametrize("blocks", [64, 9])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("params", "held_to"),
    [
        (GREEDY, None),
        (SamplingParams(temperature=1.0, seed=3), None),
        (SamplingParams(temperature=0.8, seed=4, frequency_penalty=0.3), None),
        (GREEDY, LETTERS),
        (SamplingParams(temperature=1.0, seed=5), LETTERS),
    ],
    ids=str,
)
def test_the_output_is_the_same_with_a_model_that_drafts_and_without(
    params: SamplingParams, held_to: grammar.Grammar | None, seed: int, blocks: int
) -> None:
    plain, _, _ = generated(None, params, blocks, held_to)
    drafted, engine, _ = generated(seed, params, blocks, held_to)
    assert drafted == plain
    assert engine.speculation is not None
    if blocks == 64 and held_to is None:
        assert engine.speculation.tallies["model"].drafted > 0


@pytest.mark.parametrize("read_tokens_max", [64, 7])
def test_a_model_like_the_served_one_is_always_right(read_tokens_max: int) -> None:
    engine = engine_of(drafting_with(1, 64, read_tokens_max), 64)
    for number, prompt in enumerate(prompts(3)):
        submit(engine, number, prompt)
    run(engine)
    # Another that shares the prefix, in blocks that were read for others.
    submit(engine, 9, prompts(4)[3])
    steps = run(engine)
    assert engine.speculation is not None
    tally = engine.speculation.tallies["model"]
    assert tally.drafted == tally.accepted > 40
    assert engine.speculation.counts()["accepted_by_model_tokens_total"] == tally.accepted
    assert steps < 12 or read_tokens_max == 7


def test_what_is_shared_is_read_once() -> None:
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

    def __init__(self, ahead: Ahead) -> None:
        self._runner = ahead.runner
        self.rows = 0
        ahead.runner = self  # type: ignore[assignment]

    def run(self, batch):  # type: ignore[no-untyped-def]
        self.rows += batch.tokens
        return self._runner.run(batch)


def test_it_is_right_after_a_preemption_too() -> None:
    engine = engine_of(drafting_with(1, 9), 9)
    for number, prompt in enumerate(prompts(3)):
        submit(engine, number, prompt)
    run(engine)
    assert engine.batching.preemptions > 0
    assert engine.speculation is not None
    tally = engine.speculation.tallies["model"]
    assert tally.drafted == tally.accepted > 0


def test_a_cancelled_sequence_disturbs_nobody() -> None:
    engine = engine_of(drafting_with(1, 64), 64)
    kept = [submit(engine, n, p) for n, p in enumerate(prompts(3))]
    for _ in range(4):
        engine.timed(engine.step(), 1.0)
    engine.cancel(1)
    run(engine)
    plain, _, _ = generated(None)
    assert [kept[0].tokens, kept[2].tokens] == [plain[0], plain[2]]


def test_a_model_that_is_wrong_falls_silent_and_is_tried_again() -> None:
    ahead = drafting_with(2, 64)
    assert ahead is not None
    rows = Counted(ahead)
    engine = engine_of(ahead, 64)
    submit(engine, 1, prompts(1)[0], tokens_max=200)
    run(engine, row_cost=0.5)
    assert engine.speculation is not None
    assert 0 < engine.speculation.tallies["model"].drafted < 60
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
def test_a_model_drafts_as_deep_as_pays(
    chances: list[float],
    drafting: int,
    rows: int,
    rows_max: int,
    row_cost: float,
    pass_s: float,
    wanted: int,
) -> None:
    depth = choose_ahead(
        chances, drafting, rows, rows_max, lambda n: 1 + row_cost * (n - 1), pass_s
    )
    assert depth == wanted


def test_what_is_sampled_through_a_models_drafts_is_distributed_as_without() -> None:
    """Pearson's chi-square over the third token of many answers, with drafts and without."""
    shape = replace(SHAPE, vocabulary=8)
    counts = []
    for seed in (None, 1):
        served = Runner(llama(1, shape), 64, "cpu", torch.float32)
        ahead = None
        if seed is not None:
            runner = Runner(llama(seed, shape), 64, "cpu", torch.float32)
            ahead = Ahead(runner, Habits("model"), lambda: 0.0, 256, 256, 0.01)
        engine = engine_of(ahead, 64, served)
        assert engine.speculation is not None
        # A machine on which steps of all sizes take equally long.
        engine.speculation.costs.note(1, 1.0)
        engine.speculation.costs.note(256, 1.0)
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
            tally = engine.speculation.tallies["model"]
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

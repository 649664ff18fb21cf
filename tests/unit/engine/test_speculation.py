"""Speculation: it does not change the output, and drafts are verified where they pay off."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.core.generation import Generation
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.sampling.sampler import (
    SampledToken,
    Sampler,
    SamplingParams,
    SamplingRun,
    sample_step,
)
from nodeagent.engine.scheduler.batch import Batch, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.speculative.draft_length import (
    AcceptanceRates,
    DraftProposal,
    StepCosts,
    choose_draft_lengths,
)
from nodeagent.engine.speculative.ngram import MATCH_MIN, NgramProposer
from nodeagent.engine.speculative.speculation import Speculation
from nodeagent.engine.structured import grammar
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from tests.unit.engine.byte_vocabulary import VOCABULARY
from tests.unit.engine.test_structured import COMPILER

END = 256


@pytest.mark.parametrize(
    ("tokens", "count", "after", "wanted"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [], ([9, 1], 3)),
        ([1, 2, 7, 5, 1, 2, 8, 6, 1, 2], 2, [], ([8, 6], 2)),
        ([4, 1, 2, 7, 5, 1, 2, 8, 4, 1, 2], 1, [], ([7], 3)),
        ([7, 7, 7], 4, [], ([7, 7, 7, 7], 2)),
        ([1, 2, 1, 2, 1], 5, [], ([2, 1, 2, 1, 2], 3)),
        ([1, 2, 3, 4], 3, [], ([], 0)),
        ([1, 2, 3], 3, [1, 2], ([3, 1, 2], 2)),
        ([5], 3, [], ([], 0)),
        ([1, 2, 3, 1, 2], 0, [], ([], 0)),
    ],
)
def test_the_longest_and_latest_match_is_proposed(
    tokens: list[int], count: int, after: list[int], wanted: tuple[list[int], int]
) -> None:
    lookup = NgramProposer()
    lookup.follow(tokens[:2])
    lookup.follow(tokens)
    assert lookup.propose(count, after) == wanted


def test_predicted_text_is_searched_too() -> None:
    lookup = NgramProposer([1, 2, 3, 4, 5])
    lookup.follow([9, 1, 2])
    assert lookup.propose(3) == ([3, 4, 5], 2)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_proposed_tokens_followed_the_same_tokens_before(tokens: list[int]) -> None:
    lookup = NgramProposer()
    lookup.follow(tokens)
    proposed, matched = lookup.propose(1)
    pairs = [tuple(tokens[i : i + MATCH_MIN]) for i in range(len(tokens) - MATCH_MIN)]
    assert bool(proposed) == (tuple(tokens[-MATCH_MIN:]) in pairs)
    if proposed:
        run = [*tokens[-matched:], *proposed]
        assert any(tokens[i : i + len(run)] == run for i in range(len(tokens)))


def offer(*chances: float) -> DraftProposal:
    return DraftProposal(tuple(range(len(chances))), chances)


@pytest.mark.parametrize(
    ("offers", "rows_max", "row_cost", "wanted"),
    [
        ([offer(0.9, 0.8, 0.7)], 99, 0.0, [3]),
        ([offer(0.9, 0.8, 0.7)], 99, 10.0, [0]),
        ([offer(0.9, 0.8, 0.7)], 3, 0.0, [2]),
        ([offer(0.9, 0.5, 0.05)], 99, 0.2, [2]),
        ([offer(0.9, 0.8), offer(0.2)], 99, 0.3, [2, 0]),
        ([offer(), offer(0.9)], 99, 0.1, [0, 1]),
        ([], 99, 0.1, []),
    ],
)
def test_drafts_are_verified_where_they_pay_off(
    offers: list[DraftProposal], rows_max: int, row_cost: float, wanted: list[int]
) -> None:
    rows = max(len(offers), 1)
    assert choose_draft_lengths(offers, rows, rows_max, lambda n: 1 + row_cost * (n - 1)) == wanted


def test_a_compute_bound_batch_verifies_no_drafts() -> None:
    # Twice the rows take twice the time: a draft that may fail can only lose.
    offers = [offer(0.9, 0.8)] * 16
    assert choose_draft_lengths(offers, 16, 256, lambda rows: 0.1 * rows) == [0] * 16


def test_costs_are_interpolated_and_extrapolated() -> None:
    costs = StepCosts()
    assert costs.seconds(1) < costs.seconds(8)
    for seconds in (0.1, 0.1, 5.0):
        costs.record(1, seconds)
    costs.record(8, 0.3)
    assert costs.seconds(1) == 0.1
    assert 0.1 < costs.seconds(4) < costs.seconds(8) == 0.3
    assert costs.seconds(16) > 0.3
    for _ in range(2000):
        costs.record(1, 0.1)
    assert costs.seconds(8) < 0.2  # the old measure is forgotten


def test_a_step_that_took_no_longer_than_its_drafts_is_not_measured() -> None:
    speculation = Speculation(4, 16)
    speculation.record_step(1, 0.0, decodes_only=True)
    assert not speculation.costs.known
    speculation.draft([], lambda sequence, drafts: drafts, 16)
    speculation.record_step(1, 0.1, decodes_only=True)
    assert speculation.costs.seconds(1) == 0.1


def test_acceptance_is_learned_and_used_for_new_sequences() -> None:
    everyone = AcceptanceRates()
    one = AcceptanceRates(everyone)
    for _ in range(60):
        one.record("match 2", accepted=False)
    assert one.chance("match 2") < 0.05
    assert AcceptanceRates(everyone).chance("match 2") < 0.05
    assert one.chance("match 3") == AcceptanceRates().chance("match 3")


class Model:
    """A model whose logits are a function of the last tokens: it repeats itself, with noise."""

    def __init__(self, noise: float) -> None:
        generator = torch.Generator().manual_seed(5)
        self._table = torch.randn(997, 257, generator=generator)
        self._noise = noise
        self.rows = 0

    def begin(self, batch: Batch) -> Callable[[], Tensor]:
        found = []
        for chunk in batch.chunks:
            self.rows += chunk.tokens
            if chunk.samples:
                known = len(chunk.sequence.tokens)
                ids = [*chunk.sequence.tokens, *chunk.drafts]
                found += [self._logits(ids[:end]) for end in range(known, len(ids) + 1)]
        logits = torch.stack(found) if found else torch.zeros(0, 257)
        return lambda: logits

    def _logits(self, ids: list[int]) -> Tensor:
        # An alphabet of five letters, the next after the last, but for a swerve now and then.
        logits = self._noise * self._table[hash(tuple(ids[-6:])) % 997]
        logits[97 + (ids[-1] - 96) % 5] += 7.0
        return logits


def generate(
    params: SamplingParams, *, drafts: bool, noise: float = 1.5, blocks: int = 64, **more: Any
) -> tuple[list[list[int]], EngineCore, Model]:
    model = Model(noise)
    speculation = Speculation(6, rows_max=64) if drafts else None
    engine = EngineCore(
        model,  # type: ignore[arg-type]
        BatchScheduler(StepLimits(64, 4), BlockPool(blocks)),
        speculation=speculation,
    )
    sequences = []
    for number in range(1, 4):
        sequence = Sequence(
            number, [97, 98, 99, 100, 101] * 4, StopConditions(40, frozenset({END}))
        )
        sequences.append(sequence)
        wanted: grammar.Grammar | None = more.get("held_to")
        constraint = COMPILER.compile_now(wanted) if wanted else None
        engine.submit(
            Generation(
                sequence,
                Sampler(params, sequence.tokens.copy(), constraint),
                StreamDetokenizer(VOCABULARY),
                StopStrings(more.get("stops", ())),
                speculation.drafter(constraint) if speculation else None,
            )
        )
    while engine.has_work:
        stepped = engine.step()
        # Rows nearly free, as on a machine bound by memory.
        engine.record_timing(stepped, 1 + 0.01 * stepped.rows)
    assert engine.scheduler.pool.used_blocks == 0
    return [sequence.tokens for sequence in sequences], engine, model


LETTERS = grammar.regex_grammar("[a-e]{5,40}", "x")


@pytest.mark.parametrize("blocks", [64, 9])
@pytest.mark.parametrize(
    ("params", "more"),
    [
        (SamplingParams(temperature=0), {}),
        (SamplingParams(temperature=1.0, seed=3), {}),
        (SamplingParams(temperature=0.7, top_p=0.9, top_k=9, seed=8, logprobs=2), {}),
        (SamplingParams(temperature=0.8, seed=4, frequency_penalty=0.3), {}),
        (SamplingParams(temperature=0), {"held_to": LETTERS}),
        (SamplingParams(temperature=1.0, seed=5), {"held_to": LETTERS}),
        (SamplingParams(temperature=0), {"stops": ("deab",)}),
    ],
    ids=str,
)
def test_the_output_is_the_same_with_drafts_and_without(
    params: SamplingParams, more: dict[str, Any], blocks: int
) -> None:
    plain, _, _ = generate(params, drafts=False, blocks=blocks, **more)
    drafted, engine, _ = generate(params, drafts=True, blocks=blocks, **more)
    assert drafted == plain
    assert engine.speculation is not None
    if blocks == 64:
        assert engine.speculation.accepted_tokens_total > 0
        assert 0 < engine.speculation.recent_acceptance <= 1


def test_accepted_drafts_save_steps_and_rejected_drafts_stop() -> None:
    _, steady, _ = generate(SamplingParams(temperature=0), drafts=True, noise=0.0)
    assert steady.speculation is not None
    assert steady.speculation.accepted_tokens_total > 60
    assert steady.speculation.recent_acceptance > 0.9
    _, wild, _ = generate(SamplingParams(temperature=2.0, seed=1), drafts=True, noise=3.0)
    assert wild.speculation is not None
    assert wild.speculation.drafted_tokens_total < 120


def test_drafts_are_used_in_the_next_step_only() -> None:
    batching = BatchScheduler(StepLimits(64, 4), BlockPool(8))
    sequence = Sequence(1, [97] * 15, StopConditions(40, frozenset({END})))
    batching.submit(sequence)
    (prefill,) = batching.next_batch().prefills
    batching.mark_computed(prefill)
    sequence.append(98)
    sequence.drafts = (99, 100, 101)
    (verify,) = batching.next_batch().verifies
    assert verify.ids == [98, 99, 100, 101]
    assert len(sequence.blocks) == 2
    sequence.append(99)
    batching.mark_computed(verify, rejected_drafts=3)
    assert (sequence.computed_tokens, sequence.is_decoding) == (16, True)
    assert batching.next_batch().verifies == ()
    sequence.drafts = (1, 2)
    batching.remove(sequence)
    assert sequence.drafts == ()
    assert batching.pool.used_blocks == 0


def test_samples_have_the_same_distribution_with_drafts() -> None:
    """Pearson's chi-square over tokens sampled through a draft, and over what follows it."""
    size, runs = 4, 1500
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    chances = logits.softmax(-1)
    seconds = torch.zeros(size)
    firsts = torch.zeros(size)
    due = SamplingRun(Sampler(SamplingParams(seed=11), []), drafts=(1,))
    for _ in range(runs):
        ((first, *rest),) = sample_step(logits.repeat(2, 1), [due])
        assert isinstance(first, SampledToken)
        firsts[first.token] += 1
        if rest:
            assert first.token == 1
            assert isinstance(rest[0], SampledToken)
            seconds[rest[0].token] += 1
    # Critical values for 3 degrees of freedom at one in a thousand.
    assert statistic(firsts, chances * runs) < 16.27
    assert statistic(seconds, chances * seconds.sum()) < 16.27


def statistic(seen: Tensor, wanted: Tensor) -> float:
    value = float(((seen - wanted) ** 2 / wanted).sum())
    assert math.isfinite(value)
    return value

"""Fitting a replica to what an engine showed, and the published latencies that it reproduces."""

from dataclasses import dataclass

import pytest

from ops.sim.calibration import ProfileProbe
from ops.sim.engine_calibration import (
    MeasuredAnswer,
    RatesUnclear,
    draw_requests,
    engines,
    fit,
    simulate_answers,
)
from ops.sim.published_latency import PUBLISHED, simulate_clients
from ops.sim.replica import SimulatedReplica
from ops.sim.world import LLAMA_70B_TODAY


@dataclass
class KnownEngine:
    """An engine whose times follow from its rates."""

    tokens_per_s: float = 1000.0
    overhead_s: float = 0.02
    step_s: float = 0.01
    sequence_s: float = 0.002

    def probes(self) -> list[ProfileProbe]:
        def one(tokens: int, together: int) -> ProfileProbe:
            itl_s = self.step_s + together * self.sequence_s
            ttft_s = self.overhead_s + tokens / self.tokens_per_s
            return ProfileProbe("e", together, tokens, ttft_s, itl_s, 16)

        return [one(n, 1) for n in (50, 100, 300, 900)] + [one(50, n) for n in (2, 4, 8)]


@pytest.mark.parametrize("name", engines())
def test_a_request_alone_takes_as_long_as_the_engine_it_was_fitted_to(name: str) -> None:
    known = KnownEngine()
    fitted = fit(known.probes(), engines()[name])
    asked = [MeasuredAnswer(10.0 * n, tokens, 20, 0.0, 0.0) for n, tokens in enumerate((200, 800))]
    for answer in simulate_answers(fitted, asked):
        expected_s = known.overhead_s + answer.prompt_tokens / known.tokens_per_s
        assert answer.ttft_s == pytest.approx(expected_s, rel=0.05)
        assert answer.itl_s == pytest.approx(known.step_s + known.sequence_s, rel=0.05)


def test_every_request_is_answered_and_those_that_come_together_wait() -> None:
    fitted = fit(KnownEngine().probes(), engines()["embedded"])
    asked = [MeasuredAnswer(0.001 * n, 400, 10, 0.0, 0.0) for n in range(5)]
    found = simulate_answers(fitted, asked)
    assert len(found) == len(asked)
    ttft_s = sorted(answer.ttft_s for answer in found)
    assert ttft_s[-1] > 4 * ttft_s[0]


def test_an_engine_that_reads_long_prompts_as_fast_as_short_ones_cannot_be_fitted() -> None:
    with pytest.raises(RatesUnclear, match="cannot fit the rates of embedded"):
        fit(KnownEngine(tokens_per_s=-5000.0, overhead_s=1.0).probes(), engines()["embedded"])


def test_a_higher_load_has_more_requests_in_the_same_time() -> None:
    fitted = fit(KnownEngine().probes(), engines()["vllm"])
    counts = [len(draw_requests(fitted, load, 30.0, 1.3, seed=1)) for load in (20, 40, 80)]
    assert counts == sorted(counts) and counts[-1] > 2 * counts[0] > 0
    assert all(0 < request.at_s <= 30 for request in draw_requests(fitted, 40, 30.0, 1.3, 1))


def test_a_prompt_alone_takes_as_long_as_published() -> None:
    rows = [row for row in PUBLISHED if row.clients == 1 and row.prompt_tokens >= 1000]
    assert rows
    for row in rows:
        found = simulate_clients(LLAMA_70B_TODAY.large, row, SimulatedReplica)
        assert found.ttft_ms == pytest.approx(row.ttft_ms, rel=0.12)

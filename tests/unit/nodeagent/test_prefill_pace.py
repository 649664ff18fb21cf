"""A replica's time per token is measured from its prompts, whatever each of them takes besides."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.decide.requests.prefill_pace import AGE_S_MAX, PROMPTS_MAX, PrefillPace


def pace_of(prompts: list[tuple[int, float]], gap_s: float = 1.0) -> int:
    pace, now_s = PrefillPace(), 0.0
    for tokens, took_s in prompts:
        now_s += gap_s + took_s
        pace.record(tokens, took_s, now_s)
    return pace.ns_per_token(now_s)


@given(
    st.floats(1e-6, 1e-2),
    st.floats(0.0, 0.2),
    st.lists(st.integers(1, 50_000), min_size=16, max_size=40),
)
def test_a_constant_time_per_prompt_is_no_slowness(
    s_per_token: float, constant_s: float, lengths: list[int]
) -> None:
    measured = pace_of([(tokens, constant_s + tokens * s_per_token) for tokens in lengths])
    newest = lengths[-PROMPTS_MAX:]
    alike_ns = 1e9 * (s_per_token + constant_s * len(newest) / sum(newest))
    # Of prompts that are all alike, the constant part cannot be told.
    least_ns = 1e9 * s_per_token * (1 - 1e-6) - 1
    assert measured == 0 or least_ns <= measured <= alike_ns * (1 + 1e-6) + 1
    if max(newest) > 2 * min(newest) and len(set(newest)) > 4:
        assert measured == pytest.approx(1e9 * s_per_token, rel=1e-3, abs=1)


def test_times_with_noise_give_about_the_pace() -> None:
    draws = random.Random(3)
    for _ in range(100):
        lengths = [round(draws.lognormvariate(7, 1)) for _ in range(16)]
        prompts = [(n, 0.02 + n * 1e-3 * draws.uniform(0.8, 1.2)) for n in lengths]
        assert pace_of(prompts) == pytest.approx(1_000_000, rel=0.25)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1e3)), max_size=60))
def test_any_times_give_a_time_that_is_not_negative(prompts: list[tuple[int, float]]) -> None:
    assert pace_of(prompts) >= 0


def test_short_prompts_of_one_length_say_nothing_and_long_ones_do() -> None:
    assert pace_of([(50, 0.03)] * 16) == 0
    assert pace_of([(50_000, 5.0)] * 16) == 100_000


def test_prompts_that_were_read_in_one_step_count_as_one() -> None:
    pace = PrefillPace()
    for step in range(1, 5):
        now_s = float(10 * step)
        for took_s in (1.0, 0.0, 0.0, 0.0):
            pace.record(250 * step, took_s * step, now_s)
    assert pace.ns_per_token(40.0) == 1_000_000


def test_few_prompts_and_old_ones_say_nothing() -> None:
    assert pace_of([(1000, 1.0)] * 2) == 0
    pace = PrefillPace()
    for second in range(1, 5):
        pace.record(1000, 0.5, float(second))
    assert pace.ns_per_token(4.0) == 500_000
    assert pace.ns_per_token(4.0 + AGE_S_MAX) == 0
    pace.record(1000, 0.5, 5.0 + AGE_S_MAX)
    assert pace.ns_per_token(5.0 + AGE_S_MAX) == 0

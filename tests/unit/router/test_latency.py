"""What round trips and first tokens teach about a replica, and what they do not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.decide.replicas.latency import (
    CORRECTION_HALF_LIFE_S,
    GAIN_MAX,
    GAIN_MIN,
    OVERHEAD_MS_MAX,
    DepthCost,
    LatencyCorrection,
    RoundTripFilter,
    expected_rtt_ms,
    prefill_work,
)


def test_a_round_trip_ignores_a_spike_and_follows_a_step() -> None:
    measured = RoundTripFilter()
    for sample in [10.0, 10.0, 200.0, 10.0]:
        measured.add(sample)
    assert measured.rtt_ms is not None
    assert abs(measured.rtt_ms - 10.0) < 0.01
    for _ in range(20):
        measured.add(160.0)
    assert measured.rtt_ms > 150
    assert expected_rtt_ms(None, None) > 100


def teach(
    correction: LatencyCorrection, overhead_ms: float, gain: float, answers: int, *, stalls: int = 0
) -> None:
    chance = random.Random(5)
    for n in range(answers):
        predicted_ms = chance.choice((5.0, 50.0, 200.0, 800.0))
        took_ms = overhead_ms + gain * predicted_ms + chance.gauss(0, 5)
        correction.learn(predicted_ms, 30_000.0 if stalls and n % stalls == 0 else took_ms, 0.1 * n)


def test_overhead_and_rate_are_learned_separately() -> None:
    for overhead_ms, gain in ((40.0, 1.0), (0.0, 2.0), (25.0, 0.6), (100.0, 3.0)):
        correction = LatencyCorrection()
        teach(correction, overhead_ms, gain, 400)
        assert abs(correction.gain_at(40.0) - gain) < 0.12, correction
        assert abs(correction.overhead_ms_at(40.0) - overhead_ms) < 20, correction
        assert correction.spread_ms < 40


def test_a_stalled_answer_moves_the_correction_little() -> None:
    correction = LatencyCorrection()
    teach(correction, 20.0, 1.0, 200)
    before_ms = correction.overhead_ms_at(20.0)
    correction.learn(50.0, 60_000.0, 20.0)
    assert correction.overhead_ms_at(20.0) - before_ms < 5
    teach(correction, 20.0, 1.0, 400, stalls=20)
    assert abs(correction.gain_at(40.0) - 1.0) < 0.25


def test_a_lasting_change_is_followed() -> None:
    correction = LatencyCorrection()
    teach(correction, 10.0, 1.0, 100)
    teach(correction, 10.0, 2.5, 200)
    assert 2.2 < correction.gain_at(20.0) < 2.8


def test_the_correction_fades_without_answers() -> None:
    correction = LatencyCorrection()
    teach(correction, 300.0, 1.0, 200)
    late_s = 20.0 + 4 * CORRECTION_HALF_LIFE_S
    assert correction.overhead_ms_at(late_s) < 0.1 * correction.overhead_ms_at(20.0)
    assert abs(correction.gain_at(late_s) - 1.0) < 0.05


def test_a_replica_that_its_node_reports_to_be_slow_is_predicted_so_at_once() -> None:
    correction = LatencyCorrection()
    assert correction.record_reported(2.0)
    assert correction.gain_at(0.0) == correction.gain_at(1e6) == 2.0
    assert not correction.record_reported(2.05), "about the same"
    correction.learn(1000.0, 2300.0, now_s=10.0)
    learned = correction.gain_at(10.0)
    assert learned > 2.0
    assert correction.gain_at(10.0 + 100 * CORRECTION_HALF_LIFE_S) == pytest.approx(2.0)
    assert correction.record_reported(0.0), "unknown again"
    assert 1.0 <= correction.gain < learned
    assert correction.gain_at(1e6) == pytest.approx(1.0)


def test_a_small_difference_that_a_node_reports_changes_nothing() -> None:
    correction = LatencyCorrection()
    assert not correction.record_reported(0.3)
    assert not correction.record_reported(1.2)
    assert correction.gain_at(0.0) == 1.0


@given(st.floats(0.25, 4.0), st.floats(1.0, 4.0), st.floats(0.0, 10.0))
def test_what_a_router_has_learned_already_is_not_counted_twice(
    learned: float, before: float, reported: float
) -> None:
    correction = LatencyCorrection()
    correction.gain, correction.reported_gain = learned, before
    if correction.record_reported(reported):
        lower, upper = sorted((learned, correction.reported_gain))
        assert lower <= correction.gain <= upper


def test_depth_cost_is_learned_from_prompts_that_did_not_queue() -> None:
    depth_cost, chance = DepthCost(), random.Random(3)
    for _ in range(2000):
        tokens = chance.choice((500, 4000, 20_000, 60_000))
        true_ms = prefill_work(tokens, 0, 2e-5) / 10
        ms = prefill_work(tokens, 0, depth_cost.per_token) / 10
        depth_cost.learn(ms, tokens / 2, true_ms * chance.uniform(0.95, 1.05) - ms)
    assert 1.5e-5 < depth_cost.per_token < 2.5e-5
    assert prefill_work(1000, 1000, 2e-5) == 0
    assert prefill_work(1000, 0, 0.0) == 1000


def test_a_few_deep_prompts_teach_most_of_the_depth_cost() -> None:
    depth_cost, chance = DepthCost(), random.Random(3)
    for _ in range(12):
        ms = prefill_work(20_000, 0, depth_cost.per_token) / 10
        took_ms = prefill_work(20_000, 0, 2e-5) / 10 * chance.uniform(0.9, 1.1)
        depth_cost.learn(ms, 10_000, took_ms - ms)
    assert 1.4e-5 < depth_cost.per_token < 2.6e-5


def test_short_prompts_on_a_slow_replica_teach_the_depth_cost() -> None:
    depth_cost, chance = DepthCost(), random.Random(3)
    for _ in range(60):
        tokens = chance.choice((150, 400, 900))
        ms = 2 * prefill_work(tokens, 0, depth_cost.per_token)
        took_ms = 2 * prefill_work(tokens, 0, 7e-4) * chance.uniform(0.9, 1.1)
        depth_cost.learn(ms, tokens / 2, took_ms - ms)
    assert 5e-4 < depth_cost.per_token < 9e-4


def test_depth_cost_starts_from_the_models_dimensions() -> None:
    depth_cost = DepthCost()
    depth_cost.expect(2e-5)
    assert depth_cost.per_token == 2e-5
    for _ in range(3):  # prompts that say little of depth move it little
        depth_cost.learn(prefill_work(4_000, 0, depth_cost.per_token) / 10, 2_000, 200.0)
    assert 2e-5 < depth_cost.per_token < 2.4e-5
    learned = depth_cost.per_token
    depth_cost.expect(2e-5)
    assert depth_cost.per_token == learned, "the same table again changes nothing"
    depth_cost.expect(3e-5)
    assert depth_cost.per_token == 3e-5, "another model"
    chance = random.Random(3)
    for _ in range(400):
        ms = prefill_work(20_000, 0, depth_cost.per_token) / 10
        took_ms = prefill_work(20_000, 0, 6e-5) / 10 * chance.uniform(0.9, 1.1)
        depth_cost.learn(ms, 10_000, took_ms - ms)
    assert 5e-5 < depth_cost.per_token < 7e-5, "what is measured counts in the end"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6), st.floats(0, 1e4)), max_size=60))
def test_no_observation_takes_the_correction_out_of_bounds(
    observed: list[tuple[float, float, float]],
) -> None:
    correction, now_s = LatencyCorrection(), 0.0
    for predicted_ms, took_ms, after_s in observed:
        now_s += after_s
        correction.learn(predicted_ms, took_ms, now_s)
        assert GAIN_MIN <= correction.gain_at(now_s) <= GAIN_MAX
        assert abs(correction.overhead_ms_at(now_s)) <= OVERHEAD_MS_MAX
        assert 1.0 <= correction.spread_ms < 1e12

"""What the calibration computes from measurements."""

import pytest

from ops.fleet.cities import CITIES, round_trip_ms
from ops.sim.calibration import (
    KV_BLOCK_TOKENS,
    LiveMeasurements,
    PlayedRequest,
    ProfileProbe,
    demo_world,
    distribution_table,
    fit_replicas,
    ks_distance,
    replay,
)

RATE, DEPTH, OVERHEAD_S = 400.0, 2000.0, 0.03


def a_probe(pop: str, tokens: int, together: int = 1) -> ProfileProbe:
    ttft_s = OVERHEAD_S + tokens * (1 + tokens / 2 / DEPTH) / RATE
    return ProfileProbe(pop, together, tokens, ttft_s, 0.05 + 0.002 * together)


PROBES = [
    *(a_probe(pop, tokens) for pop in ("ams", "sin") for tokens in (32, 128, 512, 1500)),
    *(a_probe(pop, 32, n) for pop in ("ams", "sin") for n in (2, 4)),
]


def test_rates_are_fitted() -> None:
    ams, sin = fit_replicas(PROBES)
    assert (ams.pop, sin.pop) == ("ams", "sin")
    assert ams.overhead_s == pytest.approx(OVERHEAD_S)
    assert ams.profile.prefill_tokens_per_s == pytest.approx(RATE)
    assert ams.profile.attention_tokens == pytest.approx(DEPTH)
    assert ams.profile.step_s == pytest.approx(0.05)
    assert ams.profile.step_per_sequence_s == pytest.approx(0.002)


def test_the_kolmogorov_smirnov_distance_of_two_samples() -> None:
    assert ks_distance([1, 2, 3], [1, 2, 3]) == 0
    assert ks_distance([1, 2], [3, 4]) == 1
    assert ks_distance([1, 2, 3, 4], [3, 4, 5, 6]) == 0.5


def test_a_single_request_is_simulated_as_it_was_measured() -> None:
    replicas = fit_replicas(PROBES)
    city = CITIES[1]
    rtt_s = min(round_trip_ms(city.pop, replica.pop) for replica in replicas) / 1000
    alone = a_probe("ams", 512)
    played = PlayedRequest(
        7,
        0.0,
        city.pop,
        "",
        range(512 // KV_BLOCK_TOKENS),
        0.0,
        rtt_s + alone.ttft_s,
        0.05,
        512,
        0,
        8,
        "ams",
    )
    live = LiveMeasurements(PROBES, [played], 60.0)
    outcome = replay(live, replicas)
    assert outcome.served[0].ttft_s + OVERHEAD_S == pytest.approx(played.ttft_s, rel=0.01)
    assert demo_world(replicas).sites[outcome.served[0].replica].pop == 0
    assert "served where the simulator serves it: 100 %" in distribution_table(
        live, outcome, replicas
    )

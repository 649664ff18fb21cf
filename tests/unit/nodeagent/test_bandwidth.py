"""Bytes go no faster than the bound, and who sends too slowly is told from who is held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.decide.bandwidth import BURST_S, BandwidthLimit, MinimumRate, SlowSenderDetector


@settings(deadline=None, max_examples=60)
@given(
    rate=st.floats(1, 1e9),
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=50),
)
def test_whoever_waits_as_told_stays_below_the_rate(rate: float, sizes: list[int]) -> None:
    bandwidth, now = BandwidthLimit(rate), 1000.0
    for size in sizes:
        now += bandwidth.wait_s(size, now)
    assert sum(sizes) <= rate * (now - 1000.0 + BURST_S) * (1 + 1e-9)


def test_an_idle_time_is_not_saved_up() -> None:
    bandwidth = BandwidthLimit(100.0)
    assert bandwidth.wait_s(100, 0.0) == 0.0
    assert bandwidth.wait_s(100, 3600.0) == 0.0
    assert bandwidth.wait_s(100, 3600.0) == pytest.approx(1.0)
    assert bandwidth.wait_s(100, 3600.0) == pytest.approx(2.0)


def test_no_rate_is_no_bound() -> None:
    bandwidth = BandwidthLimit(0.0)
    assert not any(bandwidth.wait_s(10**12, 0.0) for _ in range(3))


def test_a_trickle_is_slow_and_our_own_pace_is_not() -> None:
    trickle = SlowSenderDetector(MinimumRate(1000.0, 10.0), 0.0)
    assert not any(trickle.is_slow(1, float(at)) for at in range(1, 10))
    assert trickle.is_slow(1, 10.0)
    held_back = SlowSenderDetector(MinimumRate(1000.0, 10.0), 0.0)
    assert not any(held_back.is_slow(100, float(at), excused_s=0.95) for at in range(1, 60))
    quick = SlowSenderDetector(MinimumRate(1000.0, 10.0), 0.0)
    assert not any(quick.is_slow(1000, float(at)) for at in range(1, 60))

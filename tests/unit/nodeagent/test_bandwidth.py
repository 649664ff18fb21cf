"""Bandwidth limits hold, and slow senders are detected without blaming our own throttling."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.decide.bandwidth import BURST_S, BandwidthLimit, MinimumRate, SlowSenderDetector


@settings(deadline=None, max_examples=60)
@given(
    rate=st.floats(1, 1e9),
    sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=50),
)
def test_a_sender_that_waits_as_returned_stays_below_the_rate(
    rate: float, sizes: list[int]
) -> None:
    limit, now = BandwidthLimit(rate), 1000.0
    for size in sizes:
        now += limit.wait_s(size, now)
    assert sum(sizes) <= rate * (now - 1000.0 + BURST_S) * (1 + 1e-9)


def test_unused_rate_beyond_the_burst_is_lost() -> None:
    limit = BandwidthLimit(100.0)
    assert limit.wait_s(100, 0.0) == 0.0
    assert limit.wait_s(100, 3600.0) == 0.0
    assert limit.wait_s(100, 3600.0) == pytest.approx(1.0)
    assert limit.wait_s(100, 3600.0) == pytest.approx(2.0)


def test_a_rate_of_zero_is_no_limit() -> None:
    limit = BandwidthLimit(0.0)
    assert not any(limit.wait_s(10**12, 0.0) for _ in range(3))


def test_a_slow_sender_is_detected_and_our_own_throttling_is_excused() -> None:
    slow = SlowSenderDetector(MinimumRate(1000.0, 10.0), 0.0)
    assert not any(slow.is_slow(1, float(at)) for at in range(1, 10))
    assert slow.is_slow(1, 10.0)
    throttled = SlowSenderDetector(MinimumRate(1000.0, 10.0), 0.0)
    assert not any(throttled.is_slow(100, float(at), excused_s=0.95) for at in range(1, 60))
    fast = SlowSenderDetector(MinimumRate(1000.0, 10.0), 0.0)
    assert not any(fast.is_slow(1000, float(at)) for at in range(1, 60))

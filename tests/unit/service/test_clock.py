"""A clock by which nothing is deleted early."""

from datetime import UTC, datetime, timedelta

from isochrone.service.clock import JumpFreeClock

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_a_jump_ahead_does_not_count_and_one_back_does() -> None:
    wall, steady = [NOON], [5.0]
    clock = JumpFreeClock(lambda: wall[0], lambda: steady[0])
    steady[0] += 60.0
    wall[0] = NOON + timedelta(hours=1)
    assert clock.now() == NOON + timedelta(minutes=1)
    wall[0] = NOON + timedelta(seconds=60)
    assert clock.now() == NOON + timedelta(minutes=1)
    wall[0] = NOON - timedelta(hours=1)
    assert clock.now() == NOON - timedelta(hours=1)

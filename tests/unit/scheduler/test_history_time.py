"""How far history advances."""

from datetime import UTC, datetime, timedelta

import pytest

from scheduler.decide.history_time import CATCH_UP_SHARE, advance

AT = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
YEAR = timedelta(days=365)


@pytest.mark.parametrize(
    ("elapsed_s", "wall", "expected"),
    [
        (0.0, AT + YEAR, AT),
        (3600.0, AT + HOUR, AT + HOUR),
        (3600.0, AT + YEAR, AT + HOUR * (1 + CATCH_UP_SHARE)),
        (3600.0, AT + HOUR / 2, AT + HOUR / 2),
        (3600.0, AT - YEAR, AT),
        (-5.0, AT + YEAR, AT),
    ],
)
def test_only_time_that_was_seen_passing_counts(
    elapsed_s: float, wall: datetime, expected: datetime
) -> None:
    assert advance(AT, elapsed_s, wall) == expected


def test_a_week_without_schedulers_is_caught_up_within_half_a_year() -> None:
    at, wall = AT, AT + timedelta(days=7)
    for _ in range(24 * 7):
        wall += timedelta(days=1)
        at = advance(at, 86_400.0, wall)
    assert at == wall

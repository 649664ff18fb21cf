"""How far history advances."""

import pytest

from scheduler.decide.history_time import CATCH_UP_SHARE, advance

AT = 1_800_000_000.0
HOUR = 3600.0
YEAR = 365 * 86_400.0


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
    elapsed_s: float, wall: float, expected: float
) -> None:
    assert advance(AT, elapsed_s, wall) == pytest.approx(expected)


def test_a_week_without_schedulers_is_caught_up_within_half_a_year() -> None:
    at, wall = AT, AT + 7 * 86_400.0
    for _ in range(24 * 7):
        wall += 86_400.0
        at = advance(at, 86_400.0, wall)
    assert at == wall

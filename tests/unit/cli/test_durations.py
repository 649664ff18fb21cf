"""Durations of options."""

import click
import pytest

from isochrone.cli.durations import duration_s


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("15m", 900), ("1h", 3600), ("30d", 2592e3)],
)
def test_a_duration_is_seconds_or_has_a_unit(text: str, expected_s: float) -> None:
    assert duration_s(text) == expected_s


@pytest.mark.parametrize("text", ["", "-1", "1 hour", "1w", "nan", "inf", "1e3", "h", "\u0661h"])
def test_other_texts_are_refused_with_the_ways_to_write_it(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"write seconds \(90\), or a number"):
        duration_s(text)

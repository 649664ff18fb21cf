"""Which texts are whole numbers."""

import pytest

from isochrone.wire.digits import parse_digits


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("999999999", 999_999_999),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1_0", None),
        ("1.0", None),
        ("²", None),
        ("٣", None),
        ("1000000000", None),
        ("9" * 5000, None),
    ],
)
def test_only_a_few_ascii_digits_are_a_number(text: str, number: int | None) -> None:
    assert parse_digits(text) == number


def test_the_most_digits_can_be_given() -> None:
    assert parse_digits("999", 3) == 999
    assert parse_digits("1000", 3) is None

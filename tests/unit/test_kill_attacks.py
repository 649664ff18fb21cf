"""The check of attacks that another text than the expected one is one of rounding."""

import pytest

from ops.attack.kills import is_at_border

LIKELIEST = [("T", 0.1016), ("4", 0.0906), ("H", 0.0852), ("F", 0.0681)]


@pytest.mark.parametrize(
    ("token", "point", "expected"),
    [
        ("H", 0.2773, True),
        ("F", 0.2773, True),
        ("F", 0.2765, False),
        ("4", 0.2773, False),
        ("T", 0.2773, False),
        ("Z", 0.2773, False),
    ],
)
def test_a_token_is_drawn_by_rounding_at_its_border_only(
    token: str, point: float, *, expected: bool
) -> None:
    assert is_at_border(LIKELIEST, token, point) == expected

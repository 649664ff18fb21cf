"""Contents that no row names: which are deleted."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.decide.unnamed_contents import (
    AGE_MIN_S,
    FOREIGN_MIN,
    MARK,
    MarkedByOthers,
    MostlyUnnamed,
    StoredContents,
    old_contents,
    own_mark,
    unnamed_contents,
)

NOW = 1_800_000_000.0
DIGITS = "0123456789abcdef01234567"
OUR_IDS = st.from_regex(r"(file|adapter)-[0-9a-f]{24}", fullmatch=True)
TIMES = st.floats(NOW - 3 * AGE_MIN_S, NOW + AGE_MIN_S) | st.just(math.inf)


@pytest.mark.parametrize(
    ("file_id", "age_s", "is_old"),
    [
        (f"file-{DIGITS}", AGE_MIN_S, True),
        (f"adapter-{DIGITS}", 2 * AGE_MIN_S, True),
        (f"file-{DIGITS}", AGE_MIN_S - 1.0, False),
        (f"file-{DIGITS}", -1.0, False),
        (f"file-{DIGITS}", -math.inf, False),
        (f"file-{DIGITS}\n", 2 * AGE_MIN_S, False),
        (f"file-{DIGITS}.0a1b2c3d.part", 2 * AGE_MIN_S, False),
        (f"file-{DIGITS}0", 2 * AGE_MIN_S, False),
        (f"file-{DIGITS.upper()}", 2 * AGE_MIN_S, False),
        (f"below/file-{DIGITS}", 2 * AGE_MIN_S, False),
        ("file-1", 2 * AGE_MIN_S, False),
        ("isochrone-write-probe", 2 * AGE_MIN_S, False),
        ("letters.txt", 2 * AGE_MIN_S, False),
        ("", 2 * AGE_MIN_S, False),
    ],
)
def test_only_what_is_old_and_has_our_name_may_be_deleted(
    file_id: str, age_s: float, is_old: bool
) -> None:
    listed = [StoredContents(file_id, NOW - age_s)]
    assert old_contents(listed, NOW) == ([file_id] if is_old else [])


@given(st.dictionaries(OUR_IDS | st.text(max_size=40), TIMES, max_size=30), st.sets(OUR_IDS))
def test_nothing_young_named_or_foreign_is_deleted(times: dict[str, float], rows: set[str]) -> None:
    listed = [StoredContents(*item) for item in sorted(times.items())]
    named = rows | set(sorted(times)[::2])
    deleted = unnamed_contents(old_contents(listed, NOW), named)
    assert deleted == sorted(set(deleted))
    for file_id in deleted:
        assert file_id not in named
        assert times[file_id] <= NOW - AGE_MIN_S
        assert re.fullmatch("(file|adapter)-[0-9a-f]{24}", file_id)
    kept = set(times) - set(deleted) - named
    assert not old_contents([StoredContents(name, times[name]) for name in kept], NOW)


@pytest.mark.parametrize(
    ("unnamed", "named", "is_right"),
    [
        (FOREIGN_MIN - 1, 0, True),
        (FOREIGN_MIN, 0, False),
        (FOREIGN_MIN, FOREIGN_MIN - 1, False),
        (FOREIGN_MIN, FOREIGN_MIN, True),
        (5 * FOREIGN_MIN, 4 * FOREIGN_MIN, False),
    ],
)
def test_a_folder_of_another_cluster_is_left_alone(
    unnamed: int, named: int, is_right: bool
) -> None:
    """So is one whose database was lost: the rows may be restored later."""
    old = [f"file-{number:024x}" for number in range(unnamed + named)]
    rows = set(old[unnamed:])
    if is_right:
        assert unnamed_contents(old, rows) == old[:unnamed]
        return
    with pytest.raises(MostlyUnnamed, match=f"{unnamed} of {unnamed + named}"):
        unnamed_contents(old, rows)


def test_a_mark_of_another_cluster_is_named() -> None:
    own, other = StoredContents(f"{MARK}a", NOW), StoredContents(f"{MARK}ab", NOW)
    assert own_mark([], "a") is None
    assert own_mark([own], "a") == own
    for marks in ([other], [own, other], [other, own]):
        with pytest.raises(MarkedByOthers, match=f"{MARK}ab"):
            own_mark(marks, "a")

"""The sorted table of keys, against a dict."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.client_keys import key_table
from isochrone.wire.client_keys.key_table import KeyEntry, KeyTable, KeyTableBuilder
from isochrone.wire.ids import KeyId, TenantId

IDS = st.integers(0, 60)
SPENT = st.integers(0, 2)
TABLES = st.dictionaries(IDS, SPENT, max_size=60)


def a_key(number: int, spent_until: int = 0) -> KeyEntry:
    return KeyEntry(
        key_id=KeyId(f"{number:03d}"),
        secret_sha256="0",
        tenant_id=TenantId("t"),
        spent_until=float(spent_until),
    )


def keys_of(table: dict[int, int]) -> list[KeyEntry]:
    return [a_key(number, spent) for number, spent in table.items()]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "PIECE_KEYS_MAX", 8)
    monkeypatch.setattr(key_table, "PIECE_KEYS_MIN", 3)


def check(table: KeyTable, expected: dict[int, int]) -> None:
    assert list(table) == keys_of(dict(sorted(expected.items())))
    assert len(table) == len(expected)
    assert all(0 < len(piece) <= key_table.PIECE_KEYS_MAX for piece in table.pieces)
    for number in range(62):
        entry = a_key(number, expected[number]) if number in expected else None
        assert table.get(KeyId(f"{number:03d}")) == entry
        assert (f"{number:03d}" in table) is (number in expected)
        later = [entry for entry in table if entry.key_id > f"{number:03d}"]
        assert table.first_after(KeyId(f"{number:03d}")) == next(iter(later), None)
    assert table.first_after(KeyId("")) == next(iter(table), None)


@settings(deadline=None, max_examples=200)
@given(TABLES, st.lists(st.tuples(TABLES, st.sets(IDS)), max_size=6))
def test_changes_are_applied_as_to_a_dict(
    start: dict[int, int], steps: list[tuple[dict[int, int], set[int]]]
) -> None:
    expected, table = dict(start), KeyTable.of(keys_of(start))
    check(table, expected)
    for changed, gone in steps:
        before, before_keys = table, list(table)
        table = table.replaced(keys_of(changed), (KeyId(f"{n:03d}") for n in gone))
        was = expected
        expected = {n: spent for n, spent in expected.items() if n not in gone} | changed
        check(table, expected)
        # The former table is as it was.
        assert list(before) == before_keys
        found = table.changes_from(before)
        assert {int(key.key_id) for key in found.changed} == {
            n for n, spent in expected.items() if was.get(n) != spent
        }
        assert {int(key_id) for key_id in found.gone} == set(was) - set(expected)


@settings(deadline=None, max_examples=200)
@given(TABLES, TABLES)
def test_a_table_built_beside_another_shares_what_is_the_same(
    former: dict[int, int], later: dict[int, int]
) -> None:
    known = KeyTable.of(keys_of(former))
    builder = KeyTableBuilder(known)
    for key in keys_of(dict(sorted(later.items()))):
        same = known.get(key.key_id)
        builder.add(same if same is not None and same == key else key)
    built = builder.build()
    check(built, later)
    assert built == KeyTable.of(keys_of(later))
    assert (built == known) is (former == later)


def test_equal_tables_share_all_pieces() -> None:
    known = KeyTable.of(map(a_key, range(100)))
    builder = KeyTableBuilder(known)
    for key in known:
        builder.add(key)
    assert all(a is b for a, b in zip(builder.build().pieces, known.pieces, strict=True))


def test_a_change_of_one_key_copies_one_piece() -> None:
    table = KeyTable.of(map(a_key, range(100)))
    changed = table.replaced([a_key(50, 1)], [])
    assert sum(new is not old for new, old in zip(changed.pieces, table.pieces, strict=True)) == 1


def test_keys_out_of_order_are_refused() -> None:
    builder = KeyTableBuilder()
    builder.add(a_key(2))
    for number in (1, 2):
        with pytest.raises(ValueError, match="after 002"):
            builder.add(a_key(number))


def test_no_change_gives_the_same_table() -> None:
    table = KeyTable.of([a_key(1)])
    assert table.replaced([], []) is table
    assert table.replaced([], [KeyId("001")]) == KeyTable()


@settings(deadline=None, max_examples=150)
@given(TABLES, IDS, st.none() | IDS)
def test_a_range_has_the_keys_between_its_ends(
    start: dict[int, int], after: int, until: int | None
) -> None:
    table = KeyTable.of(keys_of(start))
    last = None if until is None else KeyId(f"{until:03d}")
    check(
        table.between(KeyId(f"{after:03d}"), last),
        {n: s for n, s in start.items() if n > after and (until is None or n <= until)},
    )

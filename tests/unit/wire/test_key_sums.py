"""Sums of keys, and route tables without the keys that a router has."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire import codec
from isochrone.wire.client_keys.key_sums import (
    KEPT_SHARE_MIN,
    KEY_BUCKETS,
    KeptBuckets,
    kept_buckets,
)
from isochrone.wire.client_keys.key_table import KeyTableBuilder
from isochrone.wire.ids import Generation, KeyId
from isochrone.wire.peers.control import Register
from isochrone.wire.peers.routes import KeyEntry, KeyLimits, KeyTable, RouteTable, RouteTablePart
from isochrone.wire.peers.table_parts import BadParts, TableAssembler, read_table, split_table
from tests.unit.wire.assembling import add_part
from tests.unit.wire.test_table_parts import PART, a_key, a_table

CHANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), max_size=30)


@settings(max_examples=100, deadline=None)
@given(CHANGES)
def test_sums_depend_on_the_keys_alone_and_not_on_how_they_came(
    changes: list[tuple[int, int]],
) -> None:
    table = KeyTable.of(a_key(n) for n in range(0, 40, 2))
    assert table.sums is not None
    for number, requests in changes:
        key = a_key(number, limits=KeyLimits(requests_per_min=requests))
        table = table.replaced([key] if requests else [], [] if requests else [key.key_id])
    fresh = KeyTable.of(table)
    builder = KeyTableBuilder(fresh)
    for key in table:
        builder.add(key)
    sent = [codec.decode(codec.encode(key), codec.decoder(KeyEntry)) for key in table]
    expected = fresh.sums.encode()
    assert table.sums.encode() == expected
    assert builder.build().sums.encode() == expected
    assert KeyTable.of(sent).sums.encode() == expected


def test_a_changed_limit_changes_the_sum_of_one_bucket() -> None:
    before = KeyTable.of(a_key(n) for n in range(1000))
    after = before.replaced([a_key(7, limits=KeyLimits(concurrency=1))], [])
    kept = kept_buckets(before.sums.encode(), after.sums)
    assert kept is not None
    assert sum(bucket in kept for bucket in range(KEY_BUCKETS)) == KEY_BUCKETS - 1
    assert not kept.are_all
    # And `before`, whose sums were copied, has not changed.
    assert before.sums.encode() == KeyTable.of(before).sums.encode()


def test_a_router_with_too_few_of_the_keys_is_sent_all() -> None:
    wanted = KeyTable.of(a_key(n) for n in range(20_000))
    part = KeyTable.of(list(wanted)[: int(20_000 * KEPT_SHARE_MIN) - 1000])
    assert kept_buckets(part.sums.encode(), wanted.sums) is None
    assert kept_buckets(b"", wanted.sums) is None
    assert kept_buckets(b"x" * 8, wanted.sums) is None


def parts_besides(table: RouteTable, held: KeyTable) -> list[RouteTablePart]:
    kept = kept_buckets(held.sums.encode(), table.keys.sums)
    assert kept is not None
    return [codec.decode(frame, PART) for frame in split_table(table, kept=kept) if frame]


def join(parts: list[RouteTablePart], held: KeyTable) -> tuple[RouteTable, int]:
    """Return the table, and in how many steps it was joined."""
    assembler, steps = TableAssembler(), 0
    for part in parts:
        stepping = assembler.steps(part, held)
        while True:
            steps += 1
            try:
                next(stepping)
            except StopIteration as end:
                if end.value is not None:
                    return end.value, steps
                break
    raise AssertionError("no table")


def test_a_router_that_comes_back_is_sent_only_the_keys_that_it_does_not_have() -> None:
    former = a_table(20_000).keys
    changed = [a_key(77, limits=KeyLimits(concurrency=1)), a_key(500_000)]
    table = msgspec.structs.replace(
        a_table(20_000, generation=9), keys=former.replaced(changed, [KeyId(f"{5:012d}")])
    )
    parts = parts_besides(table, former)
    assert sum(len(part.keys) for part in parts) < 100
    assembled, steps = join(parts, former)
    assert assembled == table
    assert assembled.keys.get(KeyId(f"{5:012d}")) is None
    assert assembled.keys.sums.encode() == table.keys.sums.encode()
    # Looked through and changed a little at a time.
    assert steps >= len(parts) + len(former.pieces) // 16


def test_a_router_with_all_keys_is_sent_none_and_keeps_its_objects() -> None:
    former = a_table(20_000).keys
    # As another scheduler has read them.
    table = msgspec.structs.replace(a_table(20_000, generation=9), keys=KeyTable.of(former))
    parts = parts_besides(table, former)
    assert not any(part.keys for part in parts)
    assembled, _ = join(parts, former)
    assert assembled == table
    assert assembled.keys is former


def test_the_first_part_of_an_empty_table_says_what_is_kept() -> None:
    keys = KeyTable.of([a_key(1)])
    table = msgspec.structs.replace(a_table(0, generation=2), keys=keys)
    (part,) = parts_besides(table, keys)
    assert part.is_last
    assert join([part], keys)[0] == table


def test_buckets_of_another_version_refuse_the_table_once() -> None:
    first, *rest = parts_besides(a_table(3000), a_table(3000).keys)
    assembler = TableAssembler()
    with pytest.raises(BadParts, match="8 buckets of keys"):
        add_part(assembler, msgspec.structs.replace(first, keys_kept=b"\xff"), KeyTable())
    assert all(add_part(assembler, part, KeyTable()) is None for part in rest)


def test_the_search_for_missing_keys_pauses() -> None:
    table = a_table(40_000)
    kept = KeptBuckets.of(range(KEY_BUCKETS - 1))
    assert list(split_table(table, kept=kept)).count(b"") >= len(table.keys.pieces) // 16


def test_a_stored_table_has_its_sums_before_the_event_loop_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = read_table(codec.encode(a_table(10)))

    def fail(*arguments: Any) -> None:
        raise AssertionError("computed on the event loop")

    monkeypatch.setattr("isochrone.wire.client_keys.key_sums._digest", fail)
    assert len(table.keys.sums.encode()) == 8 * KEY_BUCKETS


def test_a_registration_with_sums_is_within_the_limit_of_strangers() -> None:
    fields: dict[str, Any] = dict.fromkeys(Register.__struct_fields__, "")
    fields |= {"generation": Generation(1), "keys_held": a_table(9).keys.sums.encode()}
    assert len(msgspec.msgpack.encode(fields)) < 32 * 1024

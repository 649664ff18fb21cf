"""Route tables in parts."""

from typing import Any

import msgspec
import pytest

from isochrone.wire import codec
from isochrone.wire.ids import ClusterId, Epoch, Generation, KeyId, TenantId
from isochrone.wire.peers.routes import (
    KeyEntry,
    KeyLimits,
    KeyTable,
    RouteDelta,
    RouteTable,
    RouteTablePart,
    apply_delta,
    diff,
)
from isochrone.wire.peers.table_parts import (
    BadParts,
    TableAssembler,
    encode_table,
    read_table,
    split_table,
)
from tests.unit.wire.assembling import add_part

PART = codec.decoder(RouteTablePart)
BYTES_MAX = 4096
EMPTY = KeyTable()


def a_key(number: int, **fields: Any) -> KeyEntry:
    return KeyEntry(
        key_id=KeyId(f"{number:012d}"), secret_sha256="f" * 64, tenant_id=TenantId("t"), **fields
    )


def a_table(keys: int, generation: int = 1) -> RouteTable:
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(generation),
        epoch=Epoch(1),
        keys=KeyTable.of(a_key(n, limits=KeyLimits(concurrency=3)) for n in range(keys)),
        keys_revoked=tuple(KeyId(f"r{n:011d}") for n in range(keys)),
    )


def parts_of(table: RouteTable) -> list[RouteTablePart]:
    return [codec.decode(frame, PART) for frame in split_table(table, BYTES_MAX)]


def join(
    assembler: TableAssembler, parts: list[RouteTablePart], known: KeyTable = EMPTY
) -> RouteTable | None:
    *rest, last = parts
    assert all(add_part(assembler, part, known) is None for part in rest)
    return add_part(assembler, last, known)


@pytest.mark.parametrize("keys", [0, 1, 3000])
def test_a_table_is_the_same_after_it_was_split_and_joined(keys: int) -> None:
    table = a_table(keys)
    frames = list(split_table(table, BYTES_MAX))
    assert max(map(len, frames)) <= BYTES_MAX
    assembled = join(TableAssembler(), parts_of(table))
    assert assembled is not None
    assert assembled == table


def test_a_table_above_the_frame_limit_goes_in_parts_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 2 * BYTES_MAX)
    table = a_table(500)
    assert len(codec.encode(table)) > codec.FRAME_BYTES_MAX
    assert all(len(frame) < codec.FRAME_BYTES_MAX for frame in split_table(table, BYTES_MAX))


def test_an_entry_larger_than_a_part_goes_alone() -> None:
    wide = a_key(1, deployments=tuple(f"deployment-{n:09d}" for n in range(1000)))
    table = msgspec.structs.replace(a_table(3), keys=KeyTable.of([a_key(0), wide, a_key(2)]))
    assembled = join(TableAssembler(), parts_of(table))
    assert assembled is not None
    assert assembled == table


def test_no_field_of_a_key_is_lost() -> None:
    filled = a_key(
        7,
        deployments=("m",),
        limits=KeyLimits(concurrency=3),
        expires_at=1.0,
        spent_until=2.0,
        regions=("NL",),
    )
    defaults = a_key(0)
    for field in KeyEntry.__struct_fields__:
        assert getattr(filled, field) != getattr(defaults, field) or field in (
            "secret_sha256",
            "tenant_id",
        )
    table = msgspec.structs.replace(a_table(0), keys=KeyTable.of([filled]))
    assert join(TableAssembler(), parts_of(table)) == table
    assert read_table(b"".join(encode_table(table))) == table


def test_equal_keys_of_the_former_table_are_kept_and_equal_fields_are_shared() -> None:
    former = a_table(100).keys
    assembled = join(TableAssembler(), parts_of(a_table(200, generation=2)), former)
    assert assembled is not None
    assert all(assembled.keys.get(key.key_id) is key for key in former)
    first, second = list(assembled.keys)[150:152]
    assert first.limits is second.limits
    assert first.tenant_id is second.tenant_id


def test_a_missing_part_is_noticed_once_and_the_next_table_is_taken() -> None:
    assembler, parts = TableAssembler(), parts_of(a_table(500))
    add_part(assembler, parts[0], KeyTable())
    with pytest.raises(BadParts, match="missing"):
        add_part(assembler, parts[2], KeyTable())
    assert join(assembler, parts[3:]) is None
    assert join(assembler, parts) is not None


def test_parts_of_two_tables_are_not_mixed() -> None:
    assembler = TableAssembler()
    add_part(assembler, parts_of(a_table(500))[0], KeyTable())
    with pytest.raises(BadParts):
        add_part(assembler, parts_of(a_table(500, generation=2))[1], KeyTable())


def test_a_table_of_too_many_entries_is_refused() -> None:
    with pytest.raises(BadParts, match="more than 600 entries"):
        join(TableAssembler(entries_max=600), parts_of(a_table(301)))


@pytest.mark.parametrize("keys", [0, 1, 2500])
def test_the_pieces_of_a_table_on_disk_are_read_as_before(keys: int) -> None:
    table = a_table(keys)
    stored = b"".join(encode_table(table))
    assert codec.decode(stored, codec.decoder(RouteTable)) == table
    assert read_table(stored) == table


def test_a_delta_leaves_lists_without_changes_as_they_are() -> None:
    table = a_table(10)
    delta = RouteDelta(
        cluster_id=table.cluster_id,
        base=table.generation,
        generation=Generation(2),
        epoch=Epoch(1),
        keys_set=(a_key(3), a_key(99)),
        keys_gone=(KeyId(f"{5:012d}"), KeyId("unknown")),
    )
    after = apply_delta(table, delta)
    assert after.keys_revoked is table.keys_revoked
    assert [int(key.key_id) for key in after.keys] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 99]
    assert after.keys.get(a_key(3).key_id) == a_key(3)
    assert diff(table, after).keys_gone == (KeyId(f"{5:012d}"),)


def test_a_message_above_the_limit_is_refused_where_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 10)
    codec.check_size(bytes(10), "demand")
    with pytest.raises(codec.FrameTooLarge, match="kind demand: 11 bytes, the limit is 10"):
        codec.check_size(bytes(11), "demand")

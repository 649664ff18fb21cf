"""Compatibility with the previous release, because an upgrade replaces one process at a time.

`ops/golden/formats.json` holds what that release wrote. A new field needs a default, because the
previous release does not write it. A field that it requires must stay, unless only schedulers read
it: they are upgraded first.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.service import files
from isochrone.wire.client_keys.key_table import decode_hook, encode_hook
from isochrone.wire.ids import BootId, ClusterId
from isochrone.wire.peers.control import register_payload
from ops.golden.make_formats import FILE, TO_ALL, TO_SCHEDULERS, fields_of, formats
from router.recording.usage_journal import UsageJournal
from scheduler.store.migrate import read_migrations

BEFORE = json.loads(FILE.read_text())


@pytest.mark.parametrize("kind", [*TO_SCHEDULERS, *TO_ALL], ids=lambda kind: str(kind.__name__))
def test_formats_of_the_previous_release_are_read(kind: Any) -> None:
    for written in BEFORE[kind.__name__].values():
        read = msgspec.json.decode(json.dumps(written), type=kind, dec_hook=decode_hook)
        assert agrees(written, json.loads(msgspec.json.encode(read, enc_hook=encode_hook)))


def agrees(written: Any, read: Any) -> bool:
    """Return True if all fields that were written and are still known have the same values."""
    if isinstance(written, Mapping):
        return all(agrees(written[name], read[name]) for name in written if name in read)
    if isinstance(written, list):
        # A named tuple with a new field, which has a default, is longer now.
        return len(written) <= len(read) and all(map(agrees, written, read))
    return bool(written == read)


def test_the_formats_of_this_release_can_be_made() -> None:
    made = formats()
    for kind in (*TO_SCHEDULERS, *TO_ALL):
        for written in made[kind.__name__].values():
            read = msgspec.json.decode(json.dumps(written), type=kind, dec_hook=decode_hook)
            assert agrees(written, json.loads(msgspec.json.encode(read, enc_hook=encode_hook)))
    # A release only adds: each field that the one before wrote has its sample.
    lost = [
        name for name in BEFORE if name != "asked_for" and lost_fields(BEFORE[name], made[name])
    ]
    assert not lost


def lost_fields(before: Any, today: Any) -> bool:
    """Return whether a field of `before` is missing today, or has another value."""
    if isinstance(before, Mapping):
        return any(name not in today or lost_fields(before[name], today[name]) for name in before)
    if isinstance(before, list):
        return len(before) > len(today) or any(map(lost_fields, before, today))
    return bool(before != today)


def test_required_fields_of_the_previous_release_are_written() -> None:
    today = fields_of(TO_ALL, required=False)
    gone = {
        f"{name}.{field}"
        for name, fields in BEFORE["asked_for"].items()
        for field in fields
        if field not in today.get(name, ())
    }
    assert not gone, "the previous release cannot read messages without these"
    assert "address" in BEFORE["asked_for"]["Route"]


def test_a_released_migration_is_not_edited() -> None:
    today = {migration.name: migration.sha256 for migration in read_migrations()}
    assert today.items() >= BEFORE["migrations"].items(), (
        "every existing database would refuse this release"
    )


def test_a_snapshot_of_the_previous_release_is_opened(tmp_path: Path) -> None:
    sealed = (
        "69736f6368726f6e652d736e617073686f742d310a"
        "239f59ed55e737c77147cf55ad0c1b030b6d7ee748a7426952f9b852d5a935e5"
        "7061796c6f6164"
    )
    (tmp_path / "table").write_bytes(bytes.fromhex(sealed))
    assert files.read_snapshot(tmp_path / "table") == b"payload"
    files.write_snapshot(tmp_path / "again", b"payload")
    assert (tmp_path / "again").read_bytes().hex() == sealed


def test_a_journal_of_the_previous_release_is_read(tmp_path: Path) -> None:
    row = msgspec.msgpack.encode(BEFORE["UsageRow"]["whole"])
    (tmp_path / "rows.000000003").write_bytes(row + row)
    journal = UsageJournal(tmp_path, time.monotonic)
    rows = journal.open()
    journal.close()
    assert [json.loads(msgspec.json.encode(row)) for row in rows] == [
        BEFORE["UsageRow"]["whole"]
    ] * 2


def test_the_registration_signature_covers_the_same_bytes_as_before() -> None:
    signed = register_payload(
        cluster_id=ClusterId("c"), nonce=b"\x01", name="n", boot_id=BootId("b")
    )
    assert signed == b"isochrone-register-1\0\x94\xa1c\xc4\x01\x01\xa1n\xa1b"

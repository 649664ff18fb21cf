"""Every file of a service, truncated or corrupted at every byte, is read wholly or not at all.

What a power cut leaves is the beginning of a file. No part may die of it at each start, take it for
something else, or lose what lies whole beside it.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from isochrone.service import files
from isochrone.service.trust.identity import IdentityError, load_identity, save_identity
from isochrone.wire.ids import (
    DeploymentId,
    KeyId,
    NodeId,
    PopId,
    ReplicaId,
    RequestId,
    RouterId,
    TenantId,
)
from isochrone.wire.peers.usage import RequestOutcome, Usage, UsageRow
from nodeagent.drivers.driver import EngineCommand
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.host.assignment_file import AssignmentFile
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.host.engines.engine_record import EngineRecord
from router.recording.usage_journal import UsageJournal
from router.recording.usage_spool import UsageSpool
from tests.builders import a_spec
from tests.integration.router.fleet_of import an_identity
from tests.unit.nodeagent.test_decide import an_assignment


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, because a disk would sync each rewritten file."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def torn(path: Path) -> Iterator[int]:
    """Write every prefix of a file, then the file with single bytes changed."""
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        yield size
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        yield at
    path.write_bytes(whole)


def a_row(number: int) -> UsageRow:
    return UsageRow(
        request_id=RequestId(f"req-{number}"), key_id=KeyId("k"), tenant_id=TenantId("t"),
        deployment_id=DeploymentId("d"), pop=PopId("ams"), node_id=NodeId("n"),
        replica_id=ReplicaId("r"), started_at=1.0, prompt_tokens=number, cached_tokens=0,
        output_tokens=3, outcome=RequestOutcome.COMPLETE, ttft_ms=1.0, duration_ms=2.0,
    )  # fmt: skip


def test_a_torn_snapshot_is_replaced_by_the_previous_one(folder: Path) -> None:
    ledger = AssignmentFile(folder)
    before, last = an_assignment(("a",), generation=5), an_assignment(("a", "b"), generation=6)
    ledger.write(before)
    ledger.write(last)
    for _ in torn(folder / "assignment"):
        assert ledger.read() == before
    assert ledger.read() == last
    shutil.copy(folder / "assignment", folder / "kept")
    for name in ("assignment", "assignment.prev"):
        (folder / name).write_bytes(b"")
    assert ledger.read() is None
    (folder / "assignment").unlink()
    assert ledger.read() is None
    # Whole, and of a release that wrote another thing.
    files.write_snapshot(folder / "assignment", b"\x93\x01\x02\x03")
    assert ledger.read() is None


def test_all_complete_rows_of_a_torn_journal_are_read(folder: Path) -> None:
    journal = UsageJournal(folder, time.monotonic)
    assert journal.open() == ()
    sizes = [0]
    for number in range(3):
        journal.append(a_row(number), time.monotonic())
        sizes.append(sizes[-1] + len(msgspec.msgpack.encode(a_row(number))))
    journal.close()
    whole = (folder / "rows.000000001").read_bytes()[: sizes[-1] + 1]
    for cut in range(len(whole) + 1):
        life = folder / "torn"
        shutil.rmtree(life, ignore_errors=True)
        life.mkdir()
        (life / "rows.000000001").write_bytes(whole[:cut])
        reopened = UsageJournal(life, time.monotonic)
        rows = reopened.open()
        assert [row.request_id for row in rows] == [
            f"req-{n}" for n in range(3) if sizes[n + 1] <= cut
        ]
        reopened.append(a_row(9), time.monotonic())
        reopened.close()
        # Nobody has them yet: the next life finds them all again.
        again = UsageJournal(life, time.monotonic)
        assert [row.request_id for row in again.open()][-1:] == ["req-9"]
        again.append(a_row(10), time.monotonic())
        aside = again.rotate()
        again.remove(aside)
        again.close()
        assert UsageJournal(life, time.monotonic).open() == ()


@pytest.mark.parametrize(
    "rest",
    [b"\0" * 64, b"\xc1", b"\x93\x01\x02\x03", b"\xff" * 9],
    ids=["zeros", "no msgpack", "another list", "negative numbers"],
)
def test_what_is_no_row_does_not_lose_the_rows_before_it(folder: Path, rest: bytes) -> None:
    """A power cut may leave a file at its full length, with blocks that were never written."""
    journal = UsageJournal(folder, time.monotonic)
    journal.open()
    for number in range(3):
        journal.append(a_row(number), time.monotonic())
    journal.close()
    with (folder / "rows.000000001").open("ab") as file:
        file.write(rest)
    rows = UsageJournal(folder, time.monotonic).open()
    assert [row.request_id for row in rows] == ["req-0", "req-1", "req-2"]


def test_a_torn_usage_batch_does_not_block_others(folder: Path) -> None:
    spool = UsageSpool(folder, 1 << 20)
    spool.open()
    good, bad = (
        Usage(router_id=RouterId("r"), batch_id=name, rows=(a_row(1),)) for name in ("2", "1")
    )
    spool.add(good)
    spool.add(bad)
    for _ in torn(folder / "1.usage"):
        reopened = UsageSpool(folder, 1 << 20)
        assert reopened.open() == 2
        read = reopened.read("1")
        assert read is None or read.router_id == "r" or read.rows
        assert reopened.read("2") == good


def test_a_torn_identity_is_refused_with_its_path(folder: Path) -> None:
    save_identity(folder, an_identity(folder))
    path = folder / "identity.json"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(IdentityError, match=r"cannot use .*identity\.json"):
            load_identity(folder)


def test_a_torn_engine_record_is_skipped(folder: Path) -> None:
    engines = EngineProcesses(folder, 1)
    (folder / "r1").mkdir()
    command = EngineCommand(arguments=("x",), base_url="http://localhost")
    started = EngineRecord(
        pid=1,
        started=-1,
        command=command,
        spec=a_spec(),
    )
    path = folder / "r1" / "process.json"
    path.write_bytes(msgspec.json.encode(started))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(whole[:size])
        assert engines.survivors() == []


def test_a_torn_kv_block_is_recomputed(folder: Path) -> None:
    tier = FileTier(folder, b"m", 5, 1 << 20)
    torn_one, other = b"\x01" * 32, b"\x02" * 32
    tier.write(other, b"other")
    tier.write(torn_one, b"torn!")
    (path,) = folder.glob(f"*/01/{torn_one.hex()}")
    whole = path.read_bytes()
    for at in range(len(whole)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(content)
            again = FileTier(folder, b"m", 5, 1 << 20)
            assert again.read(torn_one) is None
            assert again.read(other) == b"other"
            assert not path.exists()

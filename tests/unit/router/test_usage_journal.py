"""The journal rests while the disk is slow, because the event loop writes it."""

from pathlib import Path

import pytest

from router.recording.usage_journal import REST_S, SLOW_S, UsageJournal, read_rows
from tests.chaos.test_torn_files import a_row


class DiskClock:
    """A clock by which each of the next `slow` pairs of readings is SLOW_S apart."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock() -> DiskClock:
    return DiskClock()


@pytest.fixture
def journal(tmp_path: Path, clock: DiskClock) -> UsageJournal:
    journal = UsageJournal(tmp_path, clock)
    journal.open()
    return journal


def rows_in(folder: Path) -> list[list[str]]:
    """Return the ids of the rows in each file."""
    return [[row.request_id for row in read_rows(path)] for path in sorted(folder.glob("rows*"))]


def test_after_a_slow_write_no_row_is_written_for_a_while(
    tmp_path: Path, journal: UsageJournal, clock: DiskClock
) -> None:
    clock.step_s = SLOW_S
    journal.append(a_row(1), clock())
    clock.step_s = 0.0
    assert rows_in(tmp_path) == [["req-1"]]
    journal.append(a_row(2), clock())
    assert journal.rotate() == ()
    assert rows_in(tmp_path) == [["req-1"]]
    clock.now_s += REST_S
    journal.append(a_row(3), clock())
    assert rows_in(tmp_path) == [["req-1", "req-3"]]
    assert len(journal.rotate()) == 1
    assert rows_in(tmp_path) == [["req-1", "req-3"], []]


def test_a_file_that_opens_slowly_is_a_slow_disk_too(
    tmp_path: Path, journal: UsageJournal, clock: DiskClock
) -> None:
    journal.append(a_row(1), clock())
    clock.step_s = SLOW_S
    assert len(journal.rotate()) == 1
    clock.step_s = 0.0
    journal.append(a_row(2), clock())
    assert rows_in(tmp_path) == [["req-1"], []]


def test_a_slow_disk_is_logged_once(
    journal: UsageJournal, clock: DiskClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.step_s = SLOW_S
    for number in range(5):
        journal.append(a_row(number), clock())
        clock.now_s += REST_S
    assert [record.getMessage() for record in caplog.records] == [
        "slow disk: usage is not journaled for a while"
    ]


@pytest.mark.parametrize("allocated", [0, 1, 4096])
def test_space_for_more_rows_is_no_row(
    tmp_path: Path, journal: UsageJournal, caplog: pytest.LogCaptureFixture, allocated: int
) -> None:
    journal.append(a_row(1), 1000.0)
    journal.close()
    with (tmp_path / "rows.000000001").open("ab") as file:
        file.write(bytes(allocated))
    assert rows_in(tmp_path) == [["req-1"]]
    assert not caplog.records

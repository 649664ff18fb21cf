"""The journal rests while the disk is slow, because the event loop writes it."""

from pathlib import Path

import pytest

from router.recording.usage_journal import REST_S, SLOW_S, UsageJournal
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


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("rows*"))]


def test_after_a_slow_write_no_row_is_written_for_a_while(
    tmp_path: Path, journal: UsageJournal, clock: DiskClock
) -> None:
    clock.step_s = SLOW_S
    journal.append(a_row(1))
    clock.step_s = 0.0
    (one,) = sizes(tmp_path)
    journal.append(a_row(2))
    assert journal.rotate() == ()
    assert sizes(tmp_path) == [one]
    clock.now_s += REST_S
    journal.append(a_row(3))
    assert sizes(tmp_path) == [2 * one]
    assert len(journal.rotate()) == 1
    assert sizes(tmp_path) == [2 * one, 0]


def test_a_file_that_opens_slowly_is_a_slow_disk_too(
    tmp_path: Path, journal: UsageJournal, clock: DiskClock
) -> None:
    journal.append(a_row(1))
    clock.step_s = SLOW_S
    assert len(journal.rotate()) == 1
    clock.step_s = 0.0
    journal.append(a_row(2))
    assert sizes(tmp_path)[1:] == [0]


def test_a_slow_disk_is_logged_once(
    journal: UsageJournal, clock: DiskClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.step_s = SLOW_S
    for number in range(5):
        journal.append(a_row(number))
        clock.now_s += REST_S
    assert [record.getMessage() for record in caplog.records] == [
        "slow disk: usage is not journaled for a while"
    ]

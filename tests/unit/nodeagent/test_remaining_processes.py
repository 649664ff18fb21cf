"""What is left of an engine is killed, and its memory is free afterwards."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nodeagent.host import processes


@pytest.mark.parametrize("is_member", [True, False])
def test_what_is_left_of_an_engine_has_ended_when_it_counts_as_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_member: bool
) -> None:
    """A process with much memory ends long after it was killed, here by a moment."""
    log = tmp_path / "engine.log"
    child = processes.spawn(("sleep", "60"), log if not is_member else tmp_path / "other.log")
    kill, timers = os.kill, []

    def kill_later(pid: int, number: int) -> None:
        timers.append(threading.Timer(0.2, kill, (pid, number)))
        timers[-1].start()

    if is_member:
        # Its group has been signalled.
        kill_later(child.pid, signal.SIGKILL)
    else:
        monkeypatch.setattr(os, "kill", kill_later)
    try:
        processes.kill_remaining(log, child.pid if is_member else 0)
        assert child.poll() == -signal.SIGKILL
    finally:
        for timer in timers:
            timer.join()
        child.kill()
        child.wait()


def test_a_process_that_does_not_end_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    child = processes.spawn(("sleep", "60"), log)
    monkeypatch.setattr(processes, "END_TIMEOUT_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: None)
        processes.kill_remaining(log)
    assert child.poll() is None
    child.kill()
    child.wait()


def test_a_zombie_has_ended(tmp_path: Path) -> None:
    """In a container there may be no process that reaps it."""
    child = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    processes.kill_remaining(tmp_path / "engine.log", os.getpgid(child.pid))
    child.wait()

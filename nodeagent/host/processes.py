"""Processes as an agent has them: started to outlive it, and known again by what /proc tells."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

PASSED_ENVIRONMENT: Final = (
    "PATH",
    "LANG",
    "HOME",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TMPDIR",
    "XDG_CACHE_HOME",
)
"""What an engine may see of the agent's environment; keys and tokens are not among it."""

Child = subprocess.Popen[bytes]


def spawn(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] = {},
    stdin: int = subprocess.DEVNULL,
) -> Child:
    """Start a process in a group of its own that writes to `log`. Blocking."""
    passed = {name: os.environ[name] for name in PASSED_ENVIRONMENT if name in os.environ}
    # A file, not a pipe: an engine must survive the agent that reads it.
    with log.open("ab") as out:
        try:
            return subprocess.Popen(
                arguments,
                stdin=stdin,
                stdout=out,
                stderr=out,
                env={**passed, **environment},
                start_new_session=True,
            )
        except FileNotFoundError as error:
            words = f"cannot start {arguments[0]}: it is not on the PATH of the agent"
            raise FileNotFoundError(words) from error


def boot_id() -> str:
    """Return which of the machine's lives this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_alive(pid: int, started: int) -> bool:
    """Say whether a process that began at `started` is there, and no zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z" and int(fields[19]) == started


def group_that_writes(log: Path) -> int:
    """Return the process group whose standard output is `log`; 0 where there is none.

    A file of the same name that was removed is another.
    """
    written = log.resolve()
    for folder in Path("/proc").glob("[0-9]*"):
        # One that ends meanwhile is not it.
        with suppress(OSError):
            fields = _stat(int(folder.name))
            if fields is not None and (folder / "fd/1").readlink() == written:
                return int(fields[2])
    return 0


def signal_group(leader: int, started: int, number: signal.Signals) -> None:
    """Signal what `leader`, a process that began at `started`, and its like have started.

    It may be gone while its children hold the device. A pid is not used again while a group bears
    it: if another process has it now, the group is empty, and what bears the number is not ours.
    """
    if leader and start_time(leader) in (0, started):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process after its name (proc(5)); None if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return None

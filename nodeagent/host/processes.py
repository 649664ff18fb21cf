"""Child processes that outlive the agent: started in groups of their own, found again in /proc."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from isochrone.service.trust.landlock import FileRule, confined_command, open_ruleset

PASSED_ENVIRONMENT: Final = (
    "PATH",
    "LANG",
    "HOME",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "PYTHONHASHSEED",
)
"""The variables of the agent's environment that an engine gets. They hold no secrets."""

PASSED_PREFIXES: Final = (
    *("VLLM_", "SGLANG_", "TRTLLM_", "HF_", "MOONCAKE_"),
    *("OMP_", "KMP_", "UCX_", "NCCL_", "GLOO_"),
)
"""Prefixes of variables that engines and their libraries read, which an engine gets, too."""

SECRET_WORDS: Final = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""A variable with one of these words in its name is not passed on, such as HF_TOKEN."""

LOG_VARIABLE: Final = "ISOCHRONE_ENGINE_LOG"
"""A variable of each engine with the path of its log. Its children inherit it, also those that
leave its process group and write elsewhere."""

KILL_PASSES_MAX: Final = 5
"""How often the children of an engine are looked for: they may start others meanwhile."""

KILL_PAUSE_S: Final = 1.0
"""How long it waits where /proc cannot be read."""

END_TIMEOUT_S: Final = 2.0
END_POLL_S: Final = 0.02
"""How long each pass waits for the processes that it killed, and how often it looks."""

OOM_SCORE: Final = "300"
"""The `oom_score_adj` of engines, out of 1000 (proc_pid_oom_score_adj(5)): if memory is short, the
kernel kills an engine before the agent and other services of the machine."""

NICENESS: Final = 10
"""The niceness of an engine that computes on the machine's processors: a tenth of other processes'
weight."""

AUTOGROUP_TRIES: Final = 5
AUTOGROUP_PAUSE_S: Final = 0.12
"""The kernel takes one change each 0.1 s from users other than root, and refuses others."""

Child = subprocess.Popen[bytes]


def spawn(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str] = {},
    stdin: int = subprocess.DEVNULL,
    folder: str | None = None,
    rules: Sequence[FileRule] = (),
) -> Child:
    """Start a process in a group of its own, with its output appended to `log`. Blocks.

    It works in `folder`, or where the agent does. With `rules` it is confined to them.

    Raises FileNotFoundError if the program is not on the PATH, CannotConfine.
    """
    passed = {**passed_environment(os.environ), **environment, LOG_VARIABLE: str(log.resolve())}
    if shutil.which(arguments[0], path=passed.get("PATH")) is None:
        raise FileNotFoundError(f"cannot start {arguments[0]}: it is not on the PATH of the agent")
    # A file, not a pipe: the engine must survive the agent that would read the pipe.
    with log.open("ab") as out, _inherited_ruleset(rules) as rulesets:
        for ruleset in rulesets:
            arguments = confined_command(ruleset, arguments, sys.executable)
        child = subprocess.Popen(
            arguments,
            stdin=stdin,
            stdout=out,
            stderr=out,
            env=passed,
            start_new_session=True,
            cwd=folder,
            pass_fds=rulesets,
        )
    with suppress(OSError):
        Path(f"/proc/{child.pid}/oom_score_adj").write_text(OOM_SCORE)
    return child


def lower_priority(pid: int) -> None:
    """Lower the priority of a new process and of its future children. Blocks.

    An engine on processors uses all of them, and its threads never wait. Where the kernel schedules
    sessions as groups (sched(7), "The autogroup feature"), niceness counts only within a group, so
    the group's is set, too.
    """
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # The thread may have ended.
        with suppress(ProcessLookupError, PermissionError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), NICENESS)
    for _ in range(AUTOGROUP_TRIES):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))
        except BlockingIOError:
            time.sleep(AUTOGROUP_PAUSE_S)
        except OSError:
            return  # the kernel has no such groups, or the process has ended
        else:
            return


@contextmanager
def _inherited_ruleset(rules: Sequence[FileRule]) -> Iterator[tuple[int, ...]]:
    """Open the ruleset of these rules during the block; there is none without rules."""
    if not rules:
        yield ()
        return
    ruleset = open_ruleset(rules)
    try:
        yield (ruleset,)
    finally:
        os.close(ruleset)


def ended_by(child: Child | None) -> str:
    """Return how a process ended: with its status or the signal that killed it, where known.

    That is all there is to see of a program that ends without a word.
    """
    code = child.poll() if child is not None else None
    if code is None or code >= 0:
        return "exited" if code is None else f"exited with status {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def passed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the agent's environment that its engines get."""
    return {
        name: value
        for name, value in environment.items()
        if name in PASSED_ENVIRONMENT
        or (name.startswith(PASSED_PREFIXES) and not any(word in name for word in SECRET_WORDS))
    }


def boot_id() -> str:
    """Return the kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot, or 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_alive(pid: int, started: int) -> bool:
    """Return True if the process that started at `started` exists and is not a zombie."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z" and int(fields[19]) == started


def group_that_writes(log: Path) -> int:
    """Return the process group whose standard output is `log`, or 0 if there is none.

    A deleted log of the same name does not match: /proc marks its path as deleted.
    """
    for pid in _writers(log):
        fields = _stat(pid)
        if fields is not None:
            return int(fields[2])
    return 0


def output_of(pid: int) -> Path:
    """Return the file that is a process's standard output. Raises OSError."""
    return Path(f"/proc/{pid}/fd/1").readlink()


def kill_remaining(log: Path, leader: int = 0) -> None:
    """Kill what is left of the engine with this log, whatever its process group. Blocks.

    It finds every process that writes to the log or has inherited LOG_VARIABLE, but not one that
    cleared its environment and writes elsewhere. It waits until these processes and the group of
    `leader`, which has been signalled, have ended, because until then they hold memory. Without a
    free descriptor it tries for a while.
    """
    for _ in range(KILL_PASSES_MAX):
        try:
            found = {*_writers(log), *_with_variable(f"{LOG_VARIABLE}={log.resolve()}")}
            members = group_members(leader) if leader else ()
        except OSError:
            time.sleep(KILL_PAUSE_S)
            continue
        ending = [pid for pid in {*found, *members} if _runs(pid)]
        if not ending:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _wait_until_ended(ending)


def _wait_until_ended(pids: Sequence[int]) -> None:
    for _ in range(round(END_TIMEOUT_S / END_POLL_S)):
        if not any(map(_runs, pids)):
            return
        time.sleep(END_POLL_S)


def _runs(pid: int) -> bool:
    """Return whether a thread of a process runs. Its first one may have ended before the others."""
    threads: list[Path] = []
    with suppress(OSError):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    for thread in threads:
        with suppress(OSError):
            stat = (thread / "stat").read_text(errors="replace")
            if stat.rpartition(")")[2].split()[0] != "Z":
                return True
    return False


def _with_variable(assignment: str) -> list[int]:
    """Return the processes that were started with this in their environment, without zombies."""
    wanted = assignment.encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Another user's cannot be read, and a zombie's is empty.
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _writers(log: Path) -> list[int]:
    """Return the processes whose standard output is `log`."""
    target = log.resolve()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is examined.
        with suppress(OSError):
            if (folder / "fd/1").readlink() == target:
                found.append(int(folder.name))
    return found


def group_members(leader: int) -> list[int]:
    """Return the processes of a group. Blocks."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        fields = _stat(int(folder.name))
        if fields is not None and int(fields[2]) == leader:
            members.append(int(folder.name))
    return members


def signal_group(leader: int, started: int, number: signal.Signals) -> None:
    """Signal the process group of `leader`, a process that started at `started`.

    The group is signalled even if the leader is gone, because its children may still use the
    device. The kernel does not reuse a pid while a group has its number. So if another process has
    the leader's pid now, the group is empty, and nothing is signalled.
    """
    if leader and start_time(leader) in (0, started):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name (proc(5)), or None if it is gone."""
    with suppress(OSError):
        # The kernel cuts a name after 15 bytes, also within a character.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()
    return None

"""Runs a command under the system call filter of a systemd unit, without systemd.

    python -m tests.unit_filter UNIT_FILE COMMAND...

The groups of system calls are this machine's (`systemd-analyze syscall-filter`), and libseccomp,
which systemd uses too, makes the filter. So what a unit forbids on this release of systemd is
forbidden here.
"""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ALLOW: Final = 0x7FFF0000
ERRNO: Final = 0x00050000
"""Actions of libseccomp; the number of the error is added to the second (seccomp.h)."""

EPERM: Final = 1
LIBRARY: Final = "libseccomp.so.2"


def unit_path(service: str) -> Path:
    """Return the unit of one of our services, such as "router"."""
    return ROOT / "ops" / "systemd" / f"isochrone-{service}.service"


def groups() -> dict[str, set[str]]:
    """Return the groups of system calls that systemd knows: names, and other groups."""
    run = subprocess.run(
        ["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True
    )
    found: dict[str, set[str]] = {}
    members: set[str] = set()
    for line in run.stdout.splitlines():
        if line.startswith("@"):
            members = found[line.strip()] = set()
        elif line.startswith(" ") and not line.lstrip().startswith("#"):
            members.add(line.strip())
    return found


def allowed_calls(unit: str, known: dict[str, set[str]]) -> set[str]:
    """Return the names of the system calls that a unit allows, as systemd reads its lines."""

    def expanded(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return {call for member in known[name] for call in expanded(member)}

    allowed = expanded("@default")
    for words in re.findall(r"^SystemCallFilter=(.*)$", unit, re.M):
        calls = {call for name in words.lstrip("~").split() for call in expanded(name)}
        allowed = allowed - calls if words.startswith("~") else allowed | calls
    return allowed


def confine(calls: set[str]) -> None:
    """Let this process make these system calls only: others fail with EPERM."""
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    filter_ = ctypes.c_void_p(library.seccomp_init(ERRNO | EPERM))
    for call in sorted(calls):
        number = library.seccomp_syscall_resolve_name(call.encode())
        if number >= 0 and library.seccomp_rule_add(filter_, ALLOW, number, 0):
            raise SystemExit(f"cannot allow the system call {call}")
    if library.seccomp_load(filter_):
        raise SystemExit("cannot load the filter of system calls")
    library.seccomp_release(filter_)


def main() -> None:
    """Apply the filter and become the command."""
    unit, *command = sys.argv[1:]
    confine(allowed_calls(Path(unit).read_text(), groups()))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

"""Confines a process with Landlock: the files it may use, and the processes it may signal.

A process keeps its confinement for life, and so do all that it starts. It cannot trace or read the
memory of a process outside of it either. No privilege is needed. Constants are those of
linux/landlock.h.

    python -I -S landlock.py RULESET COMMAND...

becomes the command, confined by the ruleset with this descriptor. Therefore this module imports
only from the standard library.
"""

import ctypes
import os
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

LIST: Final = 1 << 3
READ: Final = 1 << 0 | 1 << 2 | LIST
"""Rights to files and folders: to list names; to read and execute, too."""

USE: Final = (1 << 15) - 1
"""All rights to files and folders that a ruleset forbids elsewhere."""

WHOLE_VERSION: Final = 2
"""The first version of Landlock (Linux 5.19) with which a confined process can rename a file from
one folder to another, where it may use both."""

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_OF_A_FILE: Final = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
"""The rights that a file can have: execute, write, read, truncate. All others are a folder's."""

_FILE_RIGHTS: Final = (0, 13, 14, 15)
"""How many of the rights each version knows; later versions know them all."""

_TCP_VERSION: Final = 4
_TCP: Final = 3
_SIGNAL_VERSION: Final = 6
_ABSTRACT_SOCKETS: Final = 1
_SIGNALS: Final = 2

_libc: Final = ctypes.CDLL(None, use_errno=True)


class CannotConfine(OSError):
    """This kernel cannot confine a process; the text says what it lacks."""


class FileRule(NamedTuple):
    """Rights to a file, or to a folder and all that is in it."""

    path: str
    rights: int


def landlock_version() -> int:
    """Return the version of Landlock of this kernel, 0 if it has none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def open_ruleset(rules: Iterable[FileRule], *, forbids_tcp: bool = False) -> int:
    """Return the descriptor of a ruleset that allows only what the rules say.

    Paths that do not exist, and symbolic links, are left out. Signals to processes outside of the
    confinement are forbidden from Linux 6.12 on. With `forbids_tcp` so are TCP, from 6.7 on, and
    abstract Unix sockets of processes outside, from 6.12 on. An older kernel allows them. Raises
    CannotConfine.
    """
    version = landlock_version()
    if version < 1:
        raise CannotConfine("this kernel has no Landlock: use Linux 5.13 or later, and enable it")
    forbidden = (1 << _FILE_RIGHTS[min(version, len(_FILE_RIGHTS) - 1)]) - 1
    fields = [forbidden]
    if version >= _TCP_VERSION:
        fields.append(_TCP if forbids_tcp else 0)
    if version >= _SIGNAL_VERSION:
        fields.append(_SIGNALS | (_ABSTRACT_SOCKETS if forbids_tcp else 0))
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & forbidden)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def restrict(ruleset: int) -> None:
    """Confine this process and what it starts from now on.

    Raises CannotConfine, also if it has several threads: only the calling one would be confined.
    """
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise CannotConfine("several threads run already")
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def confined_command(ruleset: int, command: Iterable[str], python: str) -> tuple[str, ...]:
    """Return the command that runs another one, confined; it inherits the descriptor."""
    return (python, "-I", "-S", str(Path(__file__).resolve()), str(ruleset), *command)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISDIR(mode):
            rights &= _OF_A_FILE
        if rights and not stat.S_ISLNK(mode):
            rule = struct.pack("=Qi", rights, descriptor)
            _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        raise CannotConfine(f"the kernel refused: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> None:
    """Confine this process and become the command."""
    try:
        restrict(int(sys.argv[1]))
    except CannotConfine as error:
        raise SystemExit(f"cannot confine {sys.argv[2]}: {error}") from error
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606 - it becomes the command


if __name__ == "__main__":
    main()

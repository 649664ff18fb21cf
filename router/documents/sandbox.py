"""Confines this process with Landlock and resource limits, before it reads an untrusted file.

Afterwards it can read the interpreter and its packages, and nothing else: no other file, nothing to
write, no TCP connection. Constants are those of linux/landlock.h.
"""

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

MEMORY_BYTES_MAX: Final = 2 * 1024**3
CPU_S_MAX: Final = 20
FILES_MAX: Final = 256

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_VERSION_FLAG: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_EXECUTE: Final = 1 << 0
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_FS_BITS_BY_VERSION: Final = (0, 13, 14, 15, 15, 16)
"""How many kinds of file access each version of Landlock can forbid."""

_NETWORK_VERSION: Final = 4
_BIND_AND_CONNECT_TCP: Final = 3
_READABLE: Final = (
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/mime.types", "/etc/localtime"),
    *("/dev/null", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)

_libc: Final = ctypes.CDLL(None, use_errno=True)


class CannotConfine(RuntimeError):
    """This kernel cannot confine a process; the text says what it lacks."""


def landlock_version() -> int:
    """Return the version of Landlock of this kernel, 0 if it has none."""
    version = _libc.syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)
    return max(0, int(version))


def confine() -> None:
    """Confine this process for the rest of its life. Raises CannotConfine."""
    version = landlock_version()
    if version < 1:
        raise CannotConfine("this kernel has no Landlock: use Linux 5.13 or later, and enable it")
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
        (resource.RLIMIT_CPU, CPU_S_MAX),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, FILES_MAX),
    ):
        resource.setrlimit(limit, (value, value))
    _call(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    forbidden = (1 << _FS_BITS_BY_VERSION[min(version, len(_FS_BITS_BY_VERSION) - 1)]) - 1
    network = _BIND_AND_CONNECT_TCP if version >= _NETWORK_VERSION else 0
    attributes = struct.pack("=QQ", forbidden, network)[: 16 if network else 8]
    ruleset = _call(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    for path in _readable_paths():
        _allow_reading(ruleset, path)
    _call(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _readable_paths() -> Iterable[Path]:
    installed = {sys.prefix, sys.base_prefix, *sys.path}
    return [path for path in map(Path, (*_READABLE, *sorted(installed - {""}))) if path.exists()]


def _allow_reading(ruleset: int, path: Path) -> None:
    access = _EXECUTE | _READ_FILE | (_READ_DIR if path.is_dir() else 0)
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, descriptor)
        _call(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _call(result: int) -> int:
    if result < 0:
        raise CannotConfine(f"the kernel refused: {os.strerror(ctypes.get_errno())}")
    return result

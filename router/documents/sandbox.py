"""Confines this process with Landlock and resource limits, before it reads an untrusted file.

Afterwards it can read the interpreter and its packages, and nothing else: no other file, nothing to
write, no TCP connection.
"""

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from isochrone.service.trust.landlock import READ, FileRule, open_ruleset, restrict

MEMORY_BYTES_MAX: Final = 2 * 1024**3
CPU_S_MAX: Final = 20
NICENESS: Final = 10
"""Requests for tokens go first."""

FILES_MAX: Final = 256

_READABLE: Final = (
    *("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/mime.types", "/etc/localtime"),
    *("/dev/null", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"),
)


def confine() -> None:
    """Confine this process for the rest of its life. Raises CannotConfine."""
    with suppress(OSError):  # where a filter of system calls forbids it
        os.nice(NICENESS)
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
        (resource.RLIMIT_CPU, CPU_S_MAX),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, FILES_MAX),
    ):
        resource.setrlimit(limit, (value, value))
    restrict(open_ruleset(_rules(), forbids_tcp=True))


def _rules() -> Iterable[FileRule]:
    installed = {sys.prefix, sys.base_prefix, *sys.path} - {""}
    return [FileRule(os.path.realpath(path), READ) for path in (*_READABLE, *sorted(installed))]

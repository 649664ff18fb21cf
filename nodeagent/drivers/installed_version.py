"""Checks that an engine's program can start and has a version that its driver knows.

A program on the PATH may be a leftover of an environment whose interpreter or package is gone. The
check asks the program's own interpreter for the package's version, without importing the package,
which would take seconds.
"""

import re
import shutil
import subprocess
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

TIMEOUT_S: Final = 10.0
"""A cold start of the interpreter takes about 0.1 s."""
SCRIPT: Final = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"


class VersionRange(NamedTuple):
    """The versions of an engine that its driver knows: from `first` to below `before`."""

    first: tuple[int, ...]
    before: tuple[int, ...]

    def problem(self, version: str) -> str:
        """Return what is wrong with a version, or "" if nothing is."""
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(self.first)])
        first, before = (".".join(map(str, limit)) for limit in self)
        if numbers < self.first:
            return f"is too old: install version {first} or later, below {before}"
        if numbers >= self.before:
            return f"is too new for this agent: install a version from {first} to below {before}"
        return ""


def package_version(package: str) -> str:
    """Return the version of a package of the agent's own environment, "" if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def package_problem(package: str, versions: VersionRange) -> str:
    """Return why a package of the agent's own environment cannot be used, or ""."""
    version = package_version(package)
    if not version:
        return f"{package} is not installed in the agent's environment"
    problem = versions.problem(version)
    return f"{package} {version} {problem}" if problem else ""


class CannotStart(Exception):
    """The program cannot start; the message says why. Raised, so that only versions are cached."""


def problem(program: str, versions: VersionRange, package: str = "") -> str:
    """Return why `program`, the command of a Python package, cannot be used, or "". Blocks.

    `package` is its name, if that is not the name of the command.
    """
    found = shutil.which(program)
    if found is None:
        return f"{program} is not on the PATH of the agent"
    try:
        version = _version(package or program, found, Path(found).stat().st_mtime_ns)
    except (CannotStart, OSError) as error:
        return f"{program} at {found} cannot start: {error}"
    problem = versions.problem(version) if version else ""
    return f"{program} {version} at {found} {problem}" if problem else ""


def program_version(program: str, package: str = "") -> str:
    """Return the version of `program`, "" if it is unknown. Blocks."""
    found = shutil.which(program)
    with suppress(CannotStart, OSError):
        if found is not None:
            return _version(package or program, found, Path(found).stat().st_mtime_ns)
    return ""


@lru_cache(maxsize=16)
def _version(package: str, path: str, _changed_ns: int) -> str:
    """Return the version of the package that the script at `path` runs. Raises CannotStart.

    Returns "" if the program is no Python script: it is then an operator's own wrapper, whose
    engine is not known.
    """
    with Path(path).open("rb") as file:
        first_line = file.readline(4096).decode(errors="replace").strip()
    interpreter = first_line.removeprefix("#!").strip()
    if not first_line.startswith("#!") or not re.search(r"python[\d.]*$", interpreter):
        return ""
    try:
        done = subprocess.run(
            [*interpreter.split(), "-c", SCRIPT, package],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotStart(f"its interpreter did not answer within {TIMEOUT_S:g} s") from error
    except OSError as error:
        raise CannotStart(f"its interpreter {interpreter} cannot run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise CannotStart(lines[-1])
    return done.stdout.strip()

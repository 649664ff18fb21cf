"""Keeps engines out of the agent's files, and out of each other's.

Rule 1: an engine may use all files that the agent's user may use, except closed ones.
Rule 2: closed are the agent's state (its private key, the salts, other engines' folders), its
configuration with the secrets that this names, and the folders of all our services.
Rule 3: in the closed state it may use its own folder, and read the artifacts (weights, adapters).
Rule 4: it may list the names in every folder: Python imports nothing from one that it cannot list.

The kernel enforces this with Landlock, on the engine and all that it starts. They cannot trace or
signal a process outside either (signals: from Linux 6.12 on), so not the agent or other engines.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from isochrone.service.config import ConfigError
from isochrone.service.trust.landlock import (
    LIST,
    READ,
    USE,
    WHOLE_VERSION,
    FileRule,
    landlock_version,
)
from nodeagent.config import ConfineEngines

log = logging.getLogger(__name__)

SERVICE_FOLDERS: Final = (Path("/var/lib/isochrone"), Path("/etc/isochrone"))
"""Where the units of our services keep their state and configuration."""


class EngineConfinement:
    """Says which files an engine may use."""

    def __init__(self, closed: Iterable[Path], artifacts: Path) -> None:
        """`artifacts` is the one closed folder that engines may read."""
        self._closed = frozenset(path.resolve() for path in (*closed, *SERVICE_FOLDERS))
        self._artifacts = artifacts.resolve()

    def rules(self, folder: Path) -> tuple[FileRule, ...]:
        """Return the rules of an engine whose own folder is `folder`. Blocks.

        A file created later beside a closed folder, or beside one above it, is closed as well.
        """
        return (
            FileRule("/", LIST),
            *(FileRule(path, USE) for path in _open_beside(self._closed)),
            FileRule(str(self._artifacts), READ),
            FileRule(str(folder.resolve()), USE),
        )


def engine_confinement(
    setting: ConfineEngines, closed: Iterable[Path], artifacts: Path
) -> EngineConfinement | None:
    """Return the confinement of engines, None if there is none here. Makes the user's cache folder.

    Raises ConfigError if it must be there and the kernel has none.
    """
    if setting == "never":
        return None
    if landlock_version() >= WHOLE_VERSION:
        with suppress(OSError):
            # Engines cannot make it themselves if closed files are in the home directory.
            cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
            Path(cache).mkdir(mode=0o700, parents=True, exist_ok=True)
        return EngineConfinement(closed, artifacts)
    lack = "this kernel has no Landlock, or an old one: use Linux 5.19 or later, and enable it"
    if setting == "always":
        raise ConfigError(f"cannot confine engines: {lack}, or set confine_engines to auto")
    log.warning("engines can read the agent's files: %s", lack)
    return None


def _open_beside(closed: frozenset[Path]) -> Iterator[str]:
    """Yield paths that together hold all files except the closed ones."""
    above = {parent for path in closed for parent in path.parents}
    folders = [Path("/")]
    while folders:
        try:
            paths = sorted(folders.pop().iterdir())
        except OSError:
            # Its contents are unknown, so all of it stays closed.
            continue
        for path in paths:
            if path in closed or path.is_symlink():
                continue
            if path in above:
                folders.append(path)
            else:
                yield str(path)

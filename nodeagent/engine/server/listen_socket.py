"""Removes the stale socket of a dead engine, and never takes the socket of a living one."""

import contextlib
import socket
import stat
from pathlib import Path
from typing import Final

from isochrone.service.config import ConfigError

_PROBE_TIMEOUT_S: Final = 1.0


def clear_socket(path: Path) -> None:
    """Remove a dead engine's socket; raise ConfigError if a process still listens on it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on {path}: it exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            try:
                probe.connect(str(path))
            # BlockingIOError if the process accepts no connections, and its queue of them is full.
            except (TimeoutError, BlockingIOError):
                raise ConfigError(
                    f"cannot listen on {path}: another process holds it and does not answer"
                ) from None
            raise ConfigError(f"cannot listen on {path}: another process serves it")
    path.unlink(missing_ok=True)

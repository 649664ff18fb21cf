"""The engine's one socket is never taken from a living engine."""

import contextlib
import socket
import stat
from pathlib import Path
from typing import Final

from isochrone.service.config import ConfigError

_PROBE_S: Final = 1.0


def clear_socket(path: Path) -> None:
    """Remove a dead engine's socket; refuse where one is alive behind it."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot listen on {path}: it is there and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            try:
                probe.connect(str(path))
            except TimeoutError:
                raise ConfigError(f"cannot listen on {path}: it answers slowly") from None
            raise ConfigError(f"cannot listen on {path}: another process serves it")
    path.unlink(missing_ok=True)

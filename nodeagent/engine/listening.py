"""The engine's one socket: made closed to everyone else, and never taken from a living engine."""

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Final

from aiohttp import web

from isochrone.service.config import ConfigError

_PROBE_S: Final = 1.0


async def listen(runner: web.AppRunner, path: Path) -> None:
    """Serve `runner`'s application at `path`."""
    # Created closed to everyone else: between bind and chmod there is no open moment.
    mask = os.umask(0o177)
    try:
        await web.UnixSite(runner, path).start()
    except OSError as error:
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)


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

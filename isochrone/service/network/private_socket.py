"""Unix sockets that only the user of this process may open."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

MODE: Final = 0o600


def private_socket(path: Path) -> socket.socket:
    """Return a socket bound to `path`, in place of one that an earlier process left there.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The path gets the socket's mode. A chmod after `bind` would leave it open to others for a
        # moment, and a umask would hold for the files of all threads.
        os.fchmod(bound.fileno(), MODE)
        bound.bind(str(path))
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound

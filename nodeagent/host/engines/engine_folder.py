"""The folders of an engine in the agent's state: they are made before it starts and end with it.

Beside the engine's own files there is one for the temporary files of the engine and its libraries
(TMPDIR). Vendors' servers put the sockets of their processes there, which a killed process leaves.
"""

import asyncio
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

SOCKET_PATH_BYTES_MAX: Final = 107
"""The longest path of a Unix socket: `sun_path` of unix(7) without its last zero."""

SOCKET_NAME_BYTES: Final = 45
"""The longest name that vendors' servers give a socket (TensorRT-LLM: 9 letters and a UUID)."""

STORE_NAME_BYTES: Final = 36
"""The same without the host's name, which is a part of it, of vLLM with Mooncake Store."""


def make_folders(folder: Path) -> Path:
    """Make an engine's folders, without the files of an earlier engine. Blocks.

    The folder that all engines use for what torch compiles is made, too: a confined engine cannot.

    Returns the folder for temporary files. Raises OSError.
    """
    remove_folders(folder)
    folder.mkdir(mode=0o700)
    temporary = temporary_folder(folder)
    temporary.mkdir(mode=0o700)
    _compiled_folder().mkdir(mode=0o700, exist_ok=True)
    return temporary


@asynccontextmanager
async def new_folders(folder: Path, on_failure: Callable[[], object]) -> AsyncIterator[Path]:
    """Make an engine's folders; remove them again if the engine cannot be started in them."""
    try:
        yield await asyncio.to_thread(make_folders, folder)
    except BaseException:
        on_failure()
        await asyncio.to_thread(remove_folders, folder)
        raise


def remove_folders(folder: Path) -> None:
    """Remove an engine's folders, if they exist. Blocks."""
    for path in (temporary_folder(folder), folder):
        shutil.rmtree(path, ignore_errors=True)


def temporary_folder(folder: Path) -> Path:
    """Return the folder for the temporary files of the engine whose own folder is `folder`.

    It lies inside `folder`, unless sockets there would have too long a path. A later agent finds it
    by the engine's folder alone.
    """
    inside = folder / "tmp"
    name_bytes = max(SOCKET_NAME_BYTES, STORE_NAME_BYTES + len(socket.gethostname()))
    if len(bytes(inside)) + 1 + name_bytes <= SOCKET_PATH_BYTES_MAX:
        return inside
    digest = hashlib.sha256(bytes(folder.absolute())).hexdigest()
    return Path(tempfile.gettempdir(), f"isochrone-{digest[:16]}")


def temporary_variables(temporary: Path) -> dict[str, str]:
    """Return the environment of an engine with this folder for temporary files.

    Kernels that torch compiles stay outside, so that the next engine need not compile them again.
    """
    return {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(_compiled_folder())}


def _compiled_folder() -> Path:
    return Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")

"""The receiver's side of a window: it takes the window of a lease from the sender's socket."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from isochrone.service.windows.shared_window import (
    MappedWindows,
    WindowRefused,
    receive_window,
)

CONNECT_S: Final = 5.0
"""How long the window is waited for."""

WINDOW_BYTES_MAX: Final = 1 << 30
"""The largest window that a receiver maps."""

COUNT_BYTES: Final = 4
_FRAMES_BYTES: Final = 64 * 1024
_LOST: Final = "cannot take KV from the memory of another process"


class WindowLost(ConnectionError):
    """The other process does not use the window any more."""


class ReceivedWindow:
    """The window of a transfer, at its receiver."""

    def __init__(self, link: socket.socket, memory: memoryview) -> None:
        self._link = link
        self.memory = memory

    def receive(self) -> bytes:
        """Wait for frames; b"" if no more will come. For any thread but the event loop's."""
        try:
            return self._link.recv(_FRAMES_BYTES)
        except OSError as error:
            raise WindowLost(f"{_LOST}: it is gone") from error

    async def next_frames(self) -> bytes:
        """The same as `receive`, on the event loop."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._link, _FRAMES_BYTES)
        except OSError as error:
            raise WindowLost(f"{_LOST}: it is gone") from error

    def interrupt(self) -> None:
        """Let `receive` return with the blocks that have arrived.

        The sender learns of it only if it sends more: the window may still be read.
        """
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)

    def abandon(self) -> None:
        """Tell the sender that nothing is read any more, and let `receive` return."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection: the sender may fill the window again."""
        self._link.close()

    def release(self, blocks: int) -> None:
        """Let the sender fill the slots of the oldest `blocks` again. For any thread."""
        count = blocks.to_bytes(COUNT_BYTES, "little")
        try:
            # This never blocks: the socket's buffer has space for one count of each slot, and the
            # other side never leaves more of them unread.
            self._link.sendall(count)
        except OSError as error:
            raise WindowLost(f"{_LOST}: it is gone") from error


async def take_window(
    path: str,
    lease: str,
    mapped: MappedWindows | None,
    *,
    on_loop: bool = False,
) -> ReceivedWindow:
    """Take the window of a lease at its sender's socket. Raises WindowLost if there is none.

    Its frames are for a thread that may wait, or with `on_loop` for the event loop. Close it when
    nothing is read from it any more.
    """
    loop = asyncio.get_running_loop()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        link.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            await loop.sock_connect(link, path)
            await loop.sock_sendall(link, lease.encode())
            await _wait_readable(link)
        memory = receive_window(link, WINDOW_BYTES_MAX, mapped)
        link.setblocking(not on_loop)
        return ReceivedWindow(link, memoryview(memory))
    except (OSError, ValueError, TimeoutError, WindowRefused) as error:
        link.close()
        raise WindowLost(f"{_LOST}: {str(error) or 'no answer'}") from error
    except BaseException:
        link.close()
        raise


@asynccontextmanager
async def received_window(
    path: str, lease: str, mapped: MappedWindows | None = None
) -> AsyncIterator[ReceivedWindow]:
    """Take a window whose frames are for a thread, and close it after the context."""
    window = await take_window(path, lease, mapped)
    try:
        yield window
    finally:
        window.close()


async def _wait_readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(link, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(link)

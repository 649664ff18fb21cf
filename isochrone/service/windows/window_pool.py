"""The windows that one process fills, and the socket at which receivers take them."""

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from isochrone.service.machine_share import free_memory_bytes
from isochrone.service.network.private_socket import private_socket
from isochrone.service.windows.received_window import CONNECT_S, COUNT_BYTES, WindowLost
from isochrone.service.windows.shared_window import (
    LockPages,
    OwnedWindow,
    is_same_user,
    unlocked,
)
from isochrone.service.windows.slot_ring import SlotRing, SlotRun
from isochrone.wire.kv.kv_transfer import is_transfer_id

log = logging.getLogger(__name__)

PART_BYTES: Final = 4 * 1024 * 1024
WINDOW_PARTS: Final = 4
"""One part is filled and one is copied while two wait, so neither engine waits for a step of the
other."""

WINDOWS_MAX: Final = 4
"""64 MiB of host memory at most, while no block is larger than 4 MiB."""

CONNECTIONS_MAX: Final = 64
ACCEPT_AGAIN_S: Final = 0.1
"""The pause after a connection that could not be accepted."""

SPARE_FACTOR: Final = 4
"""A window is allocated only if this many times its size is free."""

RETRY_S: Final = 60.0
"""How long no window is allocated after the system has refused one."""

_LEASE_BYTES: Final = 32


def part_blocks(block_bytes: int) -> int:
    """Return how many blocks a window's part has."""
    return max(1, PART_BYTES // block_bytes)


class SenderWindow:
    """The window of one transfer, at its sender: a thread or the event loop fills it, and the event
    loop frees slots."""

    def __init__(self, window: OwnedWindow, block_bytes: int) -> None:
        self.window = window
        self.block_bytes = block_bytes
        self._ring = SlotRing(WINDOW_PARTS * part_blocks(block_bytes))
        self._memory = memoryview(window.memory)
        self._changed = threading.Condition()
        self._freed = asyncio.Event()
        self._decided = asyncio.Event()
        """Set once the receiver has the window or is gone."""
        self.is_connected = False
        self.is_lost = False
        self._is_closed = False
        self._link: socket.socket | None = None
        self._unsent = b""
        """Frames that wait for the receiver."""

    def take(self, count_max: int, stall_s: float) -> SlotRun:
        """Wait for up to `count_max` free slots. For the thread that fills them.

        Raises WindowLost, and TimeoutError if no receiver connects or it frees none for `stall_s`.
        """
        with self._changed:
            while not (run := self._take_free(count_max)):
                if not self._changed.wait(stall_s if self.is_connected else CONNECT_S):
                    raise TimeoutError
            return run

    async def take_slot(self) -> int:
        """Wait on the event loop for a free slot; return the place of its memory.

        Raises WindowLost, and TimeoutError if no receiver connects.
        """
        while True:
            self._freed.clear()
            with self._changed:
                run = self._take_free(1)
            if run:
                return run.first * self.block_bytes
            async with asyncio.timeout(None if self.is_connected else CONNECT_S):
                await self._freed.wait()

    def _take_free(self, count_max: int) -> SlotRun | None:
        if self.is_lost or self._is_closed:
            raise WindowLost("the window is closed")
        return self._ring.take(count_max)

    def give_back(self, count: int) -> None:
        """Give back the last slots of the run that was taken last."""
        with self._changed:
            self._ring.give_back(count)

    def memory_of(self, run: SlotRun) -> memoryview:
        """Return the memory of slots."""
        size = self.block_bytes
        return self._memory[run.first * size : (run.first + run.slots) * size]

    def write(self, place: int, data: memoryview) -> None:
        """Copy data to memory of a slot that was taken. For the event loop.

        Raises WindowLost once the window may belong to another transfer.
        """
        if self.is_lost or self._is_closed:
            raise WindowLost("the window is closed")
        self._memory[place : place + len(data)] = data

    async def wait_connected(self) -> None:
        """Wait until the receiver has the window. Raises WindowLost or TimeoutError."""
        async with asyncio.timeout(CONNECT_S):
            await self._decided.wait()
        if not self.is_connected:
            raise WindowLost("the receiver has not taken the window")

    def connect(self, link: socket.socket) -> None:
        """Give the window to the receiver, and with it the frames that wait for it. Raises
        OSError."""
        with self._changed:
            self.is_connected = True
            self.window.send(link)
            self._link = link
            self._changed.notify()
        self._decided.set()
        self._freed.set()
        self.send(b"")

    def send(self, frames: bytes) -> None:
        """Send the places of blocks, once the receiver has the window. For any thread.

        Raises WindowLost if it is gone.
        """
        with self._changed:
            self._unsent += frames
            if self._link is None or not self._unsent:
                return
            try:
                # The link does not block, but the places of all slots always fit into it.
                self._link.sendall(self._unsent)
            except OSError as error:
                raise WindowLost("the receiver has closed the window") from error
            self._unsent = b""

    def release(self, count: int) -> None:
        """Free slots. Raises ValueError if so many are not in use."""
        with self._changed:
            self._ring.release(count)
            self._changed.notify()
        self._freed.set()

    def lose(self) -> None:
        """Note that the receiver is gone."""
        with self._changed:
            self.is_lost, self._link = True, None
            self._changed.notify()
        self._freed.set()
        self._decided.set()

    def close(self) -> None:
        """Fill no more slots: end the wait for them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._freed.set()


class WindowPool:
    """The windows of one process, and the socket at which receivers take them."""

    def __init__(
        self,
        path: Path,
        free_bytes: Callable[[], int] = free_memory_bytes,
        lock: LockPages = unlocked,
    ) -> None:
        """`path` is that of the socket. `free_bytes` returns the memory that is free, and `lock`
        locks the pages of a window."""
        self.path = path
        self._lock = lock
        self._free_bytes = free_bytes
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._free: list[OwnedWindow] = []
        self._windows = 0
        self._leases: dict[str, SenderWindow] = {}
        self._may_allocate_at_s = 0.0
        self.leases_total = 0
        self.lacking_total = 0
        """Transfers that were to have a window, and got none."""

    def counts(self) -> dict[str, float]:
        """Return the metrics, by name."""
        return {
            "kv_windows": self._windows,
            "kv_windows_leased": self._windows - len(self._free),
            "kv_window_leases_total": self.leases_total,
            "kv_windows_lacking_total": self.lacking_total,
        }

    async def start(self) -> None:
        """Listen, in place of an earlier process. Without a socket, there are no leases."""
        try:
            listener = private_socket(self.path)
        except OSError as error:
            warn(f"listen on {self.path}", error)
            return
        listener.listen(CONNECTIONS_MAX)
        self._listener = listener
        self._start(self._accept(listener))

    async def close(self) -> None:
        """Stop listening, and give up the windows."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._listener is not None:
            self._listener.close()
            self.path.unlink(missing_ok=True)
        for window in self._free:
            window.close()
        self._free.clear()

    @asynccontextmanager
    async def lease(
        self, name: str, block_bytes: int, readers: str = ""
    ) -> AsyncIterator[SenderWindow | None]:
        """Lease a window to a transfer; None if there is none, or the name cannot be used.

        Its memory has only been read by receivers that were said to be among the same `readers`.
        """
        is_usable = is_transfer_id(name) and name not in self._leases
        window = self._take_window(block_bytes, readers) if is_usable else None
        if window is None:
            self.lacking_total += bool(name)
            yield None
            return
        self.leases_total += 1
        lease = self._leases[name] = SenderWindow(window, block_bytes)
        try:
            yield lease
        finally:
            lease.close()
            del self._leases[name]
            # A receiver that has the window may still read it: its connection's end frees it.
            if not lease.is_connected or lease.is_lost:
                self._free.append(window)

    def _take_window(self, block_bytes: int, readers: str) -> OwnedWindow | None:
        size_bytes = WINDOW_PARTS * max(PART_BYTES, block_bytes)
        for number, window in enumerate(self._free):
            if len(window.memory) == size_bytes and window.readers == readers:
                return self._free.pop(number)
        now_s = time.monotonic()
        if self._listener is None or now_s < self._may_allocate_at_s:
            return None
        if self._windows >= WINDOWS_MAX:
            if not self._free:
                return None
            # The free windows are for blocks of another size, or for other readers.
            self._free.pop(0).close()
            self._windows -= 1
        try:
            # At the limit of a cgroup the system would end a process instead of refusing.
            if self._free_bytes() < SPARE_FACTOR * size_bytes:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            window = OwnedWindow(size_bytes, readers, self._lock)
        except OSError as error:
            self._may_allocate_at_s = now_s + RETRY_S
            warn(f"share {size_bytes} bytes of memory with other processes", error)
            return None
        self._windows += 1
        return window

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        is_logged = False
        while True:
            try:
                link, _ = await loop.sock_accept(listener)
            except OSError as error:
                # No descriptor is free, for example. Receivers wait, or give up and use sockets.
                if not is_logged:
                    warn(f"accept connections on {self.path}", error)
                is_logged = True
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            is_logged = False
            if len(self._tasks) > CONNECTIONS_MAX or not is_same_user(link):
                link.close()
                continue
            self._start(self._serve(link))

    async def _serve(self, link: socket.socket) -> None:
        """Pass a receiver the window of the lease that it names, and take back slots."""
        with link, suppress(OSError, TimeoutError):
            link.setblocking(False)
            async with asyncio.timeout(CONNECT_S):
                name = (await _read(link, _LEASE_BYTES)).decode(errors="replace")
            lease = self._leases.get(name)
            if lease is None or lease.is_connected or lease.is_lost:
                return
            try:
                lease.connect(link)
                while count := int.from_bytes(await _read(link, COUNT_BYTES), "little"):
                    lease.release(count)
            except ValueError as error:
                log.warning("a receiver of KV does not follow the protocol: %s", error)
            finally:
                lease.lose()
                if self._leases.get(name) is not lease:
                    self._free.append(lease.window)


async def _read(link: socket.socket, size: int) -> bytes:
    """Return the next bytes; b"" at the end of the connection."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        piece = await loop.sock_recv(link, size - len(received))
        if not piece:
            return b""
        received += piece
    return received


def warn(what: str, error: Exception) -> None:
    """Log why KV cannot go through memory."""
    reason = getattr(error, "strerror", None) or error
    log.warning("cannot %s: %s; KV of this node goes through sockets", what, reason)

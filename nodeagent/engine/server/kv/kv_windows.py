"""Windows for blocks that move between two engines of one node: memory that both map.

The receiver connects to the sender's socket, names the transfer's lease, and gets the window. The
sender fills slots of it, and sends the frames with their places over that connection. The receiver
copies the blocks to its device, and releases their slots. So a thread at one end meets a thread at
the other: only the transfer's head and end go through event loops and the agent. The agent issues a
lease for each transfer between two engines of a deployment on its node. It is 32 random hexadecimal
digits that nobody else knows.

Rule 1: a slot is filled again only after the receiver has released it, or has closed its
connection. Until then the window belongs to this transfer, also after the transfer has failed.
Rule 2: a receiver keeps its connection until it has stopped copying.
Rule 3: the number of windows is bounded. Without a free one, blocks are sent through the sockets.
"""

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from isochrone.service.config import ConfigError
from isochrone.service.network.private_socket import private_socket
from isochrone.service.shared_window import (
    MappedWindows,
    OwnedWindow,
    WindowRefused,
    is_same_user,
    receive_window,
)
from isochrone.wire.kv.kv_transfer import is_transfer_id
from nodeagent.engine.kvcache.slot_ring import SlotRing, SlotRun
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.tier_setup import KvBlockForm
from nodeagent.engine.memory.memory_watch import available_bytes
from nodeagent.engine.server.listen_socket import clear_socket

log = logging.getLogger(__name__)

PART_BYTES: Final = 4 * 1024 * 1024
WINDOW_PARTS: Final = 4
"""One is filled and one copied while two wait: no engine waits for a step of the other."""

WINDOWS_MAX: Final = 4
"""64 MiB of host memory at most, while no block is larger than 4 MiB."""

WINDOW_BYTES_MAX: Final = 1 << 30
"""What a receiver maps at most."""

CONNECTIONS_MAX: Final = 64
ACCEPT_AGAIN_S: Final = 0.1
"""The pause after a connection that could not be accepted."""

CONNECT_S: Final = 5.0
"""How long a sender waits for its receiver's connection, and a connection for what it needs."""

SPARE_FACTOR: Final = 4
"""A window is allocated only if this many times its size is free."""

RETRY_S: Final = 60.0
"""How long no window is allocated after the system has refused one."""

_LEASE_BYTES: Final = 32
_COUNT_BYTES: Final = 4
_FRAMES_BYTES: Final = 64 * 1024


class WindowLost(ConnectionError):
    """The other engine does not use the window any more."""


class SenderWindow:
    """The window of one transfer, at its sender: a thread fills it, the event loop frees slots."""

    def __init__(self, window: OwnedWindow, form: KvBlockForm, slots: int) -> None:
        self.window = window
        self.block_bytes = form.block_bytes
        self._ring = SlotRing(slots)
        flat = torch.frombuffer(window.memory, dtype=torch.uint8)
        self._slots = flat[: slots * form.block_bytes].view(form.dtype).view(slots, *form.shape)
        self._changed = threading.Condition()
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
            while True:
                if self.is_lost or self._is_closed:
                    raise WindowLost("the window is closed")
                if run := self._ring.take(count_max):
                    return run
                if not self._changed.wait(stall_s if self.is_connected else CONNECT_S):
                    raise TimeoutError

    def give_back(self, count: int) -> None:
        """Give back the last slots of the run that was taken last."""
        with self._changed:
            self._ring.give_back(count)

    def slots(self, run: SlotRun) -> Tensor:
        """Return the memory of slots [slots, ...]."""
        return self._slots[run.first : run.first + run.slots]

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

    def lose(self) -> None:
        """Note that the receiver is gone."""
        with self._changed:
            self.is_lost, self._link = True, None
            self._changed.notify()
        self._decided.set()

    def close(self) -> None:
        """Fill no more slots: end the wait for them."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


class KvWindows:
    """The windows of one engine, and the socket at which receivers take them."""

    def __init__(self, form: KvBlockForm, path: Path, staging: StagingMemory) -> None:
        """`path` is that of the socket. Blocks that go through no window are read to `staging`."""
        self._form = form
        self._staging = staging
        self.part_blocks = max(1, PART_BYTES // form.block_bytes)
        self._slots = WINDOW_PARTS * self.part_blocks
        self._path = path
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
        """Listen. Without a socket, blocks are sent through the agent."""
        try:
            clear_socket(self._path)
            listener = private_socket(self._path)
        except (OSError, ConfigError) as error:
            _warn(f"listen on {self._path}", error)
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
            self._path.unlink(missing_ok=True)
        for window in self._free:
            window.close()
        self._free.clear()

    def staged(self, blocks: int) -> Tensor:
        """Return memory for the contents of blocks that are sent without a window [blocks, ...]."""
        part = self._staging.take(blocks * self._form.block_bytes)
        return torch.from_numpy(part).view(self._form.dtype).view(blocks, *self._form.shape)

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[SenderWindow | None]:
        """Lease a window to a transfer; None if there is none, or the name cannot be used."""
        window = self._take_window() if is_transfer_id(name) and name not in self._leases else None
        if window is None:
            self.lacking_total += bool(name)
            yield None
            return
        self.leases_total += 1
        lease = self._leases[name] = SenderWindow(window, self._form, self._slots)
        try:
            yield lease
        finally:
            del self._leases[name]
            # A receiver that has the window may still read it: its connection's end frees it.
            if not lease.is_connected or lease.is_lost:
                self._free.append(window)

    def _take_window(self) -> OwnedWindow | None:
        if self._free:
            return self._free.pop()
        now_s = time.monotonic()
        is_full = self._windows >= WINDOWS_MAX
        if is_full or self._listener is None or now_s < self._may_allocate_at_s:
            return None
        size_bytes = self._slots * self._form.block_bytes
        try:
            # At the limit of a cgroup the system would end a process instead of refusing.
            if available_bytes("cpu") < SPARE_FACTOR * size_bytes:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            window = OwnedWindow(size_bytes)
        except OSError as error:
            self._may_allocate_at_s = now_s + RETRY_S
            _warn(f"share {size_bytes} bytes of memory with other engines", error)
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
                    _warn(f"accept connections on {self._path}", error)
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
                while count := int.from_bytes(await _read(link, _COUNT_BYTES), "little"):
                    lease.release(count)
            except ValueError as error:
                log.warning("a receiver of KV does not follow the protocol: %s", error)
            finally:
                lease.lose()
                if self._leases.get(name) is not lease:
                    self._free.append(lease.window)


class ReceivedWindow:
    """The window of a transfer, at its receiver."""

    def __init__(self, link: socket.socket, memory: memoryview) -> None:
        self._link = link
        self.memory = memory

    def receive(self) -> bytes:
        """Wait for frames; b"" if no more will come. For any thread."""
        try:
            return self._link.recv(_FRAMES_BYTES)
        except OSError as error:
            raise WindowLost("cannot take KV from another engine's memory: it is gone") from error

    def interrupt(self) -> None:
        """Let `receive` return what has arrived, and nothing more.

        The sender learns of it only if it sends more: the window may still be read.
        """
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RD)

    def release(self, blocks: int) -> None:
        """Let the sender fill the slots of the oldest `blocks` again. For any thread."""
        count = blocks.to_bytes(_COUNT_BYTES, "little")
        try:
            self._link.sendall(count)
        except OSError as error:
            raise WindowLost("cannot take KV from another engine's memory: it is gone") from error


@asynccontextmanager
async def received_window(
    path: str, lease: str, mapped: MappedWindows | None = None
) -> AsyncIterator[ReceivedWindow]:
    """Take the window of a lease at its sender's socket. Raises WindowLost if there is none.

    Nothing may be read from it after the context has ended.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.setblocking(False)
        try:
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(link, path)
                await loop.sock_sendall(link, lease.encode())
                await _wait_readable(link)
            memory = receive_window(link, WINDOW_BYTES_MAX, mapped)
        except (OSError, ValueError, TimeoutError, WindowRefused) as error:
            reason = str(error) or "no answer"
            raise WindowLost(f"cannot take KV from another engine's memory: {reason}") from error
        # From here on only the transfer's thread waits at it.
        link.setblocking(True)
        yield ReceivedWindow(link, memoryview(memory))


async def _wait_readable(link: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(link, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(link)


async def _read(link: socket.socket, size: int) -> bytes:
    """Return the next bytes; b"" at the end of the connection."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < size:
        piece = await loop.sock_recv(link, size - len(received))
        if not piece:
            return b""
        received += piece
    return received


def _warn(what: str, error: Exception) -> None:
    reason = getattr(error, "strerror", None) or error
    log.warning("cannot %s: %s; KV for engines of this node goes through sockets", what, reason)

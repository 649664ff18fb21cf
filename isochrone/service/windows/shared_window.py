"""Memory that one process fills and another of the same machine reads.

A window has no name: its descriptor is passed over a Unix socket, and the kernel frees the memory
when the last process that has it has ended. So a process that is killed leaves nothing behind, and
no other process can open it.

Rule 1: only the owner writes. The kernel refuses all others (F_SEAL_FUTURE_WRITE, Linux 5.1).
Rule 2: no process changes its size: a reader of memory that is gone would be killed by a signal.
"""

import fcntl
import mmap
import os
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Python's fcntl has no name for it."""
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MESSAGE: Final = b"w"


LockPages = Callable[[mmap.mmap], Callable[[], None]]
"""Locks the pages of a window for a device that copies from or to it; returns what unlocks them."""


def unlocked(_: mmap.mmap) -> Callable[[], None]:
    """Lock nothing: only CPUs copy."""
    return lambda: None


class WindowRefused(Exception):
    """A peer passed something other than a window."""


class OwnedWindow:
    """A window that this process fills; `close` gives up its descriptor."""

    def __init__(self, size_bytes: int, readers: str = "", lock: LockPages = unlocked) -> None:
        """Allocate all of it. Raises OSError if the system or a limit on memory refuses it.

        `readers` names those that may keep it mapped: no other process may see its contents.
        `lock` locks its pages until `close`.
        """
        self.readers = readers
        self._descriptor = os.memfd_create("kv-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # A write to memory that cannot be had would kill the process.
            os.posix_fallocate(self._descriptor, 0, size_bytes)
            self.memory = mmap.mmap(self._descriptor, size_bytes)
            seals = _SIZE_SEALS | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self._unlock = lock(self.memory)
        except BaseException:
            os.close(self._descriptor)
            raise

    def send(self, link: socket.socket) -> None:
        """Pass the window to the process at the other end of a Unix socket."""
        socket.send_fds(link, [_MESSAGE], [self._descriptor])

    def close(self) -> None:
        """Give up the descriptor. The memory is freed with the last mapping of it."""
        self._unlock()
        os.close(self._descriptor)


class WindowId(NamedTuple):
    """The kernel's id of a window. No other window has it while a mapping exists."""

    device: int
    inode: int


class MappedWindows:
    """The windows that this process has mapped last: to map one again costs a fault for each page.

    Their memory is not freed before they are forgotten.
    """

    def __init__(self, kept_max: int) -> None:
        self._kept_max = kept_max
        self._kept: OrderedDict[WindowId, mmap.mmap] = OrderedDict()

    def map(self, descriptor: int, size_bytes_max: int) -> mmap.mmap:
        """Return the mapping of a window. Raises WindowRefused and OSError."""
        status = os.fstat(descriptor)
        name = WindowId(status.st_dev, status.st_ino)
        mapped = self._kept.pop(name, None) or _map(descriptor, size_bytes_max)
        self._kept[name] = mapped
        while len(self._kept) > self._kept_max:
            self._kept.popitem(last=False)
        return mapped


def receive_window(
    link: socket.socket, size_bytes_max: int, mapped: MappedWindows | None = None
) -> mmap.mmap:
    """Map the window that arrives at a Unix socket, to be read only; once, if `mapped` is given.

    Raises WindowRefused if it is no window of at most `size_bytes_max`, BlockingIOError if nothing
    has arrived, and OSError if it cannot be mapped.
    """
    message, descriptors, _, _ = socket.recv_fds(link, len(_MESSAGE), 1)
    try:
        if message != _MESSAGE or len(descriptors) != 1:
            raise WindowRefused("the peer closed the connection, or sent no window")
        if mapped is not None:
            return mapped.map(descriptors[0], size_bytes_max)
        return _map(descriptors[0], size_bytes_max)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _map(descriptor: int, size_bytes_max: int) -> mmap.mmap:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise WindowRefused("its size can change: it is no sealed memory") from error
    size_bytes = os.fstat(descriptor).st_size
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise WindowRefused("its size can change: it is not sealed")
    if not 0 < size_bytes <= size_bytes_max:
        raise WindowRefused(f"it has {size_bytes} bytes, more than {size_bytes_max}")
    # Private, because torch takes no buffer that is read-only. A write would change a copy. So the
    # pages of a reader cannot be locked: the kernel would lock copies of them.
    return mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def is_same_user(link: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as this one's user."""
    _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())

"""Host memory for the parts of a transfer: used again instead of allocated for each part.

The allocator returns memory of this size to the system, and the kernel zeroes each page that
it gives out again. That took more CPU time than all copies of a transfer.
"""

import weakref
from typing import Final

import numpy as np

from nodeagent.engine.kvcache.page_lock import host_memory

BUFFERS_KEPT_MAX: Final = 4
"""Two transfers at a time: one part of each arrives or leaves while another is copied."""


class StagingMemory:
    """Buffers of one size, for copies from and to a device. A buffer is free again when the last
    view of it is gone."""

    def __init__(self, buffer_bytes: int, device: str = "cpu") -> None:
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._free: list[np.ndarray] = []

    def take(self, size_bytes: int) -> np.ndarray:
        """Return `size_bytes` of memory with any content [bytes]. For any thread.

        More than a buffer has comes from the allocator.
        """
        if size_bytes > self.buffer_bytes:
            return np.empty(size_bytes, np.uint8)
        try:
            # The one that was used last: its pages are the likeliest to be in the cache.
            buffer = self._free.pop()
        except IndexError:
            buffer = host_memory(self.buffer_bytes, self._device)
        # Through a memoryview, so that numpy's and torch's views refer to `part`, not to `buffer`.
        part: np.ndarray = np.frombuffer(buffer.data[:size_bytes], np.uint8)
        weakref.finalize(part, self._give_back, buffer).atexit = False
        return part

    def forget(self) -> None:
        """Give the free buffers back to the system."""
        self._free.clear()

    def _give_back(self, buffer: np.ndarray) -> None:
        if len(self._free) < BUFFERS_KEPT_MAX:
            self._free.append(buffer)

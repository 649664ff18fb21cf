"""Moves KV blocks between the device, the host tier and the file tier.

Rule 1: before a step overwrites a block, its old content is saved to the host tier; blocks that a
step restores are on the device before it runs. Both happen on the step thread, and only between the
device and host memory.
Rule 2: files are written by a thread with a bounded queue; blocks that do not fit are not written.
Rule 3: files are read by another thread, before the sequence that needs them is queued.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.kvcache.block_pool import CachedBlock
from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.staging_memory import StagingMemory
from nodeagent.engine.kvcache.swap_or_recompute import SwapOrRecompute

log = logging.getLogger(__name__)

_WRITE_QUEUE_BLOCKS_MAX: Final = 256
_READ_QUEUE_SEQUENCES_MAX: Final = 1024
_READAHEAD_FILES: Final = 4
"""Files that the disk reads at once: the next ones while one is verified and copied."""
_CLOSE_S: Final = 10.0
_SAVE_BLOCKS: Final = 64
"""Blocks copied off the device at once when all are saved."""
STAGED_BYTES: Final = 16 * 1024 * 1024
"""How much is copied between the device and the host tier at once."""

Item = TypeVar("Item")


class DeviceBlocks(Protocol):
    """The KV blocks on the device, by block number."""

    @property
    def can_copy_beside_steps(self) -> bool:
        """Whether any thread may read and write blocks that no step uses, also during a step."""
        ...

    def read_blocks(self, blocks: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the contents [blocks, ...] on the host; in `out`, if that is given."""
        ...

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Fill the blocks with `contents` [blocks, ...]."""
        ...


OnBlocksRead = Callable[[list[bytes], Tensor | None], None]
"""Called with the digests of the blocks that were read, and their contents [blocks, ...]."""


class _PendingRead(NamedTuple):
    digests: list[bytes]
    on_read: OnBlocksRead


class _PendingWrite(NamedTuple):
    digest: bytes
    content: Tensor


class BlockMover:
    """The tiers below one device, and the threads that read and write files."""

    def __init__(
        self,
        device: DeviceBlocks,
        host: HostTier,
        files: FileTier | None,
        staging: StagingMemory | None = None,
    ) -> None:
        """Blocks are copied from and to the device in `staging`."""
        self._device = device
        self._staging = staging or StagingMemory(max(STAGED_BYTES, host.block_bytes))
        self._staged_blocks = max(1, self._staging.buffer_bytes // host.block_bytes)
        self.swap_or_recompute = SwapOrRecompute()
        self.host = host
        self.files = files
        self._writes: queue.Queue[_PendingWrite | None] = queue.Queue(_WRITE_QUEUE_BLOCKS_MAX)
        self._reads: queue.Queue[_PendingRead | None] = queue.Queue(_READ_QUEUE_SEQUENCES_MAX)
        self.saved_total = 0
        self.restored_total = 0
        self.unwritten_total = 0
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in (("kv-write", self._write_files), ("kv-read", self._read_files))
            if files is not None
        ]
        for thread in self._threads:
            thread.start()

    def use_device(self, device: DeviceBlocks) -> None:
        """Move blocks of another device from now on: a model that was loaded again."""
        self._device = device

    def move(
        self,
        evicted: Sequence[CachedBlock],
        restores: Sequence[CachedBlock],
        copy_on_device: Callable[[], None],
    ) -> None:
        """Do the moves of a step: save `evicted`, call `copy_on_device`, load `restores`.

        `restores` are taken out of the host tier first, because saving may evict them.
        """
        unsaved = [entry for entry in evicted if entry.digest not in self.host]
        if not restores:
            self._save(unsaved)
            copy_on_device()
            return
        began_s = time.monotonic()
        digests = [digest for _, digest in restores]
        self.host.use(digests)
        taken: Iterator[Tensor] = map(self._taken, self._parts(digests))
        if len(restores) + len(unsaved) > self.host.total:
            # Saving may evict them.
            taken = iter(list(taken))
        # Saving the blocks that are evicted for it counts as part of the cost of restoring.
        self._save(unsaved)
        copy_on_device()
        for part, contents in zip(self._parts(restores), taken, strict=True):
            self._device.write_blocks([block for block, _ in part], contents)
        self.restored_total += len(restores)
        self.swap_or_recompute.record_swap(len(restores), time.monotonic() - began_s)

    def only_in_files(
        self, digests: Sequence[bytes], on_device: Callable[[bytes], bool]
    ) -> list[bytes]:
        """Return the blocks of the longest available prefix of `digests` that only files have."""
        if self.files is None:
            return []
        files, host = self.files, self.host
        available = list(takewhile(lambda d: on_device(d) or d in host or d in files, digests))
        below = [digest for digest in available if not on_device(digest) and digest not in host]
        return below[: host.total]

    def read_ahead(self, digests: list[bytes], on_read: OnBlocksRead) -> bool:
        """Read blocks from files, then call `on_read` on another thread; False if too busy."""
        try:
            self._reads.put_nowait(_PendingRead(digests, on_read))
        except queue.Full:
            return False
        return True

    def import_blocks(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Store blocks from files or from another engine. Runs on the step thread.

        Raises ValueError, and stores none, if they do not have this engine's block shape.
        """
        self.host.check(digests, contents)
        self.host.put(digests, contents)

    @property
    def keep_blocks_max(self) -> int:
        """How many blocks of another engine can be kept without evicting this engine's own."""
        return self.host.free_rows if self.files is None else _WRITE_QUEUE_BLOCKS_MAX

    def keep(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Store a copy of another engine's blocks. Runs on the step thread.

        In host memory as far as that evicts nothing, and in files, if there are any.
        """
        self.host.check(digests, contents)
        if len(digests) <= self.host.free_rows:
            self.host.put(digests, contents)
        if self.files is not None:
            self._queue_writes(digests, contents)

    def save_all(self, cached: Sequence[CachedBlock], until_s: float) -> None:
        """Write the blocks cached on the device to files, most recently used first, when the device
        goes to sleep or ends.

        Stops at `until_s` (monotonic): blocks not written are computed again.
        """
        self._staging.forget()
        if self.files is None:
            return
        files = self.files
        unsaved = [entry for entry in reversed(cached) if entry.digest not in files]
        for start in range(0, len(unsaved), _SAVE_BLOCKS):
            group = unsaved[start : start + _SAVE_BLOCKS]
            contents = self._device.read_blocks([block for block, _ in group])
            for (_, digest), content in zip(group, contents, strict=True):
                if time.monotonic() > until_s or not files.write(digest, _bytes(content)):
                    return

    def close(self, cached: Sequence[CachedBlock]) -> None:
        """End the threads, then save the blocks cached on the device; takes _CLOSE_S at most."""
        until_s = time.monotonic() + _CLOSE_S
        if self._threads:
            try:
                for waiting in (self._writes, self._reads):
                    waiting.put(None, timeout=max(0.0, until_s - time.monotonic()))
            except queue.Full:
                # The disk hangs; blocks that wait for it are computed again.
                return
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self.save_all(cached, until_s)

    def counts(self) -> dict[str, float]:
        """Return the metrics of the tiers, by name."""
        files = self.files
        return {
            "kv_host_blocks": len(self.host),
            "kv_host_blocks_total": self.host.total,
            "kv_file_blocks": len(files) if files is not None else 0,
            "kv_file_bytes": files.used_bytes if files is not None else 0,
            "kv_file_corrupt_total": files.corrupt_total if files is not None else 0,
            "kv_file_refused_total": files.refused_total if files is not None else 0,
            "kv_saved_total": self.saved_total,
            "kv_restored_total": self.restored_total,
            "kv_unwritten_total": self.unwritten_total,
        }

    def _save(self, evicted: Sequence[CachedBlock]) -> None:
        room = self.host.total
        for part in self._parts(evicted):
            digests = [digest for _, digest in part]
            contents = self._device.read_blocks(
                [block for block, _ in part], self._staged(len(part))
            )
            self.host.put(digests[:room], contents)
            room = max(0, room - len(part))
            self.saved_total += len(part)
            if self.files is not None:
                self._queue_writes(digests, contents)
        # A prefix outlives what follows it, also what was in another part.
        self.host.use([digest for _, digest in evicted[: self.host.total]])

    def _taken(self, digests: Sequence[bytes]) -> Tensor:
        """Return blocks of the host tier where the device can take them."""
        return self.host.get(digests, self._staged(len(digests)))

    def _staged(self, blocks: int) -> Tensor:
        return self.host.shaped(self._staging.take(blocks * self.host.block_bytes))

    def _parts(self, blocks: Sequence[Item]) -> Iterator[Sequence[Item]]:
        """Cut a move into parts that fit into staging memory."""
        for start in range(0, len(blocks), self._staged_blocks):
            yield blocks[start : start + self._staged_blocks]

    def _queue_writes(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Have blocks written to files, unless too many wait already."""
        assert self.files is not None
        files = self.files
        unwritten = [index for index, digest in enumerate(digests) if digest not in files]
        # Only this thread adds to the queue, so these still fit below.
        taken = unwritten[: self._writes.maxsize - self._writes.qsize()]
        self.unwritten_total += len(unwritten) - len(taken)
        # A copy: a view of one block would keep the memory of all blocks until it is written.
        contents = contents[taken]
        for index, content in zip(taken, contents, strict=True):
            self._writes.put_nowait(_PendingWrite(digests[index], content))

    def _write_files(self) -> None:
        assert self.files is not None
        while (pending := self._writes.get()) is not None:
            if pending.digest not in self.files:
                self.files.write(pending.digest, _bytes(pending.content))

    def _read_files(self) -> None:
        assert self.files is not None
        while (pending := self._reads.get()) is not None:
            digests, on_read = pending
            rows: list[Tensor] = []
            for ahead in digests[1:_READAHEAD_FILES]:
                self.files.prefetch(ahead)
            for index, digest in enumerate(digests):
                for ahead in digests[index + _READAHEAD_FILES : index + _READAHEAD_FILES + 1]:
                    self.files.prefetch(ahead)
                content = self.files.read(digest)
                # Blocks after a gap are of no use.
                if content is None:
                    break
                rows.append(self.host.as_block(content))
            on_read(digests[: len(rows)], torch.stack(rows) if rows else None)


def _bytes(content: Tensor) -> memoryview:
    flat: np.ndarray = content.contiguous().view(torch.uint8).numpy()
    return flat.reshape(-1).data

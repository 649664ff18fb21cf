"""Moving blocks between the device and what is below it, as each step's decisions need it.

Rule 1: before a step writes a block, its old content is kept below; what is to be read from below
is there before the step runs. Both happen on the step thread, from and to host memory only.
Rule 2: files are written behind, by a thread with a bounded queue; what has no room there is not.
Rule 3: files are read ahead, by another thread, before their sequence is queued.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from nodeagent.engine.kvcache.file_tier import FileTier
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.scheduler.swap_or_recompute import Trade

log = logging.getLogger(__name__)

_BEHIND_MAX: Final = 256
"""Blocks that may wait to be written."""
_AHEAD_MAX: Final = 1024
"""Sequences that may wait for their blocks to be read."""
_EXPECTED: Final = 4
"""Files under way at once: the disk reads the next ones while one is sealed and copied."""
_CLOSE_S: Final = 10.0
_SAVE_BLOCKS: Final = 64
"""Blocks copied off the device at once when all are saved."""


class Device(Protocol):
    """The device's blocks, by number."""

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        """Return the contents [blocks, ...] on the host."""
        ...

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        """Fill the blocks."""
        ...


Then = Callable[[list[bytes], Tensor | None], None]
"""Told which blocks were read, and what they hold."""


class Mover:
    """The tiers below one device."""

    def __init__(self, device: Device, host: HostTier, files: FileTier | None) -> None:
        self._device = device
        self.trade = Trade()
        self.host = host
        self.files = files
        self._behind: queue.Queue[tuple[bytes, Tensor] | None] = queue.Queue(_BEHIND_MAX)
        self._ahead: queue.Queue[tuple[list[bytes], Then] | None] = queue.Queue(_AHEAD_MAX)
        self.saved_total = 0
        self.restored_total = 0
        self.unwritten_total = 0
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("kv-behind", self._write), ("kv-ahead", self._read))
            if files is not None
        ]
        for thread in self._threads:
            thread.start()

    def move(
        self,
        evicted: Sequence[tuple[int, bytes]],
        restores: Sequence[tuple[int, bytes]],
        within: Callable[[], None],
    ) -> None:
        """Do a step's moves: what is wanted is taken out first, for keeping may push it out.

        `within` moves what stays on the device: over what was saved, and before it is filled anew.
        """
        due = [one for one in evicted if one[1] not in self.host]
        if not restores:
            self._save(due)
            within()
            return
        began_s = time.monotonic()
        wanted = self.host.get([digest for _, digest in restores])
        # What is brought back has its price, and what must be saved to make place is part of it.
        self._save(due)
        within()
        self._device.write_blocks([block for block, _ in restores], wanted)
        self.restored_total += len(restores)
        self.trade.note(len(restores), time.monotonic() - began_s)

    def missing(self, chain: Sequence[bytes], known: Callable[[bytes], bool]) -> list[bytes]:
        """Return which blocks of `chain` lie in files alone and would serve, its head first."""
        if self.files is None:
            return []
        files, host = self.files, self.host
        reach = list(takewhile(lambda d: known(d) or d in host or d in files, chain))
        below = [digest for digest in reach if not known(digest) and digest not in host]
        return below[: host.total]

    def read_ahead(self, digests: list[bytes], then: Then) -> bool:
        """Read blocks from files, then call `then` on another thread; False where too busy."""
        try:
            self._ahead.put_nowait((digests, then))
        except queue.Full:
            return False
        return True

    def take_in(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Keep blocks that came from files or from another engine. On the step thread.

        Raises ValueError, and keeps none, where they are not such as this engine keeps.
        """
        self.host.check(digests, contents)
        self.host.put(digests, contents)

    def export(self, held: Sequence[tuple[int, bytes]], digests: Sequence[bytes]) -> Tensor | None:
        """Return the blocks of `digests` [blocks, ...]; `held` are those on the device.

        None where one of them is nowhere. On the step thread.
        """
        blocks = {digest: block for block, digest in held}
        rows: list[Tensor] = []
        for digest in digests:
            if digest in blocks:
                rows.append(self._device.read_blocks([blocks[digest]])[0])
            elif digest in self.host:
                rows.append(self.host.get([digest])[0])
            else:
                content = self.files.read(digest) if self.files is not None else None
                if content is None:
                    return None
                rows.append(self.host.shaped(content))
        return torch.stack(rows) if rows else None

    def save_all(self, held: Sequence[tuple[int, bytes]], until_s: float) -> None:
        """Write what the device remembers, for the next process: what was used last goes first.

        Ends where time is up (`until_s`, monotonic): what is not written is computed again.
        """
        if self.files is None:
            return
        files = self.files
        due = [one for one in reversed(held) if one[1] not in files]
        for start in range(0, len(due), _SAVE_BLOCKS):
            part = due[start : start + _SAVE_BLOCKS]
            contents = self._device.read_blocks([block for block, _ in part])
            for (_, digest), content in zip(part, contents, strict=True):
                if time.monotonic() > until_s or not files.write(digest, _bytes(content)):
                    return

    def close(self, held: Sequence[tuple[int, bytes]]) -> None:
        """End the threads, then leave in files what the device remembers; within _CLOSE_S."""
        until_s = time.monotonic() + _CLOSE_S
        if self._threads:
            try:
                for waiting in (self._behind, self._ahead):
                    waiting.put(None, timeout=max(0.0, until_s - time.monotonic()))
            except queue.Full:
                # A disk that takes nothing; what waits for it is computed again.
                return
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self.save_all(held, until_s)

    def counts(self) -> dict[str, float]:
        """Return what the metrics tell."""
        files = self.files
        return {
            "kv_host_blocks": len(self.host),
            "kv_host_blocks_total": self.host.total,
            "kv_file_blocks": len(files) if files else 0,
            "kv_file_bytes": files.held_bytes if files else 0,
            "kv_file_spoilt_total": files.spoilt_total if files else 0,
            "kv_saved_total": self.saved_total,
            "kv_restored_total": self.restored_total,
            "kv_unwritten_total": self.unwritten_total,
        }

    def _save(self, evicted: Sequence[tuple[int, bytes]]) -> None:
        if not evicted:
            return
        digests = [digest for _, digest in evicted]
        contents = self._device.read_blocks([block for block, _ in evicted])
        self.host.put(digests, contents)
        self.saved_total += len(digests)
        if self.files is None:
            return
        for digest, content in zip(digests, contents, strict=True):
            if digest in self.files:
                continue
            try:
                self._behind.put_nowait((digest, content))
            except queue.Full:
                self.unwritten_total += 1

    def _write(self) -> None:
        assert self.files is not None
        while (item := self._behind.get()) is not None:
            digest, content = item
            if digest not in self.files:
                self.files.write(digest, _bytes(content))

    def _read(self) -> None:
        assert self.files is not None
        while (asked := self._ahead.get()) is not None:
            digests, then = asked
            rows: list[Tensor] = []
            for soon in digests[1:_EXPECTED]:
                self.files.expect(soon)
            for at, digest in enumerate(digests):
                for soon in digests[at + _EXPECTED : at + _EXPECTED + 1]:
                    self.files.expect(soon)
                content = self.files.read(digest)
                # What follows a gap serves nobody.
                if content is None:
                    break
                rows.append(self.host.shaped(content))
            then(digests[: len(rows)], torch.stack(rows) if rows else None)


def _bytes(content: Tensor) -> memoryview:
    flat: np.ndarray = content.contiguous().view(torch.uint8).numpy()
    return flat.reshape(-1).data

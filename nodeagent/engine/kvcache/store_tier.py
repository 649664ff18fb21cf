"""The store tier: KV blocks in the PoP's store (Mooncake Store), shared by all engines of a model.

Each engine gives memory to the store. The store's master says in which engine's memory a block is,
and engines copy blocks from each other's memory. A block has two copies where two engines live, so
that it outlives one of them.

Rule 1: a block is named by the model's fingerprint and its digest, a chain over the tenant's salt
and the tokens, and is sealed: what does not fit its seal is deleted, and counts as missing.
Rule 2: nothing here runs on the step thread. Each call may block for seconds while the master or
an engine is lost; while CALLS_MAX calls block, and for PAUSE_S after a failure, the store is empty.
A read from an engine whose host is gone ends after a minute, and the master names that engine for
seconds: the store is empty until then, and is read through the other parts of the buffer after it.
Rule 3: the engine serves before it has joined the store, and without it.
Rule 4: an engine joins only once the master has forgotten all that died on its machine. It may
listen at the port of one of them, and would take that one's memory for its own: the process would
read and write addresses that mean something else there, or nothing.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import takewhile
from typing import Final, Protocol

import torch
from torch import Tensor

from isochrone.wire.kv.kv_store import MEMBER_TTL_S
from nodeagent.engine.kvcache.block_seal import SEAL_BYTES, seal
from nodeagent.engine.kvcache.store_ports import LeftPorts

log = logging.getLogger(__name__)

CALLS_MAX: Final = 8
READS_MAX: Final = 3
"""Reads at a time, each into a part of the buffer."""
PAUSE_S: Final = 1.0
HANGS_AFTER_S: Final = 2.0
FORGOTTEN_AFTER_S: Final = 2.0 * MEMBER_TTL_S
"""How long the master may name the memory of an engine that died."""
JOIN_AGAIN_S: Final = 2.0
LOOK_S: Final = 0.5
"""How often an engine that is to join looks whether another one has left its port."""
_HEAD_BYTES: Final = 64
"""The place of the seal before the content, which begins at a multiple of the numbers' size."""


class StoreLost(Exception):
    """The store did not answer, or answered with an error."""


class StoreClient(Protocol):
    """The store of the PoP, by names of objects. Each call may block for seconds."""

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Return which objects exist. Raises StoreLost."""
        ...

    def get(self, names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        """Copy objects to `places`; say which came whole."""
        ...

    def put(self, names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        """Store objects, as far as there is memory; say which are stored."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        ...

    def register(self, buffer: Tensor) -> None:
        """Prepare memory that all `places` lie in. Raises StoreLost."""
        ...

    def close(self) -> None:
        """Leave the store, and take the memory that was given to it back."""
        ...


Join = Callable[[], StoreClient]
"""Joins the store, and gives memory to it. Raises StoreLost."""


class StoreTier:
    """The blocks of one model in the store. Safe to call from any thread."""

    def __init__(
        self,
        join: Join,
        fingerprint: Callable[[], bytes],
        block_bytes: int,
        buffer_bytes: int,
        clock: Callable[[], float],
        listening: Callable[[], Set[int]] = frozenset,
    ) -> None:
        """`fingerprint` may read files. `buffer_bytes` are for READS_MAX reads and one write, of
        one block each at least. `clock` returns monotonic seconds, and `listening` the ports at
        which members of the store listen on this machine."""
        self._join, self._fingerprint, self._clock = join, fingerprint, clock
        self._listening = listening
        self._block_bytes = block_bytes
        self._slot_bytes = _HEAD_BYTES + -(-block_bytes // _HEAD_BYTES) * _HEAD_BYTES
        self.part_blocks = max(1, buffer_bytes // (READS_MAX + 1) // self._slot_bytes)
        """The most blocks of one read or write."""
        parts = (READS_MAX + 1, self.part_blocks, self._slot_bytes)
        self._buffer = torch.empty(*parts, dtype=torch.uint8)
        *reads, self._writes = self._buffer
        self._writing = threading.Lock()
        self._free_reads: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for part in reads:
            self._free_reads.put(part)
        self._counting = threading.Lock()
        self._calls = 0
        self._reads_began_s: list[float] = []
        self._paused_until_s = 0.0
        self._client: StoreClient | None = None
        self._closing = threading.Event()
        self.put_total = self.refused_total = self.read_total = self.wrong_total = 0

    def start(self) -> None:
        """Join the store on a thread of its own, however long that takes."""
        joining = threading.Thread(
            target=self._keep_joining, args=(FORGOTTEN_AFTER_S,), name="kv-store-join", daemon=True
        )
        joining.start()

    def close(self, timeout_s: float) -> None:
        """Leave the store, which may take long without its master: wait `timeout_s` at most."""
        with self._counting:
            self._closing.set()
            client, self._client = self._client, None
        if client is not None:
            leaving = threading.Thread(target=client.close, name="kv-store-leave", daemon=True)
            leaving.start()
            leaving.join(timeout_s)

    def counts(self) -> dict[str, float]:
        """Return the metrics, by name."""
        return {
            "kv_store_joined": int(self._client is not None),
            "kv_store_put_blocks_total": self.put_total,
            "kv_store_refused_blocks_total": self.refused_total,
            "kv_store_read_blocks_total": self.read_total,
            "kv_store_wrong_blocks_total": self.wrong_total,
        }

    def count_prefix(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks of a chain's prefix the store has."""
        return sum(1 for _ in takewhile(bool, self._exist(digests) or ()))

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the blocks that the store lacks; none while it cannot be used."""
        found = self._exist(digests)
        if found is None:
            return []
        return [digest for digest, exists in zip(digests, found, strict=True) if not exists]

    def read(self, digests: Sequence[bytes]) -> Tensor:
        """Return the blocks of a chain's prefix [blocks, bytes], `part_blocks` at most.

        It ends before the first block that is missing or wrong.
        """
        with self._call() as client:
            if client is None:
                return torch.empty(0, self._block_bytes, dtype=torch.uint8)
            with self._part_to_read() as part:
                return self._read(client, digests[: self.part_blocks], part)

    def _read(self, client: StoreClient, digests: Sequence[bytes], part: Tensor) -> Tensor:
        """Read blocks to a part of the buffer; return a copy of those that came whole."""
        fingerprint = self._fingerprint()
        names = [self._name(fingerprint, digest) for digest in digests]
        whole = client.get(names, [self._object(part, n) for n in range(len(names))])
        blocks = sum(1 for _ in takewhile(bool, whole))
        if not blocks:
            self._pause()
        for number in range(blocks):
            if not self._is_sealed(fingerprint, digests[number], part[number]):
                self.wrong_total += 1
                client.delete(names[number])
                blocks = number
                break
        self.read_total += blocks
        read: Tensor = part[:blocks, _HEAD_BYTES : _HEAD_BYTES + self._block_bytes]
        return read.clone()

    def write(self, digests: Sequence[bytes], contents: Tensor) -> int:
        """Store the blocks [blocks, ...], `part_blocks` at most; return how many are stored."""
        fingerprint = self._fingerprint()
        names = [self._name(fingerprint, digest) for digest in digests]
        flat = contents.contiguous().view(torch.uint8).view(len(names), -1)
        with self._call() as client, self._writing:
            if client is None:
                return 0
            for row, digest, content in zip(self._writes, digests, flat, strict=False):
                sealed = seal(fingerprint, digest, _bytes(content))
                row[:SEAL_BYTES] = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
                row[_HEAD_BYTES : _HEAD_BYTES + self._block_bytes] = content
            stored = client.put(names, [self._object(self._writes, n) for n in range(len(names))])
        self.put_total += sum(stored)
        self.refused_total += len(stored) - sum(stored)
        return sum(stored)

    def _exist(self, digests: Sequence[bytes]) -> list[bool] | None:
        """Return which blocks the store has; None while it cannot be used."""
        fingerprint = self._fingerprint()
        with self._call() as client:
            if client is not None:
                try:
                    return client.exist([self._name(fingerprint, digest) for digest in digests])
                except StoreLost:
                    self._pause()
        return None

    @contextmanager
    def _call(self) -> Iterator[StoreClient | None]:
        """Count a call; yield None if the store is not to be used now."""
        now_s = self._clock()
        with self._counting:
            is_paused = now_s < self._paused_until_s or self._calls >= CALLS_MAX
            is_paused |= any(
                HANGS_AFTER_S <= now_s - began_s < FORGOTTEN_AFTER_S
                for began_s in self._reads_began_s
            )
            self._calls += 1
        try:
            yield None if is_paused else self._client
        finally:
            with self._counting:
                self._calls -= 1

    @contextmanager
    def _part_to_read(self) -> Iterator[Tensor]:
        """Wait for a part of the buffer that no read uses."""
        part, began_s = self._free_reads.get(), self._clock()
        with self._counting:
            self._reads_began_s.append(began_s)
        try:
            yield part
        finally:
            with self._counting:
                self._reads_began_s.remove(began_s)
            self._free_reads.put(part)

    def _pause(self) -> None:
        self._paused_until_s = self._clock() + PAUSE_S

    def _keep_joining(self, after_s: float = 0.0) -> None:
        """Join once no member on this machine has left for `after_s`."""
        is_logged = False
        left = LeftPorts(self._listening(), self._clock())
        while not self._closing.is_set():
            wait_s = after_s - left.look(self._listening(), self._clock())
            if wait_s > 0:
                self._closing.wait(min(LOOK_S, wait_s))
                continue
            try:
                client = self._join_once()
            except StoreLost as error:
                if not is_logged:
                    fields = {"reason": str(error)}
                    log.warning("cannot join the KV store yet", extra={"fields": fields})
                is_logged = True
                self._closing.wait(JOIN_AGAIN_S)
                continue
            with self._counting:
                is_closing = self._closing.is_set()
                self._client = None if is_closing else client
            if is_closing:
                client.close()
                return
            log.info("joined the KV store")
            return

    def _join_once(self) -> StoreClient:
        """Join, and leave again if the buffer cannot be used. Raises StoreLost."""
        client = self._join()
        try:
            client.register(self._buffer)
        except StoreLost:
            client.close()
            raise
        return client

    def _object(self, rows: Tensor, number: int) -> Tensor:
        return rows[number, : _HEAD_BYTES + self._block_bytes]

    def _is_sealed(self, fingerprint: bytes, digest: bytes, row: Tensor) -> bool:
        content = _bytes(row[_HEAD_BYTES : _HEAD_BYTES + self._block_bytes])
        return bytes(_bytes(row[:SEAL_BYTES])) == seal(fingerprint, digest, content)

    def _name(self, fingerprint: bytes, digest: bytes) -> str:
        return f"isochrone-{fingerprint.hex()}-{digest.hex()}"


def _bytes(row: Tensor) -> memoryview:
    """Return contiguous bytes on the host without a copy."""
    content: memoryview = row.numpy().data
    return content

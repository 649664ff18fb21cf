"""The KV blocks that transfers hold on the device: those to be sent, and those that arrived.

Rule 1: all methods here run on the step thread, between steps, unless their docstring says
otherwise.
Rule 2: a block to be sent is referenced from when it is computed until it is read; a block that
arrived, until its sequence has been admitted. The code that opens a hold closes it, in every case.
Rule 3: the content of an evicted block is first saved to the tiers below.
Rule 4: arrived blocks leave a free block for each sequence that waits for its KV. With that block
a sequence whose whole prompt arrived can be admitted.
Rule 5: if nothing runs and the next sequence does not fit, prefixes are let go of, the newest
first: sequences that each hold a part of their prompts would all wait for each other.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from torch import Tensor

from nodeagent.engine.kvcache.block_mover import BlockMover, DeviceBlocks
from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence

OnComputed = Callable[[int, float], None]
"""Called on the step thread with the number of blocks that can be read or have been read."""


@dataclass(slots=True, eq=False)
class OutgoingBlocks:
    """The blocks of one prompt that are to be sent: from `first_block` on, `total` in all."""

    first_block: int
    total: int
    on_computed: OnComputed
    blocks: list[int] = field(default_factory=list)
    """Those that are computed, on the device. The first `read` of them are no longer held."""
    read: int = 0
    is_closed: bool = False
    """Whether nothing is held any more: what is read from then on may be anything."""

    @property
    def held(self) -> list[int]:
        """Blocks on the device that are computed and not yet read."""
        return self.blocks[self.read :]

    def numbers(self, first: int, count: int) -> list[int]:
        """Return where blocks of the prompt are on the device, from number `first` on. For any
        thread."""
        start = first - self.first_block
        return self.blocks[start : start + count]


class IncomingBlocks(NamedTuple):
    """The blocks of one prompt on the device: those that were cached, and those that arrived.

    `let_go` are the digests of arrived blocks that are no longer held.
    """

    cached: list[int]
    arrived: list[int]
    let_go: list[bytes]


class BlocksToWrite(NamedTuple):
    """Blocks on the device for contents that arrived. The first ones were cached; for the others,
    `new` are the indices of their `digests`."""

    blocks: list[int]
    new: list[int]
    digests: Sequence[bytes]

    @property
    def fresh(self) -> list[int]:
        """The blocks that are to be written."""
        return self.blocks[len(self.blocks) - len(self.new) :]


class HeldPrefix(NamedTuple):
    """How many blocks of a prompt's prefix are cached: on the device, and in all tiers."""

    on_device: int
    in_all_tiers: int


class KvTransfers:
    """The holds of all transfers of one engine."""

    def __init__(self, pool: BlockPool, device: DeviceBlocks, mover: BlockMover | None) -> None:
        self._pool = pool
        self._device = device
        self._mover = mover
        self._outgoing: dict[int, OutgoingBlocks] = {}
        self._incoming: dict[str, IncomingBlocks] = {}
        self._reading: dict[int, list[int]] = {}
        self._writing: dict[str, list[BlocksToWrite]] = {}
        self._is_asleep = False
        self.sent_blocks_total = 0
        self.received_blocks_total = 0

    def use_device(self, device: DeviceBlocks) -> None:
        """Move blocks of another device from now on: a model that was loaded again."""
        self._device = device
        self._is_asleep = False

    def fall_asleep(self) -> None:
        """Take no blocks for the device until `use_device`: there is none, and nothing is held."""
        self._is_asleep = True

    @property
    def held_blocks(self) -> int:
        """References that transfers hold. For any thread: copies are counted, because the step
        thread may open and close transfers meanwhile."""
        outgoing = sum(len(blocks.held) for blocks in tuple(self._outgoing.values()))
        incoming = tuple(self._incoming.values())
        reading = sum(len(blocks) for blocks in tuple(self._reading.values()))
        runs = tuple(self._writing.values())
        writing = sum(len(run.blocks) for all_of in runs for run in tuple(all_of))
        arrived = sum(len(blocks.cached) + len(blocks.arrived) for blocks in incoming)
        return outgoing + reading + writing + arrived

    @property
    def can_copy_beside_steps(self) -> bool:
        """Whether any thread may read and write blocks that no step uses. For any thread."""
        return self._device.can_copy_beside_steps

    def counts(self) -> dict[str, float]:
        """Return the metrics of the transfers, by name. For any thread."""
        return {
            "kv_transfer_held_blocks": self.held_blocks,
            "kv_transfer_sent_blocks_total": self.sent_blocks_total,
            "kv_transfer_received_blocks_total": self.received_blocks_total,
        }

    def open_outgoing(self, number: int, outgoing: OutgoingBlocks) -> None:
        """Hold the blocks of generation `number` from now on, as they are computed."""
        self._outgoing[number] = outgoing

    def hold_computed(self, sequence: TokenSequence) -> None:
        """Hold what a step has computed of a prompt that is being sent."""
        outgoing = self._outgoing.get(sequence.number)
        if outgoing is None:
            return
        computed = min(sequence.published_blocks, outgoing.total)
        begun = outgoing.first_block + len(outgoing.blocks)
        if computed > begun:
            outgoing.blocks.extend(self._pool.add_reference(sequence.blocks[begun:computed]))
            outgoing.on_computed(computed, sequence.began_s)

    def read_outgoing(self, number: int, count: int, out: Tensor | None = None) -> Tensor | None:
        """Return the next `count` blocks on the host [blocks, ...], and let go of them.

        The contents are copied to `out`, if it is given. None if the transfer was closed.
        """
        outgoing = self._outgoing.get(number)
        if outgoing is None or len(outgoing.held) < count:
            return None
        contents = self._device.read_blocks(outgoing.held[:count], out)
        self.release_outgoing(number, count)
        return contents

    def release_outgoing(self, number: int, count: int) -> None:
        """Let go of the next `count` blocks: they were read."""
        outgoing = self._outgoing.get(number)
        if outgoing is not None:
            read = outgoing.held[:count]
            outgoing.read += len(read)
            self._pool.release(read)
            self.sent_blocks_total += len(read)

    def close_outgoing(self, number: int) -> None:
        """Let go of what was not read. Does nothing the second time."""
        outgoing = self._outgoing.pop(number, None)
        if outgoing is not None:
            outgoing.is_closed = True
            self._pool.release(outgoing.held)

    def let_go_of(self, number: int, blocks: Collection[int]) -> None:
        """Let go of the blocks of a generation that failed, whose contents may be NaN.

        Blocks that are being read are not sent any more.
        """
        self.close_outgoing(number)
        for incoming in self._incoming.values():
            for held in (incoming.cached, incoming.arrived):
                failed = [block for block in held if block in blocks]
                held[:] = [block for block in held if block not in blocks]
                self._pool.release(failed)

    def open_incoming(self, transfer: str, digests: Sequence[bytes]) -> HeldPrefix:
        """Hold the prefix of a prompt that is cached on the device; return how long it is."""
        cached = self._pool.match_prefix(digests)
        held = self._pool.allocate(cached, 0) or []
        if self._pool.free_blocks <= len(self._incoming):
            self._pool.release(held)
            held = []
        self._incoming[transfer] = IncomingBlocks(held, [], [])
        return HeldPrefix(len(cached), self.count_prefix(digests))

    def count_on_device(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks of the prefix of a chain are on the device. For any thread."""
        return sum(1 for _ in takewhile(self._pool.has_digest, digests))

    def count_prefix(self, digests: Sequence[bytes]) -> int:
        """Return how many blocks of the prefix of a chain are in some tier. For any thread."""
        host: Container[bytes] = self._mover.host if self._mover is not None else ()
        files = self._mover.files if self._mover is not None else None
        lower: Container[bytes] = files if files is not None else ()
        has_digest = self._pool.has_digest
        found = takewhile(lambda d: has_digest(d) or d in host or d in lower, digests)
        return sum(1 for _ in found)

    def open_reading(self, reader: int, digests: Sequence[bytes]) -> list[int]:
        """Hold the blocks of the prefix of a chain that are on the device; return their numbers.

        None are held where only the step thread may read the device.
        """
        if not self.can_copy_beside_steps:
            return []
        found = self._pool.match_prefix(digests)
        self._reading[reader] = self._pool.allocate(found, 0) or []
        return self._reading[reader]

    def read_held(self, blocks: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Return the contents of blocks that are held [blocks, ...]. For any thread.

        They are copied to `out`, if it is given.
        """
        return self._device.read_blocks(blocks, out)

    def close_reading(self, reader: int) -> None:
        """Let go of what a reader holds. Does nothing the second time."""
        self._pool.release(self._reading.pop(reader, []))

    def demote(self, digests: Sequence[bytes]) -> None:
        """Have these blocks evicted before others: another replica has them now, and uses them."""
        self._pool.demote(digests)

    @property
    def keep_blocks_max(self) -> int:
        """How many blocks of another engine can be kept without evicting this engine's own."""
        if self._mover is not None:
            return self._mover.keep_blocks_max
        return 0 if self._is_asleep else self._pool.empty_blocks

    def read_prefix(self, digests: Sequence[bytes]) -> Tensor | None:
        """Return the blocks of the prefix of a chain that are on the device, else those in host
        memory [blocks, ...]; None if the first one is in neither.
        """
        cached = self._pool.match_prefix(digests)
        if cached:
            return self._device.read_blocks(cached)
        if self._mover is None:
            return None
        host = self._mover.host
        kept = list(takewhile(host.__contains__, digests))
        host.use(kept)
        return host.get(kept) if kept else None

    def keep(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Store blocks that no request waits for: below the device, if there are such tiers.

        Blocks for which others would have to be evicted are dropped.
        """
        if self._mover is not None:
            self._mover.keep(digests, contents)
            return
        if len(digests) > self.keep_blocks_max:
            return
        self.open_incoming("keep", ())
        self.store_incoming("keep", digests, contents)
        self.close_incoming("keep")

    def store_shared(self, transfer: str, digests: Sequence[bytes], contents: Tensor) -> bool:
        """Store blocks that another replica has, where the waiting request will find them."""
        if self._mover is None:
            return self.store_incoming(transfer, digests, contents)
        if transfer not in self._incoming:
            return False
        self._mover.import_blocks(digests, contents)
        return True

    def store_incoming(self, transfer: str, digests: Sequence[bytes], contents: Tensor) -> bool:
        """Store blocks that arrived, and hold them.

        If it was closed or too few blocks are free, let go of all its blocks and return False.
        """
        writing = self.open_writing(transfer, digests)
        if writing is None:
            return False
        self.write_held(writing, contents)
        self.close_writing(transfer, len(digests))
        return True

    def open_writing(self, transfer: str, digests: Sequence[bytes]) -> BlocksToWrite | None:
        """Hold blocks for the next contents of a transfer, until `close_writing`. There may be
        several of a transfer: the oldest is closed first.

        If it was closed, too few blocks are free or the engine sleeps, let go of all its blocks and
        return None.
        """
        incoming = self._incoming.get(transfer)
        if incoming is None:
            return None
        if self._is_asleep:
            self.close_incoming(transfer)
            return None
        new = [index for index, d in enumerate(digests) if not self._pool.has_digest(d)]
        cached = [block for digest in digests for block in self._pool.match_prefix((digest,))]
        blocks = self._pool.allocate(cached, len(new))
        if blocks is None or self._pool.free_blocks < len(self._incoming):
            self._pool.release(blocks or [])
            self.close_incoming(transfer)
            return None
        evicted = self._pool.take_evicted()
        if self._mover is not None and evicted:
            self._mover.move(evicted, (), lambda: None)
        writing = BlocksToWrite(blocks, new, digests)
        self._writing.setdefault(transfer, []).append(writing)
        return writing

    def write_held(self, writing: BlocksToWrite, contents: Tensor, first: int = 0) -> None:
        """Copy contents that arrived to the blocks held for them, from the digest of index `first`
        on. For any thread, if `can_copy_beside_steps`."""
        start, end = (bisect_left(writing.new, at) for at in (first, first + len(contents)))
        if start < end:
            if end - start < len(contents):
                contents = contents[[index - first for index in writing.new[start:end]]]
            self._device.write_blocks(writing.fresh[start:end], contents)

    def close_writing(self, transfer: str, written: int) -> None:
        """Let sequences find the blocks of the first `written` digests. Let go of the others, and
        of all if the transfer was closed meanwhile. Does nothing if none are held."""
        held = self._writing.get(transfer)
        if not held:
            return
        writing = held.pop(0)
        if not held:
            del self._writing[transfer]
        incoming = self._incoming.get(transfer)
        if incoming is None:
            self._pool.release(writing.blocks)
            return
        fresh = writing.fresh
        new = writing.new[: bisect_left(writing.new, written)]
        self._pool.release(fresh[len(new) :])
        incoming.arrived.extend(writing.blocks[: len(writing.blocks) - len(fresh) + len(new)])
        for block, index in zip(fresh, new, strict=False):
            self._pool.cache(block, writing.digests[index])
        self.received_blocks_total += len(new)

    def let_go_of_prefix(self) -> bool:
        """Let go of the prefix that the newest transfer holds; return False if none holds any.

        Its blocks stay cached until they are evicted. Blocks that arrive later are held again.
        """
        for incoming in reversed(self._incoming.values()):
            if held := [*incoming.cached, *incoming.arrived]:
                incoming.let_go.extend(self._pool.digests_of(incoming.arrived))
                incoming.cached.clear()
                incoming.arrived.clear()
                self._pool.release(held)
                return True
        return False

    def close_incoming(
        self, transfer: str, *, is_wrong: bool = False, shared: Sequence[bytes] = ()
    ) -> None:
        """Let go of what arrived. Does nothing the second time.

        With `is_wrong` the peer sent wrong blocks: those that no sequence uses are forgotten, also
        the `shared` ones in host memory.
        """
        incoming = self._incoming.pop(transfer, None)
        if incoming is None:
            return
        if is_wrong:
            self._pool.uncache(incoming.arrived)
            self._pool.forget(incoming.let_go)
            if self._mover is not None:
                self._mover.host.discard(shared)
        self._pool.release([*incoming.cached, *incoming.arrived])

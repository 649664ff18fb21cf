"""The KV blocks: who holds each one, and which prompt prefix a free one still remembers.

Rule 1: a block is free or held, never both; held means that at least one sequence counts it.
Rule 2: a free block keeps its digest until it is handed out again, least recently used first;
blocks that remember nothing go first of all.
Rule 3: a block under a digest is never written again, so sharing it needs no copy: it is whole, and
a sequence writes only behind it.
Rule 4: the block that a prompt ends in is shared too by the sequences that go on from it. Who
writes to a block that others hold takes one of its own first, into which that one is copied.
"""

from collections import OrderedDict
from collections.abc import Sequence as Ordered


class Blocks:
    """The accounts of `total` KV blocks, by number."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"cannot keep {total} KV blocks: at least one is needed")
        self.total = total
        self._holders = [0] * total
        self._digest: list[bytes | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))
        self._evicted: list[tuple[int, bytes]] = []

    def __repr__(self) -> str:
        return f"Blocks(total={self.total}, held={self.held}, remembered={len(self._by_digest)})"

    @property
    def free(self) -> int:
        """Blocks that can be handed out now, remembered prefixes included."""
        return len(self._free)

    @property
    def held(self) -> int:
        """Blocks in use by sequences."""
        return self.total - len(self._free)

    def holders(self, block: int) -> int:
        """How many sequences count on `block`."""
        return self._holders[block]

    def remembers(self, digest: bytes) -> bool:
        """True where some block holds what `digest` names."""
        return digest in self._by_digest

    def remembered(self) -> list[tuple[int, bytes]]:
        """Return every block with the digest that it remembers, the next to be lost first."""
        order = [*self._free, *(block for block in range(self.total) if block not in self._free)]
        return [(block, d) for block in order if (d := self._digest[block]) is not None]

    def take_evicted(self) -> list[tuple[int, bytes]]:
        """Return the blocks handed out anew since last asked, with what they remembered before."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def match(self, chain: Ordered[bytes]) -> list[int]:
        """Return the blocks of the longest remembered prefix of `chain`. Changes nothing."""
        found: list[int] = []
        for digest in chain:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Ordered[int]) -> list[int]:
        """Have one more sequence hold each of the held `blocks`."""
        for block in blocks:
            if self._holders[block] < 1:
                raise ValueError(f"cannot share block {block}: nobody holds it")
            self._holders[block] += 1
        return list(blocks)

    def take(self, remembered: Ordered[int], fresh: int) -> list[int] | None:
        """Hold the `remembered` blocks and `fresh` others; None, and no change, where too few."""
        revived = sum(1 for block in remembered if self._holders[block] == 0)
        if fresh + revived > len(self._free):
            return None
        for block in remembered:
            self._free.pop(block, None)
            self._holders[block] += 1
        return [*remembered, *(self._take_oldest() for _ in range(fresh))]

    def part(self, block: int) -> int | None:
        """Take a block in the place of the shared `block`; None, and no change, where none is free.

        What `block` holds is to be copied into it.
        """
        if self._holders[block] < 2:
            raise ValueError(f"cannot part from block {block}: {self._holders[block]} hold it")
        if not self._free:
            return None
        self._holders[block] -= 1
        return self._take_oldest()

    def publish(self, block: int, digest: bytes) -> None:
        """Remember what the held `block` contains. The first block of a digest is the one found."""
        if digest not in self._by_digest and self._digest[block] is None:
            self._by_digest[digest] = block
            self._digest[block] = digest

    def forget(self, blocks: Ordered[int]) -> list[int]:
        """Offer those of `blocks` that have one holder to nobody any more; return them."""
        alone = [block for block in blocks if self._holders[block] == 1]
        for block in alone:
            digest = self._digest[block]
            if digest is not None:
                del self._by_digest[digest]
                self._digest[block] = None
        return alone

    def release(self, blocks: Ordered[int]) -> None:
        """Let go of `blocks`, the tail first: a prefix is worth more than what follows it."""
        for block in reversed(blocks):
            if self._holders[block] < 1:
                raise ValueError(f"cannot release block {block}: nobody holds it")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._digest[block] is None:
                    self._free.move_to_end(block, last=False)

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest[block]
        if digest is not None:
            del self._by_digest[digest]
            self._digest[block] = None
            self._evicted.append((block, digest))
        self._holders[block] = 1
        return block

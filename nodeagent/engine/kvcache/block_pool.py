"""The KV blocks of the device: reference counts, and the prefix cache of free blocks.

Rule 1: a block is either free or used; used means that at least one sequence references it.
Rule 2: a free block stays in the prefix cache until it is allocated again. The least recently used
block is allocated first, and blocks that are not in the cache before all others. The prefix of a
prompt also counts as used when the prompt begins to wait, and again before prompts ahead of it are
admitted (`SequenceBlocks.admit`): those would evict it otherwise.
Rule 3: a cached block is never written, so that sharing it needs no copy: it is full, and a
sequence writes only after it.
Rule 4: a block of which another replica has a newer copy is demoted: it is allocated before the
other cached blocks.
Rule 5: the partial block at the end of a prompt is shared by the sequences that fork from it. A
sequence that writes to a block with other references replaces it by a copy first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from math import inf
from typing import Final, NamedTuple

BLOCK_TOKENS: Final = 16
"""Tokens per KV block."""


class CachedBlock(NamedTuple):
    """A block, and the digest of the tokens whose KV it holds or is to hold."""

    block: int
    digest: bytes


class BlockPool:
    """Reference counts and cached digests of `total` KV blocks, by block number."""

    def __init__(self, total: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        """Begin with an empty cache. `clock` gives monotonic seconds."""
        if total < 1:
            raise ValueError(f"cannot keep {total} KV blocks: at least one is needed")
        self.total = total
        self._clock = clock
        self._freed_at_s = [0.0] * total
        """For each block, the time at which the last sequence released it."""
        self.evicted_used_at_s = clock()
        """The last time of use of which no block is in the cache any more, nor of any before it;
        at first the beginning of the cache."""
        self._evicting_s = self.evicted_used_at_s
        """The time of use of the block that was evicted last; others of it may still be cached."""
        self._references = [0] * total
        self._was_found = [False] * total
        """For each block, whether a prompt has found it in the cache."""
        self._digest: list[bytes | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._empty = list(reversed(range(total)))
        """The free blocks that hold nothing; the last one is allocated first."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """The free blocks in the prefix cache, the next to be evicted first."""
        self._evicted: list[CachedBlock] = []

    def __repr__(self) -> str:
        return (
            f"BlockPool(total={self.total}, used={self.used_blocks}, cached={len(self._by_digest)})"
        )

    @property
    def free_blocks(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def empty_blocks(self) -> int:
        """Free blocks that hold nothing: allocating them evicts nothing from the cache."""
        return len(self._empty)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences reference."""
        return self.total - self.free_blocks

    def reference_count(self, block: int) -> int:
        """Return how many sequences reference `block`."""
        return self._references[block]

    def has_digest(self, digest: bytes) -> bool:
        """Return whether a block with this digest is cached."""
        return digest in self._by_digest

    def cached_blocks(self) -> list[CachedBlock]:
        """Return all cached blocks, the next to be evicted first."""
        others = (block for block in range(self.total) if block not in self._cached)
        order = [*self._cached, *others]
        return [CachedBlock(block, d) for block in order if (d := self._digest[block]) is not None]

    def take_evicted(self) -> list[CachedBlock]:
        """Return the blocks allocated since the last call whose cached content is overwritten."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def match_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `digests`. Changes nothing."""
        found: list[int] = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def add_reference(self, blocks: Sequence[int]) -> list[int]:
        """Add a reference to each of the used `blocks`; return a list of them."""
        for block in blocks:
            if self._references[block] < 1:
                raise ValueError(f"cannot share block {block}: no sequence references it")
            self._references[block] += 1
        return list(blocks)

    def fits(self, cached: Sequence[int], fresh: int) -> bool:
        """Return whether the `cached` blocks and `fresh` free ones can be allocated."""
        revived = sum(1 for block in cached if self._references[block] == 0)
        return fresh + revived <= self.free_blocks

    def allocate(self, cached: Sequence[int], fresh: int) -> list[int] | None:
        """Reference the `cached` blocks and `fresh` free ones; None, and no change, if too few."""
        if not self.fits(cached, fresh):
            return None
        for block in cached:
            self._cached.pop(block, None)
            self._references[block] += 1
            self._was_found[block] = True
        return [*cached, *(self._allocate_oldest() for _ in range(fresh))]

    def unshare(self, block: int) -> int | None:
        """Exchange a reference to the shared `block` for a free block; None if there is none.

        The caller copies the content of `block`.
        """
        if self._references[block] < 2:
            raise ValueError(
                f"cannot unshare block {block}: {self._references[block]} reference it"
            )
        if not self.free_blocks:
            return None
        self._references[block] -= 1
        return self._allocate_oldest()

    def cache(self, block: int, digest: bytes) -> None:
        """Add the used, full `block` to the prefix cache, unless the digest is cached already."""
        if digest not in self._by_digest and self._digest[block] is None:
            self._by_digest[digest] = block
            self._digest[block] = digest

    def uncache(self, blocks: Sequence[int]) -> list[int]:
        """Remove the `blocks` that have a single reference from the cache; return those blocks."""
        unshared = [block for block in blocks if self._references[block] == 1]
        for block in unshared:
            digest = self._digest[block]
            if digest is not None:
                del self._by_digest[digest]
                self._digest[block] = None
        return unshared

    def digests_of(self, blocks: Sequence[int]) -> list[bytes]:
        """Return the digests of those `blocks` that are cached."""
        return [digest for block in blocks if (digest := self._digest[block]) is not None]

    def forget(self, digests: Sequence[bytes]) -> None:
        """Remove the free blocks with these digests from the cache."""
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is not None and block in self._cached:
                del self._by_digest[digest], self._cached[block]
                self._digest[block] = None
                self._empty.append(block)

    def forget_cached(self) -> None:
        """Empty the prefix cache: all cached contents are lost. No sequence may have a block."""
        if self.used_blocks:
            raise ValueError(f"cannot forget the cache: {self.used_blocks} blocks are in use")
        self._digest = [None] * self.total
        self._by_digest.clear()
        self._empty.extend(self._cached)
        self._cached.clear()
        self._evicted.clear()
        self.evicted_used_at_s = self._evicting_s = self._clock()

    def found_blocks(self, blocks_max: int) -> list[CachedBlock]:
        """Return the free blocks that several prompts have used, the most recently used first."""
        found = (block for block in reversed(self._cached) if self._was_found[block])
        named = ((block, self._digest[block]) for block in found)
        return list(islice((CachedBlock(b, d) for b, d in named if d is not None), blocks_max))

    def restore(self, found: Sequence[CachedBlock]) -> None:
        """Put what `found_blocks` returned back into the cache, which was emptied since.

        Blocks that were allocated meanwhile are left out.
        """
        empty = set(self._empty)
        for block, digest in reversed(found):
            if block in empty and digest not in self._by_digest:
                self._digest[block] = digest
                self._by_digest[digest] = block
                self._cached[block] = None
        self._empty = [block for block in self._empty if block not in self._cached]

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each of `blocks`.

        The last block is freed first, because a prefix is more useful than what follows it.
        """
        now_s = self._clock()
        for block in reversed(blocks):
            if self._references[block] < 1:
                raise ValueError(f"cannot release block {block}: no sequence references it")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._freed_at_s[block] = now_s
                if self._digest[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None

    def touch(self, digests: Sequence[bytes]) -> None:
        """Count the cached prefix of `digests` as used now: its last block is evicted first."""
        now_s = self._clock()
        for block in reversed(self.match_prefix(digests)):
            if block in self._cached:
                self._cached.move_to_end(block)
                self._freed_at_s[block] = now_s

    def demote(self, digests: Sequence[bytes]) -> None:
        """Have the free blocks of these digests allocated before the other cached ones.

        The last digest is evicted first.
        """
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is not None and block in self._cached:
                # In this order the last one comes to stand before the others.
                self._cached.move_to_end(block, last=False)
                # That it is evicted says nothing about how far back the cache reaches.
                self._freed_at_s[block] = -inf

    def _allocate_oldest(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            digest = self._digest[block]
            assert digest is not None
            del self._by_digest[digest]
            self._digest[block] = None
            self._evicted.append(CachedBlock(block, digest))
            if self._freed_at_s[block] > self._evicting_s:
                self.evicted_used_at_s = self._evicting_s
                self._evicting_s = self._freed_at_s[block]
        self._references[block] = 1
        self._was_found[block] = False
        return block

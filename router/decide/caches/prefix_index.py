"""Tracks each replica's prefix cache, as far as a router can tell without a tokenizer.

A prompt is cut into blocks of bytes, and each block's key is a hash chained to the key before it,
so equal keys mean equal prompts up to there. A prompt that was sent to a replica is in its cache
until newer prompts evict it. A replica may report how far back its cache reaches. For one that does
not, the index simulates eviction, least recently used first, and learns the size of the cache from
the replica's own count of cached tokens.

Blocks grow with depth, to a sixteenth of what is before them, so a long prompt needs few keys and
the matched length is never wrong by more than that.
"""

import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from typing import Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.http.body_loops import chained_hashes
from router.decide.caches.cached_blocks import UNDONE, CachedBlocks, PromptUse, new_cached_blocks

BLOCK_BYTES: Final = 128
DEPTH_PER_BLOCK: Final = 16
"""A block is at most one part in this many of the prompt before it, if that is above
BLOCK_BYTES."""

KEYS_MAX: Final = 160
PAIRS_MAX: Final = 200_000
"""How many (key, replica) pairs one index holds, some 150 bytes each. If there are more, those go
that a replica has beyond an equal share."""

CAPACITY_DEFAULT: Final = 4_000_000
CAPACITY_MIN: Final = 20_000
CAPACITY_MAX: Final = 10**9
"""Assumed size of a replica's cache, in the unit of the keys: bytes of prompt."""

SHRINK_STEP: Final = 0.5
"""How far one proven eviction moves the capacity towards what had been inserted by then."""

GROWTH_FACTOR: Final = 1.002
"""Each confirmed match raises the capacity by this factor."""

TTL_S: Final = 3600.0

HIT_RATIO_MIN: Final = 0.75
"""An answer with less than this of the expected cached share proves that the rest was evicted."""

_NOT_ZERO: Final = re.compile(rb"[^\0]")


@mypyc_attr(acyclic=True, free_list_len=1)
class PrefixKeys:
    """A prompt's chain of keys, the byte offset at which each block ends, and the prompt's size."""

    __slots__ = ("ends", "keys", "size")

    def __init__(self, keys: Sequence[int], ends: Sequence[int], size: int) -> None:
        self.keys = keys
        self.ends = ends
        self.size = size


NO_KEYS: Final = PrefixKeys((), (), 0)


@mypyc_attr(acyclic=True, free_list_len=1)
class PrefixMatch:
    """Replicas that hold the same share of a prompt, as a bit mask of their slots."""

    __slots__ = ("mask", "share")

    def __init__(self, mask: int, share: float) -> None:
        self.mask = mask
        self.share = share


@mypyc_attr(acyclic=True, free_list_len=1)
class PrefixMatches:
    """How much of a prompt the replicas hold: all of them `all_share`, some of them more."""

    __slots__ = ("all_share", "longer")

    def __init__(self, all_share: float, longer: Sequence[PrefixMatch]) -> None:
        self.all_share = all_share
        self.longer = longer

    def share_at(self, slot: int) -> float:
        """Return the share of the prompt that one replica holds."""
        for match in self.longer:
            if match.mask >> slot & 1:
                return match.share
        return self.all_share


NO_MATCHES: Final = PrefixMatches(0.0, ())


@mypyc_attr(acyclic=True, free_list_len=1)
class SentPrompt:
    """The index's expectation for a prompt when it was sent.

    `share` is the share expected to be cached; `age` is how much had been inserted into that cache
    since that share was last used, in the unit of the keys. `use` is the prompt's use of its
    blocks.
    """

    __slots__ = ("age", "share", "slot", "use")

    def __init__(self, slot: int, share: float, age: int, use: PromptUse) -> None:
        self.slot = slot
        self.share = share
        self.age = age
        self.use = use


def block_ends(size: int, block: int = BLOCK_BYTES, keys_max: int = KEYS_MAX) -> Sequence[int]:
    """Return where a prompt of `size` bytes is cut: whole blocks only, growing with depth."""
    ends = _all_block_ends(block, keys_max)
    return ends[: bisect_right(ends, size)]


@lru_cache(maxsize=16)
def _all_block_ends(block: int, keys_max: int) -> list[int]:
    """Return where a prompt without end is cut."""
    ends: list[int] = []
    end = 0
    while len(ends) < keys_max:
        # Powers of two, so that prompts of any size are cut at the same places.
        end += max(block, 1 << max(0, (end // DEPTH_PER_BLOCK).bit_length() - 1))
        ends.append(end)
    return ends


def prefix_keys(prompt: bytes, seed: int) -> PrefixKeys:
    """Cut and hash a prompt. The seed keeps tenants and deployments apart, as caches do."""
    ends = block_ends(len(prompt))
    return PrefixKeys(chained_hashes(prompt, ends, seed), ends, len(prompt))


class _ReplicaCache:
    """The simulated cache of one replica."""

    def __init__(self, capacity: float) -> None:
        self.blocks: CachedBlocks = new_cached_blocks()
        self.capacity = capacity
        self.is_learned = False
        """Whether an answer has proven an eviction here."""
        self.is_reported = False
        """Whether the replica says itself what it has evicted."""


class PrefixIndex:
    """Maps each key to the slots that hold it, as a bit mask."""

    def __init__(self, capacity: float = CAPACITY_DEFAULT, pairs_max: int = PAIRS_MAX) -> None:
        """Assume caches of `capacity` until answers teach otherwise."""
        self._holders: dict[int, int] = {}
        self._caches: OrderedDict[int, _ReplicaCache] = OrderedDict()
        self._capacity = capacity
        self._pairs_max = pairs_max
        self._pairs = 0

    def __len__(self) -> int:
        """Return how many (key, replica) pairs are held."""
        return self._pairs

    def match(self, keys: PrefixKeys, all_slots_mask: int = 0) -> PrefixMatches:
        """Return how much of the prompt each slot holds.

        `all_slots_mask` has the bits of all slots with a replica, 0 if unknown. A slot that holds
        a key holds all keys before it, so the holders only shrink with depth, and a binary search
        finds the few depths at which they do.
        """
        if not keys.keys or not (holders := self._holders.get(keys.keys[0], 0)):
            return NO_MATCHES
        # The depths at which holders end, with those holders; shallowest first.
        ends: list[tuple[int, int]] = []
        self._find_ends(keys.keys, 0, holders, len(keys.keys), 0, ends)
        all_share = 0.0
        longer = []
        missing = all_slots_mask & ~holders if all_slots_mask else 1
        for depth, mask in ends:
            share = keys.ends[depth] / keys.size
            if not missing and not all_share:
                # Every slot holds the first key, so all hold at least as much as the shallowest.
                all_share = share
                continue
            longer.append(PrefixMatch(mask, share))
        return PrefixMatches(all_share, longer)

    def _find_ends(
        self,
        keys: Sequence[int],
        low: int,
        low_holders: int,
        high: int,
        high_holders: int,
        ends: list[tuple[int, int]],
    ) -> None:
        """Append the depths in [low, high) after which the holders shrink."""
        while high - low > 1 and low_holders != high_holders:
            middle = (low + high) // 2
            middle_holders = self._holders.get(keys[middle], 0)
            if middle_holders != low_holders:
                self._find_ends(keys, low, low_holders, middle, middle_holders, ends)
            low, low_holders = middle, middle_holders
        if low_holders != high_holders:
            ends.append((low, low_holders & ~high_holders))

    def record_sent(self, slot: int, keys: PrefixKeys, now_s: float) -> SentPrompt:
        """Insert a prompt that is sent to a replica, evicting the least recently used blocks."""
        cache = self._caches.get(slot)
        if cache is None:
            cache = self._caches[slot] = _ReplicaCache(self._capacity)
        use = PromptUse(now_s)
        added, deepest, age = cache.blocks.use(keys.keys, keys.ends, use)
        use.held = deepest + 1
        share = keys.ends[deepest] / keys.size if deepest >= 0 else 0.0
        if added:
            self._pairs += len(added)
            holders, bit = self._holders, 1 << slot
            for key in added:
                holders[key] = holders.get(key, 0) | bit
        self._evict(slot, cache, now_s)
        return SentPrompt(slot, share, age, use)

    def undo_sent(self, sent: SentPrompt, keys: PrefixKeys) -> None:
        """Remove what `record_sent` added: the replica did not read the prompt after all.

        Blocks that a later prompt uses stay, and count as added by that one.
        """
        cache = self._caches.get(sent.slot)
        if cache is None or sent.use.held == UNDONE:
            return
        for index in range(sent.use.held, len(keys.keys)):
            key = keys.keys[index]
            if key not in cache.blocks:
                continue
            use = cache.blocks.use_of(key)
            if use is sent.use or use.held == UNDONE:
                self._remove_block(sent.slot, cache, key)
            else:
                use.held = min(use.held, index)
        sent.use.held = UNDONE

    def learn_cached_share(self, sent: SentPrompt, cached_share: float) -> None:
        """Adjust the assumed capacity by the share of a prompt that a replica had cached."""
        cache = self._caches.get(sent.slot)
        if cache is None or not sent.share or cache.is_reported:
            return
        if cached_share >= sent.share * HIT_RATIO_MIN:
            cache.capacity = min(CAPACITY_MAX, cache.capacity * GROWTH_FACTOR)
        elif sent.age < cache.capacity:
            step = SHRINK_STEP if cache.is_learned else 1.0
            cache.capacity += step * (max(CAPACITY_MIN, sent.age) - cache.capacity)
            if not cache.is_learned:
                cache.is_learned = True
                self._share_capacity()

    def record_evicted(self, slot: int, used_before_s: float) -> None:
        """Drop the keys that a replica has evicted: all that was used last before this time.

        From then on its cache is not assumed to have a certain size. Blocks are in the order of
        sending, but a prompt sent early may have been used for long.
        """
        cache = self._caches.get(slot)
        if cache is None:
            return
        cache.is_reported = True
        cache.capacity = float(CAPACITY_MAX)
        for key in cache.blocks.sent_before(used_before_s):
            if cache.blocks.use_of(key).ended_at_s < used_before_s:
                self._remove_block(slot, cache, key)

    def _share_capacity(self) -> None:
        """Assume the median of the learned capacities where nothing was learned or reported yet."""
        assumed = [cache for cache in self._caches.values() if not cache.is_reported]
        learned = sorted([cache.capacity for cache in assumed if cache.is_learned])
        self._capacity = learned[len(learned) // 2]
        for cache in assumed:
            if not cache.is_learned:
                cache.capacity = self._capacity

    def remove_slots(self, slots: Set[int]) -> None:
        """Drop the keys of replicas that have left the route table."""
        for slot in slots:
            cache = self._caches.pop(slot, None)
            if cache is not None:
                self._pairs -= len(cache.blocks)
                for key in cache.blocks.oldest_first():
                    self._remove_holder(key, slot)

    def _evict(self, slot: int, cache: _ReplicaCache, now_s: float) -> None:
        blocks = cache.blocks
        while (use := blocks.oldest_use()) is not None and (
            blocks.size > cache.capacity or now_s - use.sent_at_s > TTL_S
        ):
            self._remove_oldest(slot, cache)
        share = max(1, self._pairs_max // len(self._caches))
        while self._pairs > self._pairs_max:
            if len(cache.blocks) <= share:
                # Others take the room of this one: a replica may report that its cache keeps all.
                larger = self._next_above(share)
                if larger is None:
                    return
                slot, cache = larger, self._caches[larger]
            self._remove_oldest(slot, cache)

    def _next_above(self, share: int) -> int | None:
        """Return the slot with more than `share` blocks whose turn it is to give way.

        To look for the largest for each block would cost a pass over all replicas.
        """
        for _ in range(len(self._caches)):
            slot = next(iter(self._caches))
            if len(self._caches[slot].blocks) > share:
                return slot
            self._caches.move_to_end(slot)
        return None

    def _remove_oldest(self, slot: int, cache: _ReplicaCache) -> None:
        oldest = cache.blocks.oldest()
        assert oldest is not None
        self._remove_block(slot, cache, oldest)

    def _remove_block(self, slot: int, cache: _ReplicaCache, key: int) -> None:
        cache.blocks.remove(key)
        self._pairs -= 1
        self._remove_holder(key, slot)

    def _remove_holder(self, key: int, slot: int) -> None:
        holders = self._holders[key] & ~(1 << slot)
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]


@lru_cache(maxsize=1024)
def slots_of(mask: int) -> Sequence[int]:
    """Return the positions of the bits that are set. Cached because the same masks recur."""
    if mask.bit_count() <= 2:
        return list(_bits(mask))
    slots: list[int] = []
    # Ten thousand slots have a thousand bytes, and of most masks few of them are not zero.
    mask_bytes = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    for match in _NOT_ZERO.finditer(mask_bytes):
        slots += _slots_of_byte(match.start(), mask_bytes[match.start()])
    return slots


@lru_cache(maxsize=32 * 256)
def _slots_of_byte(index: int, byte: int) -> Sequence[int]:
    return tuple(8 * index + bit for bit in range(8) if byte >> bit & 1)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

"""What each replica's prefix cache holds, as far as a router can tell without tokenising.

A prompt is cut into blocks of bytes, and each block's key is a hash chained to the one before it,
so that equal keys mean equal prompts up to there. What was sent to a replica is in its cache until
newer prompts push it out. The index plays that same game, least recently used first, and learns
from the replica's own count of cached tokens how much the cache can hold.

Blocks grow with depth, a sixteenth of what is before them: a long prompt needs few keys, and the
matched length is never wrong by more than that.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from typing import Final, NamedTuple

import xxhash

BLOCK_BYTES: Final = 128
DEPTH_PER_BLOCK: Final = 16
KEYS_MAX: Final = 160
PAIRS_MAX: Final = 200_000
"""How many (key, replica) pairs one index holds, some 150 bytes each."""

CAPACITY_DEFAULT: Final = 4_000_000
CAPACITY_MIN: Final = 20_000
CAPACITY_MAX: Final = 10**9
"""A replica's cache as the index plays it, in the unit of the keys: bytes of prompt."""

SHRINK_STEP: Final = 0.5
"""How far one proven loss moves the capacity towards what had passed through the cache by then."""

GROWTH_FACTOR: Final = 1.002
TTL_S: Final = 3600.0

HIT_RATIO_MIN: Final = 0.75
"""Less than this of the share that was expected, and the rest of it had been pushed out."""


class PrefixKeys(NamedTuple):
    """A prompt's chain of keys: each with where its block ends, and the prompt's whole size."""

    keys: Sequence[int]
    ends: Sequence[int]
    size: int


NO_KEYS: Final = PrefixKeys((), (), 0)


class PrefixMatch(NamedTuple):
    """Replicas that hold the same share of a prompt, as a mask of their slots."""

    mask: int
    share: float


class PrefixMatches(NamedTuple):
    """Who holds how much of a prompt: everyone at least this share, and some more than that."""

    everyone: float
    some: Sequence[PrefixMatch]

    def share_at(self, slot: int) -> float:
        """Return the share of the prompt that one replica holds."""
        for mask, share in self.some:
            if mask >> slot & 1:
                return share
        return self.everyone


NO_MATCHES: Final = PrefixMatches(0.0, ())


class SentPrompt(NamedTuple):
    """What the index expected of a prompt when it went: the share cached, and how old its use was.

    The age is what had passed through that cache since then, in the unit of the keys.
    """

    slot: int
    share: float
    age: int


def block_ends(size: int, block: int = BLOCK_BYTES, keys_max: int = KEYS_MAX) -> Sequence[int]:
    """Return where a prompt of `size` is cut: every whole block, wider the deeper."""
    ends: list[int] = []
    end = 0
    while len(ends) < keys_max:
        # Powers of two, so that prompts of any size are cut at the same places.
        wide = max(block, 1 << max(0, (end // DEPTH_PER_BLOCK).bit_length() - 1))
        end += wide
        if end > size:
            break
        ends.append(end)
    return ends


def prefix_keys(prompt: bytes, seed: int) -> PrefixKeys:
    """Cut and hash a prompt. The seed keeps tenants and deployments apart, as caches do."""
    ends = block_ends(len(prompt))
    keys: list[int] = []
    view = memoryview(prompt)
    key, begin = seed, 0
    for end in ends:
        key = xxhash.xxh3_64_intdigest(view[begin:end], key)
        keys.append(key)
        begin = end
    return PrefixKeys(keys, ends, len(prompt))


class _ReplicaCache:
    """One replica's cache as this index plays it: keys by last use, with their sizes."""

    def __init__(self, capacity: float) -> None:
        self.keys: OrderedDict[int, tuple[int, int, float]] = OrderedDict()
        """Key to (size, `passed` at last use, time of last use), oldest use first."""
        self.size = 0
        self.passed = 0
        self.capacity = capacity


class PrefixIndex:
    """Which slots hold which keys: a mask of bits each key, so a match costs one `and` a key."""

    def __init__(self, capacity: float = CAPACITY_DEFAULT, pairs_max: int = PAIRS_MAX) -> None:
        """Assume caches of `capacity` until taught otherwise."""
        self._holders: dict[int, int] = {}
        self._caches: dict[int, _ReplicaCache] = {}
        self._capacity = capacity
        self._pairs_max = pairs_max
        self._pairs = 0

    def __len__(self) -> int:
        """Return how many (key, replica) pairs are held."""
        return self._pairs

    def match(self, keys: PrefixKeys, everyone: int = 0) -> PrefixMatches:
        """Return who holds how much of the prompt; `everyone` is the mask of all that might.

        Whoever holds a key holds all before it, so between two keys with the same holders nothing
        changes: a few look-ups find where it does.
        """
        if not keys.keys or not (first := self._holders.get(keys.keys[0], 0)):
            return NO_MATCHES
        # The holders at each depth where they change, shallowest first.
        ends: list[tuple[int, int]] = []
        self._split(keys.keys, 0, first, len(keys.keys), 0, ends)
        common = 0.0
        some = []
        missing = everyone & ~first if everyone else 1
        for depth, leaving in ends:
            share = keys.ends[depth] / keys.size
            if not missing and not common:
                # All hold at least as much as those who hold least.
                common = share
                continue
            some.append(PrefixMatch(leaving, share))
        return PrefixMatches(common, some)

    def _split(
        self,
        keys: Sequence[int],
        low: int,
        at_low: int,
        high: int,
        at_high: int,
        ends: list[tuple[int, int]],
    ) -> None:
        """Find in [low, high) the depths after which holders leave; none are left at `high`."""
        while high - low > 1 and at_low != at_high:
            middle = (low + high) // 2
            at_middle = self._holders.get(keys[middle], 0)
            self._split(keys, low, at_low, middle, at_middle, ends)
            low, at_low = middle, at_middle
        if at_low != at_high:
            ends.append((low, at_low & ~at_high))

    def sent(self, slot: int, keys: PrefixKeys, now_s: float) -> SentPrompt:
        """A prompt goes to a replica: from now on its cache holds it, the oldest making room."""
        cache = self._caches.get(slot)
        if cache is None:
            cache = self._caches[slot] = _ReplicaCache(self._capacity)
        bit = 1 << slot
        share, age = 0.0, 0
        passed = cache.passed
        # The tail first, as engines let go of it first: a prefix is worth more than what follows.
        for at in range(len(keys.keys) - 1, -1, -1):
            key, end = keys.keys[at], keys.ends[at]
            begin = keys.ends[at - 1] if at else 0
            held = cache.keys.pop(key, None)
            if held is None:
                self._holders[key] = self._holders.get(key, 0) | bit
                self._pairs += 1
                cache.size += end - begin
                cache.passed += end - begin
            elif not share:
                share, age = end / keys.size, passed - held[1]
            cache.keys[key] = (end - begin, cache.passed, now_s)
        self._make_room(slot, cache, now_s)
        return SentPrompt(slot, share, age)

    def unsent(self, sent: SentPrompt, keys: PrefixKeys) -> None:
        """The replica did not take the prompt after all: what it had not before, it has not now."""
        cache = self._caches.get(sent.slot)
        if cache is None:
            return
        for key, end in zip(keys.keys, keys.ends, strict=True):
            if end > sent.share * keys.size and key in cache.keys:
                self._drop(sent.slot, cache, key)

    def answered(self, sent: SentPrompt, cached: float) -> None:
        """A replica told which share of that prompt it had cached: is its cache that large?"""
        cache = self._caches.get(sent.slot)
        if cache is None or not sent.share:
            return
        if cached >= sent.share * HIT_RATIO_MIN:
            cache.capacity = min(CAPACITY_MAX, cache.capacity * GROWTH_FACTOR)
        elif sent.age < cache.capacity:
            cache.capacity += SHRINK_STEP * (max(CAPACITY_MIN, sent.age) - cache.capacity)

    def forget(self, slots: Set[int]) -> None:
        """Drop what gone replicas held."""
        for slot in slots:
            cache = self._caches.pop(slot, None)
            if cache is not None:
                self._pairs -= len(cache.keys)
                for key in cache.keys:
                    self._let_go(key, slot)

    def _make_room(self, slot: int, cache: _ReplicaCache, now_s: float) -> None:
        while cache.keys:
            key, (_, _, used_at_s) = next(iter(cache.keys.items()))
            over = cache.size > cache.capacity or now_s - used_at_s > TTL_S
            crowded = self._pairs > self._pairs_max and len(cache.keys) > 1
            if not over and not crowded:
                return
            self._drop(slot, cache, key)

    def _drop(self, slot: int, cache: _ReplicaCache, key: int) -> None:
        cache.size -= cache.keys.pop(key)[0]
        self._pairs -= 1
        self._let_go(key, slot)

    def _let_go(self, key: int, slot: int) -> None:
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


@lru_cache(maxsize=1024)
def slots_of(mask: int) -> Sequence[int]:
    """Return the numbers of the bits that are set. The same masks come again and again."""
    if mask.bit_count() <= 2:
        return list(_bits(mask))
    found: list[int] = []
    for at, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        if byte:
            found += _slots_of_byte(at, byte)
    return found


@lru_cache(maxsize=32 * 256)
def _slots_of_byte(at: int, byte: int) -> Sequence[int]:
    return tuple(8 * at + bit for bit in range(8) if byte >> bit & 1)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low

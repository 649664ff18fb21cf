"""The KV memory of a simulated replica.

PrefixCache has memory of its own, besides that of the running sequences. KvPool has one pool for
both, as engines have today: what the running sequences hold is not left for cached prefixes, and a
block that several of them share is held once.
"""

from collections import Counter, OrderedDict
from collections.abc import Set
from typing import Final, NamedTuple

from ops.sim.traces import TraceRequest
from ops.sim.world import EngineProfile

WATERMARK: Final = 0.01
"""Share of a pool that stays free when a prompt is admitted to it, as in vLLM."""


SEVERAL: Final = -1
ENDS: Final = -2
"""Stands for the end of the prompt with number 0 behind its last block; lower for later prompts."""


class SharedPrefixEvent(NamedTuple):
    """Several prompts turned out to have a prefix in common, or the end of one was evicted.

    `blocks` are the whole prefix, or the evicted block.
    """

    at_s: float
    blocks: tuple[int, ...]
    is_stored: bool


class PrefixCache:
    """Blocks of prompts that were read, the least recently used evicted first."""

    def __init__(self, tokens_max: int) -> None:
        self._blocks: OrderedDict[int, int] = OrderedDict()
        """The tokens of each block; the least recently used first."""
        self._tokens = 0
        self._tokens_max = tokens_max
        self.now_s = 0.0
        """The replica's clock, set by it."""
        self.evicted_used_at_s = 0.0
        """The time of the last use of the block that was evicted last."""
        self._used_at_s: dict[int, float] = {}
        """The time of the last use of each cached block."""
        self.events: list[SharedPrefixEvent] = []
        """Events of the prefixes that several prompts have in common, oldest first."""
        self._next_block: dict[int, int] = {}
        """The block that follows each block in all prompts; SEVERAL if they differ."""

    def matched_blocks(self, request: TraceRequest, blocks_to_come: Set[int]) -> int:
        """Return how many leading blocks of the prompt are cached, or among those to come."""
        blocks, count = self._blocks, 0
        for block in request.blocks:
            if block not in blocks and block not in blocks_to_come:
                break
            count += 1
        return count

    def has_room(self, request: TraceRequest, more_tokens: int, grown_tokens: float) -> bool:
        """Return whether the prompt, and `more_tokens` to be read after it, may begin."""
        return True

    def hold(self, request: TraceRequest, more_tokens: int) -> None:
        """Take memory for a prompt that begins to be read."""
        self._note_shared(request)

    def release(self, request: TraceRequest, more_tokens: int, *, is_read: bool = True) -> None:
        """Give back the memory of a sequence that ended; if its prompt was read it stays cached."""
        for block in reversed(request.blocks):
            if block in self._blocks:
                self._blocks.move_to_end(block)
                self._used_at_s[block] = self.now_s

    def free_tokens(self, grown_tokens: float) -> float:
        """Return how many tokens the running sequences may still grow; `grown_tokens` are theirs
        since they began to decode."""
        return float("inf")

    def put(self, request: TraceRequest, grown_tokens: float) -> None:
        """Cache a prompt that was read, and evict what does not fit."""
        self._put_blocks(request)
        self.trim(grown_tokens)

    def trim(self, grown_tokens: float) -> None:
        """Evict what does not fit beside the running sequences."""
        self._evict(self._tokens_max)

    def clear(self) -> None:
        """Forget everything: the engine has restarted."""
        self._blocks.clear()
        self._used_at_s.clear()
        for block, following in self._next_block.items():
            if following == SEVERAL:
                self.events.append(SharedPrefixEvent(self.now_s, (block,), False))
        self._next_block.clear()
        self._tokens = 0
        self.evicted_used_at_s = self.now_s

    def _note_shared(self, request: TraceRequest) -> None:
        """Note where this prompt goes on differently from others before it."""
        known, blocks = self._next_block, request.blocks
        for depth, block in enumerate(blocks):
            following = blocks[depth + 1] if depth + 1 < len(blocks) else ENDS - request.number
            if known.setdefault(block, following) not in (following, SEVERAL):
                known[block] = SEVERAL
                self.events.append(SharedPrefixEvent(self.now_s, blocks[: depth + 1], True))

    def _put_blocks(self, request: TraceRequest) -> None:
        # From the last block to the first, so that the end of a prompt is evicted first.
        blocks = self._blocks
        for block in reversed(request.blocks):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = request.block_tokens
                self._tokens += request.block_tokens
            self._used_at_s[block] = self.now_s

    def _evict(self, tokens_max: float) -> None:
        while self._blocks and self._tokens > tokens_max:
            block, tokens = self._blocks.popitem(last=False)
            self._tokens -= tokens
            self._note_evicted(block)
            if self._next_block.pop(block, 0) == SEVERAL:
                self.events.append(SharedPrefixEvent(self.now_s, (block,), False))

    def _note_evicted(self, block: int) -> None:
        self.evicted_used_at_s = self._used_at_s.pop(block)


class KvPool(PrefixCache):
    """One pool for cached prefixes and running sequences."""

    def __init__(self, tokens_max: int) -> None:
        super().__init__(tokens_max)
        self._users: Counter[int] = Counter()
        """The number of running sequences that hold each block; these blocks are not in the
        cache."""
        self._held_tokens = 0

    def matched_blocks(self, request: TraceRequest, blocks_to_come: Set[int]) -> int:
        """Return how many leading blocks of the prompt are cached or held, or to come."""
        blocks, users, count = self._blocks, self._users, 0
        for block in request.blocks:
            if block not in blocks and block not in users and block not in blocks_to_come:
                break
            count += 1
        return count

    def has_room(self, request: TraceRequest, more_tokens: int, grown_tokens: float) -> bool:
        """Return whether the prompt fits without evicting a running sequence."""
        shared = sum(block in self._users for block in request.blocks) * request.block_tokens
        needed = request.prompt_tokens + more_tokens - shared
        return self.free_tokens(grown_tokens) - needed >= WATERMARK * self._tokens_max

    def hold(self, request: TraceRequest, more_tokens: int) -> None:
        """Take memory for a prompt: cached blocks of it are no longer up for eviction."""
        super().hold(request, more_tokens)
        for block in request.blocks:
            if block in self._blocks:
                self._tokens -= self._blocks.pop(block)
            if block not in self._users:
                self._held_tokens += request.block_tokens
            self._users[block] += 1
        self._held_tokens += _own_tokens(request) + more_tokens

    def release(self, request: TraceRequest, more_tokens: int, *, is_read: bool = True) -> None:
        """Give memory back; blocks that no other sequence holds become the newest of the cache."""
        for block in reversed(request.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._held_tokens -= request.block_tokens
                if is_read:
                    self._blocks[block] = request.block_tokens
                    self._used_at_s[block] = self.now_s
                    self._tokens += request.block_tokens
        self._held_tokens -= _own_tokens(request) + more_tokens

    def free_tokens(self, grown_tokens: float) -> float:
        """Return how many tokens the running sequences may still grow."""
        return self._tokens_max - self._held_tokens - grown_tokens

    def put(self, request: TraceRequest, grown_tokens: float) -> None:
        """Evict what does not fit; the prompt's blocks are held until its sequence ends."""
        self.trim(grown_tokens)

    def trim(self, grown_tokens: float) -> None:
        """Evict what does not fit beside the running sequences."""
        self._evict(max(0.0, self.free_tokens(grown_tokens)))

    def clear(self) -> None:
        """Forget everything, held blocks too."""
        super().clear()
        self._users.clear()
        self._held_tokens = 0


def _own_tokens(request: TraceRequest) -> int:
    """Return the tokens of a prompt after its last whole block."""
    return max(0, request.prompt_tokens - len(request.blocks) * request.block_tokens)


def replica_memory(profile: EngineProfile) -> PrefixCache:
    """Return the memory of a replica with this profile."""
    return KvPool(profile.pool_tokens) if profile.pool_tokens else PrefixCache(profile.cache_tokens)

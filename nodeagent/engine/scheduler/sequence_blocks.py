"""The KV blocks of sequences: allocated on admission, grown while decoding, shared by forks.

Rule 1: a sequence gets the blocks of its whole prompt when it is admitted; afterwards it grows by
one block at a time.
Rule 2: cached blocks of the prompt are reused. Blocks in the tiers below the device are restored if
that is faster than computing them (`SwapOrRecompute`).
Rule 3: a sequence that writes to a block with other references gets a copy of its own first.
Rule 4: the blocks of a new prompt evict what the next prompts in the queue have cached only where
nothing else is free.
"""

from collections.abc import Container
from collections.abc import Sequence as Ordered
from itertools import takewhile
from typing import Final, NamedTuple

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool, CachedBlock
from nodeagent.engine.kvcache.swap_or_recompute import SwapOrRecompute
from nodeagent.engine.scheduler.batch import BlockCopy
from nodeagent.engine.scheduler.sequence import Sequence

NEXT_PROMPTS_MAX: Final = 8
"""How many waiting prompts keep what they have cached when a prompt is admitted: more would take
longer to look up, and their turn comes later."""


class BlockMoves(NamedTuple):
    """The block contents that move before a step; see `Batch`."""

    evicted: tuple[CachedBlock, ...]
    copies: tuple[BlockCopy, ...]
    restores: tuple[CachedBlock, ...]


class SequenceBlocks:
    """Allocates the blocks of a pool to sequences, and collects the moves that this needs."""

    def __init__(
        self,
        pool: BlockPool,
        lower_tiers: Container[bytes],
        swap_or_recompute: SwapOrRecompute | None,
    ) -> None:
        self.pool = pool
        self.lower_tiers = lower_tiers
        """The digests of the blocks in the tiers below the device."""
        self.swap_or_recompute = swap_or_recompute or SwapOrRecompute()
        self.reused_tokens = 0
        """Tokens of preempted sequences whose KV was cached or restored when they resumed."""
        self.recomputed_tokens = 0
        """Tokens of preempted sequences that were computed again."""
        self._restores: dict[int, bytes] = {}
        self._copy_sources: dict[int, int] = {}
        """The source block of each copy, by destination."""

    def admit(
        self, sequence: Sequence, prefill_token_s: float, waiting: Ordered[Sequence] = ()
    ) -> bool:
        """Allocate blocks for all known tokens; return False, and change nothing, if too few.

        `prefill_token_s` is the cost of computing a token, which restoring is compared with.
        `waiting` is the queue, the next one first.
        """
        digests = _reusable_digests(sequence)
        cached = self.pool.match_prefix(digests)
        below = list(takewhile(self.lower_tiers.__contains__, digests[len(cached) :]))
        if below and not self.swap_or_recompute.should_swap_in(prefill_token_s):
            below = []
        fresh = sequence.blocks_needed() - len(cached)
        if not self.pool.fits(cached, fresh):
            return False
        if fresh > self.pool.empty_blocks:
            for other in reversed(waiting[:NEXT_PROMPTS_MAX]):
                self.touch_prefix(other)
        blocks = self.pool.allocate(cached, fresh)
        assert blocks is not None
        sequence.blocks = blocks
        self._restores |= zip(blocks[len(cached) :], below, strict=False)
        sequence.computed_tokens = (len(cached) + len(below)) * BLOCK_TOKENS
        sequence.published_blocks = len(cached)
        if sequence.was_admitted:
            self.reused_tokens += sequence.computed_tokens
            self.recomputed_tokens += sequence.pending_tokens
        else:
            sequence.was_admitted = True
            sequence.cached_tokens = sequence.computed_tokens
            sequence.restored_tokens = len(below) * BLOCK_TOKENS
        return True

    def touch_prefix(self, sequence: Sequence) -> None:
        """Keep what is cached of a waiting prompt from being evicted before older blocks."""
        self.pool.touch(_reusable_digests(sequence))

    def reserve_next_token(self, sequence: Sequence) -> bool:
        """Ensure that a decoding sequence has a block of its own to write; False if none is free.

        After False the sequence may have gained a block: call again once others were released.
        """
        while True:
            if sequence.blocks_needed() > len(sequence.blocks):
                block = self.pool.allocate((), 1)
                if block is None:
                    return False
                sequence.blocks.extend(block)
            elif self._writes_to_shared_block(sequence):
                if not self._copy_on_write(sequence):
                    return False
            else:
                return True

    def reserve_drafts(self, sequence: Sequence, drafts: int, spare_blocks: int) -> int:
        """Allocate blocks for `drafts` draft tokens; return how many of the tokens have a slot.

        Allocates only if more than `spare_blocks` blocks stay free.
        """
        length = len(sequence.tokens) + drafts
        missing = -(-length // BLOCK_TOKENS) - len(sequence.blocks)
        if missing > 0 and self.pool.free_blocks > missing + spare_blocks:
            sequence.blocks.extend(self.pool.allocate((), missing) or ())
        slots = len(sequence.blocks) * BLOCK_TOKENS - len(sequence.tokens)
        return min(drafts, max(slots, 0))

    def publish(self, sequence: Sequence, computed_tokens: int) -> None:
        """Offer the full blocks of the first `computed_tokens` tokens to the prefix cache."""
        full = computed_tokens // BLOCK_TOKENS
        digests = sequence.block_digests(full)
        for index in range(sequence.published_blocks, full):
            self.pool.cache(sequence.blocks[index], digests[index])
        sequence.published_blocks = max(sequence.published_blocks, full)

    def share(self, sequence: Sequence, fork: Sequence) -> None:
        """Have `fork` continue from the blocks of `sequence`."""
        fork.blocks = self.pool.add_reference(sequence.blocks)
        fork.computed_tokens = sequence.computed_tokens
        fork.published_blocks = sequence.published_blocks
        fork.was_admitted = True

    def own_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks become free if `sequence` releases its: no other one uses them."""
        return sum(self.pool.reference_count(block) == 1 for block in sequence.blocks)

    def release(self, sequence: Sequence) -> None:
        """Return the blocks of `sequence` to the pool, and reset its progress."""
        # A sequence preempted in the step that admitted it needs no restores and no copies.
        for block in sequence.blocks:
            self._restores.pop(block, None)
            self._copy_sources.pop(block, None)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed_tokens = 0
        sequence.published_blocks = 0
        sequence.drafts = ()

    def take_moves(self) -> BlockMoves:
        """Return the moves collected since the last call."""
        moves = BlockMoves(
            tuple(self.pool.take_evicted()),
            tuple(BlockCopy(source, block) for block, source in self._copy_sources.items()),
            tuple(CachedBlock(block, digest) for block, digest in self._restores.items()),
        )
        self._copy_sources.clear()
        self._restores.clear()
        return moves

    def _writes_to_shared_block(self, sequence: Sequence) -> bool:
        block = sequence.blocks[sequence.computed_tokens // BLOCK_TOKENS]
        return self.pool.reference_count(block) > 1

    def _copy_on_write(self, sequence: Sequence) -> bool:
        """Replace the shared block that is written next by a copy; False if no block is free."""
        index = sequence.computed_tokens // BLOCK_TOKENS
        own = self.pool.unshare(sequence.blocks[index])
        if own is None:
            return False
        self._copy_sources[own] = sequence.blocks[index]
        # A new list object, because others compare its identity to see that the blocks changed.
        sequence.blocks = [*sequence.blocks[:index], own, *sequence.blocks[index + 1 :]]
        return True


def _reusable_digests(sequence: Sequence) -> list[bytes]:
    # The last token is always computed: its logits are needed.
    return sequence.block_digests((len(sequence.tokens) - 1) // BLOCK_TOKENS)

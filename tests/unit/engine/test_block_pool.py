"""The block pool: references are counted, and the least recently used prefix is evicted first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nodeagent.engine.kvcache.block_pool import BlockPool

TOTAL = 6


class BlocksMachine(RuleBasedStateMachine):
    """Allocates, shares, caches and releases at random, checked against lists of references."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockPool(TOTAL)
        self.owners: list[list[int]] = []

    @rule(fresh=st.integers(0, TOTAL + 1))
    def allocate_fresh(self, fresh: int) -> None:
        free = self.blocks.free_blocks
        taken = self.blocks.allocate((), fresh)
        assert (taken is None) == (fresh > free)
        if taken is None:
            assert self.blocks.free_blocks == free
        else:
            self.owners.append(taken)

    @rule(
        digests=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3), fresh=st.integers(0, 3)
    )
    def allocate_cached(self, digests: list[bytes], fresh: int) -> None:
        cached = self.blocks.match_prefix(list(dict.fromkeys(digests)))
        used = self.blocks.used_blocks
        taken = self.blocks.allocate(cached, fresh)
        if taken is None:
            assert self.blocks.used_blocks == used
        else:
            assert taken[: len(cached)] == cached
            self.owners.append(taken)

    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c"]))
    def cache(self, data: st.DataObject, digest: bytes) -> None:
        used = sorted({block for owner in self.owners for block in owner})
        if used:
            block = data.draw(st.sampled_from(used))
            known = {d for d in (b"a", b"b", b"c") if self.blocks.match_prefix([d]) == [block]}
            self.blocks.cache(block, digest)
            # A block keeps its first digest, and a digest its first block.
            assert bool(self.blocks.match_prefix([digest])) or known

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            index = data.draw(st.integers(0, len(self.owners) - 1))
            self.blocks.release(self.owners.pop(index))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            index = data.draw(st.integers(0, len(self.owners) - 1))
            self.owners.append(self.blocks.add_reference(self.owners[index]))

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """An owner that writes to a shared block replaces it by a copy first."""
        owner = data.draw(st.sampled_from(self.owners)) if self.owners else []
        at = data.draw(st.integers(0, len(owner) - 1)) if owner else -1
        if at < 0 or self.blocks.reference_count(owner[at]) == 1:
            return
        free, others = self.blocks.free_blocks, self.blocks.reference_count(owner[at]) - 1
        own = self.blocks.unshare(owner[at])
        assert (own is None) == (free == 0)
        if own is not None:
            assert self.blocks.reference_count(owner[at]) == others
            owner[at] = own
            assert self.blocks.reference_count(own) == 1
            assert all(self.blocks.match_prefix([digest]) != [own] for digest in (b"a", b"b", b"c"))

    @rule(digests=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3))
    def demote(self, digests: list[bytes]) -> None:
        found = [bool(self.blocks.match_prefix([digest])) for digest in digests]
        self.blocks.demote(digests)
        assert found == [bool(self.blocks.match_prefix([digest])) for digest in digests]

    @invariant()
    def empty_blocks_are_free_and_hold_nothing(self) -> None:
        used = {block for owner in self.owners for block in owner}
        cached = {block for block, _ in self.blocks.cached_blocks()}
        assert self.blocks.empty_blocks == TOTAL - len(used | cached)

    @invariant()
    def a_block_is_either_free_or_used(self) -> None:
        counts = [sum(owner.count(block) for owner in self.owners) for block in range(TOTAL)]
        assert [self.blocks.reference_count(block) for block in range(TOTAL)] == counts
        assert self.blocks.free_blocks == counts.count(0) == TOTAL - self.blocks.used_blocks

    def teardown(self) -> None:
        for owner in self.owners:
            self.blocks.release(owner)
        assert self.blocks.free_blocks == TOTAL


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    blocks = BlockPool(3)
    taken = blocks.allocate((), 3)
    assert taken is not None
    for block, digest in zip(taken, (b"a", b"b", b"c"), strict=True):
        blocks.cache(block, digest)
    blocks.release([taken[1]])
    blocks.release([taken[0]])
    blocks.release([taken[2]])
    blocks.allocate((), 1)
    assert blocks.match_prefix([b"b"]) == []
    assert blocks.match_prefix([b"a"]) == [taken[0]]


def test_a_block_that_is_not_cached_is_allocated_before_a_cached_one() -> None:
    blocks = BlockPool(2)
    taken = blocks.allocate((), 2)
    assert taken is not None
    blocks.cache(taken[0], b"a")
    blocks.release(taken)
    assert blocks.allocate((), 1) == [taken[1]]
    assert blocks.match_prefix([b"a"]) == [taken[0]]


def test_releasing_a_free_block_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot release block 0"):
        BlockPool(1).release([0])


def test_only_shared_blocks_are_unshared_and_only_used_ones_are_shared() -> None:
    blocks = BlockPool(2)
    taken = blocks.allocate((), 1)
    assert taken is not None
    with pytest.raises(ValueError, match="cannot unshare block 0: 1 reference it"):
        blocks.unshare(taken[0])
    with pytest.raises(ValueError, match="cannot share block 1"):
        blocks.add_reference([1])


def test_uncached_blocks_are_not_matched_unless_they_are_shared() -> None:
    blocks = BlockPool(4)
    own = blocks.allocate((), 2)
    assert own is not None
    for block, digest in zip(own, (b"a", b"b"), strict=True):
        blocks.cache(block, digest)
    shared = blocks.allocate(blocks.match_prefix((b"a",)), 0)
    assert shared == own[:1]
    assert blocks.uncache(own) == own[1:]
    assert blocks.match_prefix((b"a", b"b")) == own[:1]
    blocks.release(own)
    blocks.release(shared)
    assert blocks.used_blocks == 0


def test_the_cache_reaches_back_to_the_last_use_of_which_nothing_is_left() -> None:
    now_s = 100.0
    pool = BlockPool(2, lambda: now_s)
    # An empty cache has nothing from before its beginning.
    assert pool.evicted_used_at_s == 100.0
    for at_s, digest in ((110.0, b"a"), (120.0, b"b")):
        (block,) = pool.allocate((), 1) or [-1]
        pool.cache(block, digest)
        now_s = at_s
        pool.release([block])
    assert pool.evicted_used_at_s == 100.0
    reused = pool.allocate(pool.match_prefix([b"a"]), 0)
    assert reused is not None
    now_s = 130.0
    pool.release(reused)
    assert pool.allocate((), 1) is not None
    assert not pool.has_digest(b"b")
    # Only when the next use's blocks are evicted, none of this one can be left.
    assert pool.evicted_used_at_s == 100.0
    assert pool.allocate((), 1) is not None
    assert pool.evicted_used_at_s == 120.0


def test_a_prompt_whose_end_was_evicted_counts_as_cached() -> None:
    now_s = 100.0
    pool = BlockPool(4, lambda: now_s)
    cached_at = {110.0: [b"a", b"b", b"c"], 120.0: [b"d"]}
    for at_s, digests in cached_at.items():
        blocks = pool.allocate((), len(digests)) or []
        for block, digest in zip(blocks, digests, strict=True):
            pool.cache(block, digest)
        now_s = at_s
        pool.release(blocks)
    for _ in range(3):
        assert pool.evicted_used_at_s < 110.0
        pool.allocate((), 1)
    assert pool.match_prefix([b"a"]) == []
    pool.allocate((), 1)
    assert pool.evicted_used_at_s == 110.0


def test_a_forgotten_cache_reaches_back_to_now() -> None:
    now_s = 100.0
    pool = BlockPool(2, lambda: now_s)
    now_s = 150.0
    pool.forget_cached()
    assert pool.evicted_used_at_s == 150.0


def cached_in_order(pool: BlockPool, digests: list[bytes]) -> None:
    """Have each digest cached in a free block, the first one used least recently."""
    for digest in digests:
        (block,) = pool.allocate((), 1) or [-1]
        pool.cache(block, digest)
        pool.release([block])


def test_a_prefix_that_was_touched_is_evicted_after_what_was_used_before_that() -> None:
    now_s = 10.0
    pool = BlockPool(4, lambda: now_s)
    cached_in_order(pool, [b"a", b"b", b"c", b"d"])
    now_s = 20.0
    # Only the cached beginning counts, and its last block goes first.
    pool.touch([b"a", b"b", b"missing", b"c"])
    evicted = []
    for _ in range(4):
        pool.allocate((), 1)
        evicted += [digest for _, digest in pool.take_evicted()]
    assert evicted == [b"c", b"d", b"b", b"a"]
    assert pool.evicted_used_at_s == 10.0


def test_a_touched_prefix_that_is_in_use_stays_used() -> None:
    pool = BlockPool(2)
    cached_in_order(pool, [b"a"])
    used = pool.allocate(pool.match_prefix([b"a"]), 0)
    pool.touch([b"a"])
    assert (pool.used_blocks, pool.free_blocks) == (1, 1)
    assert used is not None
    pool.release(used)
    assert pool.free_blocks == 2


def test_moved_blocks_are_evicted_first_also_if_there_were_empty_ones() -> None:
    pool = BlockPool(4)
    cached_in_order(pool, [b"a", b"b", b"c"])
    pool.demote([b"c"])
    assert pool.allocate((), 1) is not None
    assert pool.take_evicted() == []
    assert pool.allocate((), 1) is not None
    assert [digest for _, digest in pool.take_evicted()] == [b"c"]


def test_blocks_that_several_prompts_used_can_be_kept_over_a_sleep() -> None:
    pool = BlockPool(TOTAL)
    first = pool.allocate((), 3)
    assert first is not None
    for block, digest in zip(first, (b"system", b"a1", b"a2"), strict=True):
        pool.cache(block, digest)
    pool.release(first)
    assert pool.found_blocks(TOTAL) == []
    second = pool.allocate(pool.match_prefix([b"system", b"a1", b"b2"]), 1)
    assert second is not None
    pool.cache(second[2], b"b2")
    pool.release(second)
    kept = pool.found_blocks(TOTAL)
    assert [digest for _, digest in kept] == [b"system", b"a1"]
    assert pool.found_blocks(1) == kept[:1]
    pool.forget_cached()
    assert pool.match_prefix([b"system"]) == []
    pool.restore(kept)
    assert pool.match_prefix([b"system", b"a1", b"a2"]) == first[:2]
    assert (pool.used_blocks, pool.empty_blocks) == (0, TOTAL - 2)
    # The last of a prefix is evicted first, and what takes its place was not found yet.
    taken = pool.allocate((), TOTAL - 1)
    assert taken is not None
    assert pool.match_prefix([b"system", b"a1"]) == first[:1]
    pool.cache(first[1], b"c")
    pool.release(taken)
    assert pool.found_blocks(TOTAL) == kept[:1]


def test_a_kept_block_that_was_allocated_during_the_sleep_is_not_cached() -> None:
    pool = BlockPool(TOTAL)
    taken = pool.allocate((), 1)
    assert taken is not None
    pool.cache(taken[0], b"system")
    pool.release(taken)
    pool.release(pool.allocate(taken, 0) or [])
    kept = pool.found_blocks(TOTAL)
    pool.forget_cached()
    assert pool.allocate((), 1) == taken
    pool.restore(kept)
    assert pool.match_prefix([b"system"]) == []
    assert pool.used_blocks == 1

"""KV blocks: free xor held, holders counted, the least recently used prefix forgotten first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nodeagent.engine.kvcache.blocks import Blocks

TOTAL = 6


class BlocksMachine(RuleBasedStateMachine):
    """Takes, shares, publishes and releases at random against a plain model of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(TOTAL)
        self.owners: list[list[int]] = []

    @rule(fresh=st.integers(0, TOTAL + 1))
    def take_fresh(self, fresh: int) -> None:
        free = self.blocks.free
        taken = self.blocks.take((), fresh)
        assert (taken is None) == (fresh > free)
        if taken is None:
            assert self.blocks.free == free
        else:
            self.owners.append(taken)

    @rule(chain=st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=3), fresh=st.integers(0, 3))
    def take_remembered(self, chain: list[bytes], fresh: int) -> None:
        remembered = self.blocks.match(list(dict.fromkeys(chain)))
        held = self.blocks.held
        taken = self.blocks.take(remembered, fresh)
        if taken is None:
            assert self.blocks.held == held
        else:
            assert taken[: len(remembered)] == remembered
            self.owners.append(taken)

    @rule(data=st.data(), digest=st.sampled_from([b"a", b"b", b"c"]))
    def publish(self, data: st.DataObject, digest: bytes) -> None:
        held = sorted({block for owner in self.owners for block in owner})
        if held:
            block = data.draw(st.sampled_from(held))
            named = {d for d in (b"a", b"b", b"c") if self.blocks.match([d]) == [block]}
            self.blocks.publish(block, digest)
            # A block keeps its first name, and a name its first block.
            assert bool(self.blocks.match([digest])) or named

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            index = data.draw(st.integers(0, len(self.owners) - 1))
            self.blocks.release(self.owners.pop(index))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            index = data.draw(st.integers(0, len(self.owners) - 1))
            self.owners.append(self.blocks.share(self.owners[index]))

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Whoever writes to a block that others hold parts from it first."""
        owner = data.draw(st.sampled_from(self.owners)) if self.owners else []
        at = data.draw(st.integers(0, len(owner) - 1)) if owner else -1
        if at < 0 or self.blocks.holders(owner[at]) == 1:
            return
        free, others = self.blocks.free, self.blocks.holders(owner[at]) - 1
        own = self.blocks.part(owner[at])
        assert (own is None) == (free == 0)
        if own is not None:
            assert self.blocks.holders(owner[at]) == others
            owner[at] = own
            assert self.blocks.holders(own) == 1
            assert all(self.blocks.match([digest]) != [own] for digest in (b"a", b"b", b"c"))

    @invariant()
    def a_block_is_free_xor_held(self) -> None:
        counts = [sum(owner.count(block) for owner in self.owners) for block in range(TOTAL)]
        assert [self.blocks.holders(block) for block in range(TOTAL)] == counts
        assert self.blocks.free == counts.count(0) == TOTAL - self.blocks.held

    def teardown(self) -> None:
        for owner in self.owners:
            self.blocks.release(owner)
        assert self.blocks.free == TOTAL


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    blocks = Blocks(3)
    taken = blocks.take((), 3)
    assert taken is not None
    for block, digest in zip(taken, (b"a", b"b", b"c"), strict=True):
        blocks.publish(block, digest)
    blocks.release([taken[1]])
    blocks.release([taken[0]])
    blocks.release([taken[2]])
    blocks.take((), 1)
    assert blocks.match([b"b"]) == []
    assert blocks.match([b"a"]) == [taken[0]]


def test_a_block_that_remembers_nothing_goes_before_a_remembered_one() -> None:
    blocks = Blocks(2)
    taken = blocks.take((), 2)
    assert taken is not None
    blocks.publish(taken[0], b"a")
    blocks.release(taken)
    assert blocks.take((), 1) == [taken[1]]
    assert blocks.match([b"a"]) == [taken[0]]


def test_releasing_what_nobody_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot release block 0"):
        Blocks(1).release([0])


def test_nobody_parts_from_what_is_its_own_and_shares_what_nobody_holds() -> None:
    blocks = Blocks(2)
    taken = blocks.take((), 1)
    assert taken is not None
    with pytest.raises(ValueError, match="cannot part from block 0: 1 hold it"):
        blocks.part(taken[0])
    with pytest.raises(ValueError, match="cannot share block 1"):
        blocks.share([1])


def test_what_is_forgotten_is_found_no_more_unless_another_holds_it() -> None:
    blocks = Blocks(4)
    mine = blocks.take((), 2)
    assert mine is not None
    for block, digest in zip(mine, (b"a", b"b"), strict=True):
        blocks.publish(block, digest)
    shared = blocks.take(blocks.match((b"a",)), 0)
    assert shared == mine[:1]
    assert blocks.forget(mine) == mine[1:]
    assert blocks.match((b"a", b"b")) == mine[:1]
    blocks.release(mine)
    blocks.release(shared)
    assert blocks.held == 0

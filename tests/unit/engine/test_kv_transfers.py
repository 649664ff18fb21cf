"""What transfers hold on the device: exact, bounded, and let go of in every case."""

import hashlib
import tracemalloc
from collections.abc import Sequence
from typing import cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from nodeagent.engine.core.kv_transfers import HeldPrefix, KvTransfers, OutgoingBlocks
from nodeagent.engine.core.step import DroppedModel, EngineCore, WakenedExecutor
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence as TokenSequence
from nodeagent.engine.scheduler.sequence import StopConditions

TOTAL = 12


class Memory:
    """Blocks of one number each."""

    can_copy_beside_steps = True

    def __init__(self, total: int) -> None:
        self.rows = torch.zeros(total, 1)

    def read_blocks(self, blocks: Sequence[int], out: Tensor | None = None) -> Tensor:
        return self.rows[list(blocks)]

    def write_blocks(self, blocks: Sequence[int], contents: Tensor) -> None:
        self.rows[list(blocks)] = contents


def digest(name: str, number: int) -> bytes:
    return hashlib.sha256(f"{name}{number}".encode()).digest()


def a_sequence(pool: BlockPool, number: int, blocks: int) -> TokenSequence:
    """Return a sequence with its blocks, of which none is computed."""
    tokens = [number] * (blocks * BLOCK_TOKENS)
    sequence = TokenSequence(number, tokens, StopConditions(1, frozenset()))
    allocated = pool.allocate((), blocks)
    assert allocated is not None
    sequence.blocks = allocated
    return sequence


class TransferMachine(RuleBasedStateMachine):
    """Opens, computes, reads, stores and closes transfers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.memory = BlockPool(TOTAL), Memory(TOTAL)
        self.transfers = KvTransfers(self.pool, self.memory, None)
        self.sequences: dict[int, TokenSequence] = {}
        self.sent: dict[int, int] = {}
        self.waiting: dict[str, int] = {}
        self.count = 0

    @rule(blocks=st.integers(1, 4), first=st.integers(0, 2))
    def open_outgoing(self, blocks: int, first: int) -> None:
        if self.pool.free_blocks < blocks or first >= blocks:
            return
        self.count += 1
        sequence = self.sequences[self.count] = a_sequence(self.pool, self.count, blocks)
        for block in sequence.blocks:
            self.memory.rows[block] = block
        self.sent[self.count] = first
        self.transfers.open_outgoing(
            self.count, OutgoingBlocks(first, blocks, lambda computed, began_s: None)
        )

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        if self.sequences:
            sequence = self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]
            sequence.published_blocks = data.draw(
                st.integers(sequence.published_blocks, len(sequence.blocks))
            )
            self.transfers.hold_computed(sequence)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if self.sequences:
            number = data.draw(st.sampled_from(sorted(self.sequences)))
            contents = self.transfers.read_outgoing(number, 1)
            if contents is not None:
                block = self.sequences[number].blocks[self.sent[number]]
                assert contents.tolist() == [[block]]
                self.sent[number] += 1

    @rule(data=st.data(), first=st.booleans())
    def end_outgoing(self, data: st.DataObject, first: bool) -> None:
        """The sequence may end before the transfer or after it."""
        if self.sequences:
            number = data.draw(st.sampled_from(sorted(self.sequences)))
            sequence = self.sequences.pop(number)
            if first:
                self.transfers.close_outgoing(number)
            self.pool.release(sequence.blocks)
            self.transfers.close_outgoing(number)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A sequence may fail that is sent, and one that uses blocks which arrived."""
        if self.sequences:
            number = data.draw(st.sampled_from(sorted(self.sequences)))
            sequence = self.sequences.pop(number)
            arrived = self.pool.match_prefix([digest("a", 0)])
            blocks = [*sequence.blocks, *(self.pool.allocate(arrived, 0) or ())]
            self.transfers.let_go_of(number, blocks)
            assert self.pool.uncache(blocks) == blocks
            self.pool.release(blocks)

    @rule(name=st.sampled_from("abc"))
    def open_incoming(self, name: str) -> None:
        if name not in self.waiting:
            held = self.transfers.open_incoming(name, [digest(name, n) for n in range(4)])
            self.waiting[name] = held.on_device

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 3))
    def store(self, name: str, count: int) -> None:
        first = self.waiting.get(name, 0)
        digests = [digest(name, n) for n in range(first, min(4, first + count))]
        if not digests:
            return
        free = self.pool.free_blocks
        contents = torch.full((len(digests), 1), float(ord(name)))
        if self.transfers.store_incoming(name, digests, contents):
            assert name in self.waiting
            self.waiting[name] = first + len(digests)
            blocks = self.pool.match_prefix([digest(name, n) for n in range(first, first + 1)])
            assert self.memory.rows[blocks[0]].item() == ord(name)
            assert self.pool.free_blocks >= len(self.waiting)
        else:
            self.waiting.pop(name, None)
            assert self.pool.free_blocks >= free

    @rule(name=st.sampled_from("abc"), wrong=st.booleans())
    def close_incoming(self, name: str, wrong: bool) -> None:
        stored = self.waiting.pop(name, 0)
        self.transfers.close_incoming(name, is_wrong=wrong)
        assert stored >= 0

    @invariant()
    def nothing_is_used_but_what_is_open(self) -> None:
        sequences = sum(len(sequence.blocks) for sequence in self.sequences.values())
        assert self.pool.used_blocks <= sequences + self.transfers.held_blocks
        if not self.sequences and not self.waiting:
            assert self.transfers.held_blocks == self.pool.used_blocks == 0

    def teardown(self) -> None:
        for name in list(self.waiting):
            self.transfers.close_incoming(name)
        for number, sequence in self.sequences.items():
            self.pool.release(sequence.blocks)
            self.transfers.close_outgoing(number)
        assert self.pool.used_blocks == 0


TransferTest = TransferMachine.TestCase
TransferTest.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_wrong_blocks_are_forgotten_and_others_stay() -> None:
    pool = BlockPool(TOTAL)
    transfers = KvTransfers(pool, Memory(TOTAL), None)
    good, bad = ([digest(name, n) for n in range(3)] for name in "gb")
    for name, digests in (("good", good), ("bad", bad)):
        assert transfers.open_incoming(name, digests) == HeldPrefix(0, 0)
        assert transfers.store_incoming(name, digests, torch.zeros(3, 1))
    transfers.close_incoming("good")
    transfers.close_incoming("bad", is_wrong=True)
    assert (len(pool.match_prefix(good)), len(pool.match_prefix(bad))) == (3, 0)
    assert pool.used_blocks == 0


def test_blocks_are_found_once_they_are_written_and_not_before() -> None:
    pool, memory = BlockPool(TOTAL), Memory(TOTAL)
    transfers = KvTransfers(pool, memory, None)
    digests, contents = [digest("x", n) for n in range(4)], torch.arange(4.0).view(4, 1)
    transfers.open_incoming("first", ())
    assert transfers.store_incoming("first", digests[:1], contents[:1])
    transfers.open_incoming("t", digests[1:])
    writing = transfers.open_writing("t", digests)
    assert writing is not None
    assert (writing.new, len(writing.fresh), transfers.held_blocks) == ([1, 2, 3], 3, 5)
    transfers.write_held(writing, contents)
    assert (len(pool.match_prefix(digests)), transfers.received_blocks_total) == (1, 1)
    # What is being written is not let go of.
    assert transfers.let_go_of_prefix()
    assert not transfers.let_go_of_prefix()
    assert transfers.held_blocks == 4
    transfers.close_writing("t", 4)
    transfers.close_writing("t", 4)
    found = pool.match_prefix(digests)
    assert memory.rows[found].tolist() == contents.tolist()
    assert (transfers.received_blocks_total, transfers.held_blocks) == (4, 4)
    for name in ("first", "t"):
        transfers.close_incoming(name)
    assert transfers.held_blocks == pool.used_blocks == 0


def test_blocks_that_were_not_written_or_not_awaited_are_let_go_of() -> None:
    pool = BlockPool(TOTAL)
    transfers = KvTransfers(pool, Memory(TOTAL), None)
    digests = [digest("x", n) for n in range(3)]
    for is_written in (False, True):
        transfers.open_incoming("t", ())
        assert transfers.open_writing("t", digests) is not None
        if is_written:
            # The request is gone, and its blocks are still being written.
            transfers.close_incoming("t")
            assert transfers.held_blocks == pool.used_blocks == 3
        transfers.close_writing("t", 3 if is_written else 0)
        transfers.close_incoming("t")
        assert transfers.held_blocks == pool.used_blocks == 0
        assert pool.match_prefix(digests) == []
    assert transfers.open_writing("t", digests) is None


def test_of_blocks_held_ahead_those_that_were_written_are_found() -> None:
    pool, memory = BlockPool(TOTAL), Memory(TOTAL)
    transfers = KvTransfers(pool, memory, None)
    digests, contents = [digest("x", n) for n in range(8)], torch.arange(8.0).view(8, 1)
    transfers.open_incoming("first", ())
    assert transfers.store_incoming("first", digests[1:2], contents[1:2])
    transfers.open_incoming("t", ())
    runs = [transfers.open_writing("t", part) for part in (digests[:4], digests[4:])]
    assert transfers.held_blocks == 1 + 4 + 4
    for run, first in zip(runs, (0, 4), strict=True):
        assert run is not None
        for at in (0, 2):
            transfers.write_held(run, contents[first + at : first + at + 2], at)
    transfers.close_writing("t", 4)
    assert pool.match_prefix(digests)[3:4]
    assert len(pool.match_prefix(digests)) == 4
    # Of the second run one block is complete; the others are let go of.
    transfers.close_writing("t", 1)
    transfers.close_writing("t", 4)
    found = pool.match_prefix(digests)
    assert memory.rows[found].tolist() == contents[:5].tolist()
    assert (transfers.received_blocks_total, transfers.held_blocks) == (5, 6)
    for name in ("first", "t"):
        transfers.close_incoming(name)
    assert transfers.held_blocks == pool.used_blocks == 0


def test_blocks_to_be_sent_are_read_by_number_and_released_in_order() -> None:
    pool, memory = BlockPool(TOTAL), Memory(TOTAL)
    transfers, computed = KvTransfers(pool, memory, None), list[int]()
    sequence = a_sequence(pool, 1, 5)
    outgoing = OutgoingBlocks(1, 4, lambda blocks, began_s: computed.append(blocks))
    transfers.open_outgoing(1, outgoing)
    for published in (3, 5):
        sequence.published_blocks = published
        transfers.hold_computed(sequence)
    assert (computed, outgoing.numbers(1, 3)) == ([3, 4], sequence.blocks[1:4])
    assert outgoing.numbers(3, 5) == sequence.blocks[3:4]
    transfers.release_outgoing(1, 2)
    assert (outgoing.held, outgoing.numbers(2, 1)) == (sequence.blocks[3:4], sequence.blocks[2:3])
    assert (transfers.held_blocks, transfers.sent_blocks_total) == (1, 2)
    pool.release(sequence.blocks)
    transfers.close_outgoing(1)
    transfers.release_outgoing(1, 1)
    assert transfers.held_blocks == pool.used_blocks == 0


def test_transfers_are_counted_while_the_step_thread_closes_some() -> None:
    """The event loop counts them for each answer to `/metrics`."""
    pool = BlockPool(TOTAL)
    transfers = KvTransfers(pool, Memory(TOTAL), None)

    class ClosingOthers(OutgoingBlocks):
        """Blocks that are counted just as the step thread closes all transfers."""

        @property
        def held(self) -> list[int]:
            transfers._outgoing.clear()
            transfers._incoming.clear()
            return super().held

    transfers.open_outgoing(1, ClosingOthers(0, 2, lambda computed, began_s: None))
    transfers.open_outgoing(2, OutgoingBlocks(0, 2, lambda computed, began_s: None))
    assert transfers.counts()["kv_transfer_held_blocks"] == 0


def test_a_sleeping_engine_takes_no_blocks() -> None:
    """A copy that another replica sent ended it: there is no device to write to."""
    pool, memory = BlockPool(TOTAL), Memory(TOTAL)
    scheduler, model = BatchScheduler(StepLimits(16, 4), pool), cast(WakenedExecutor, memory)
    core = EngineCore(model, scheduler)
    transfers = core.kv_transfers
    digests, contents = [digest("x", n) for n in range(3)], torch.ones(3, 1)
    assert core.fall_asleep(0.0, 0) == DroppedModel(model, [])
    assert transfers.keep_blocks_max == 0
    transfers.keep(digests, contents)
    # Two requests began to wait before: nothing of them was in the engine.
    for transfer in ("read", "shared"):
        transfers.open_incoming(transfer, digests)
    assert not transfers.store_incoming("read", digests, contents)
    assert not transfers.store_shared("shared", digests, contents)
    assert (transfers.count_prefix(digests), transfers.held_blocks) == (0, 0)
    core.wake_up(model)
    assert transfers.keep_blocks_max == TOTAL
    transfers.keep(digests, contents)
    assert transfers.count_prefix(digests) == 3


def test_a_hundred_thousand_abandoned_transfers_leave_nothing() -> None:
    pool = BlockPool(TOTAL)
    transfers = KvTransfers(pool, Memory(TOTAL), None)
    digests = [digest("x", n) for n in range(3)]
    contents = torch.zeros(3, 1)

    def abandon(number: int) -> None:
        sequence = a_sequence(pool, number, 2)
        transfers.open_outgoing(number, OutgoingBlocks(0, 2, lambda computed, began_s: None))
        sequence.published_blocks = 2
        transfers.hold_computed(sequence)
        pool.release(sequence.blocks)
        held = transfers.open_incoming(str(number), digests).on_device
        assert transfers.store_incoming(str(number), digests[held:], contents[held:])
        assert transfers.held_blocks == 5
        transfers.close_outgoing(number)
        transfers.close_incoming(str(number))

    abandon(0)
    tracemalloc.start()
    try:
        for number in range(1, 1000):
            abandon(number)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for number in range(1000, 99_000):
            abandon(number)
        tracemalloc.start()
        for number in range(99_000, 100_000):
            abandon(number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.used_blocks == transfers.held_blocks == 0
    assert len(pool.cached_blocks()) <= TOTAL
    assert after < before + 100_000

"""Batching: the budget is kept, decodes never wait, nobody starves, everything is given back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.scheduler.batching import Batch, Batching, Chunk, Limits
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Finish, Sequence
from nodeagent.engine.scheduler.swap_or_recompute import Trade

BLOCKS = 8
STEPS_MAX = 3000


def make(blocks: int = BLOCKS, budget: int = 24, sequences: int = 4) -> Batching:
    return Batching(Limits(budget, sequences), Blocks(blocks))


def sequence(number: int, prompt: int, output: int, salt: bytes = b"", start: int = 0) -> Sequence:
    return Sequence(number, list(range(start, start + prompt)), Ending(output, frozenset()), salt)


def play(batching: Batching, batch: Batch, token: int = 7) -> list[Sequence]:
    """Do what the engine does after a step; return who finished."""
    finished = []
    for chunk in batch.chunks:
        batching.computed(chunk)
    for chunk in batch.chunks:
        if not chunk.samples:
            continue
        for one in (chunk.sequence, *batching.fork(chunk.sequence)):
            # Answers to one prompt go on differently.
            if one.append(token + one.number) is Finish.LENGTH:
                batching.remove(one)
                finished.append(one)
    return finished


def check(batching: Batching, batch: Batch, decoding: list[Sequence]) -> None:
    limits = batching.limits
    assert 0 < batch.tokens <= limits.batch_tokens_max
    assert sum(1 + len(s.followers) for s in batching.running) <= limits.sequences_max
    assert [s.number for s in batching.running] == sorted(s.number for s in batching.running)
    ran = [chunk.sequence for chunk in batch.chunks]
    assert len(set(map(id, ran))) == len(ran)
    # Every sequence that was decoding runs, unless it gave its blocks back.
    assert all(s in ran or s in batching.waiting for s in decoding)
    for chunk in batch.chunks:
        assert chunk.start == chunk.sequence.computed
        assert chunk.start + chunk.tokens <= len(chunk.sequence.blocks) * BLOCK_TOKENS
        # What is written is held by nobody else.
        written = range(
            chunk.start // BLOCK_TOKENS, -(-(chunk.start + chunk.tokens) // BLOCK_TOKENS)
        )
        assert all(batching.blocks.holders(chunk.sequence.blocks[at]) == 1 for at in written)
    assert len({block for _, block in batch.copies}) == len(batch.copies)
    counts: dict[int, int] = {}
    for held in batching.running:
        for block in held.blocks:
            counts[block] = counts.get(block, 0) + 1
    assert all(not s.blocks for s in batching.waiting)
    for block in range(batching.blocks.total):
        assert batching.blocks.holders(block) == counts.get(block, 0)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(1, 40),
            st.sampled_from([b"", b"x"]),
            st.integers(0, 6),
            st.integers(1, 4),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(5, 40),
)
def test_everyone_finishes_and_everything_is_given_back(
    asks: list[tuple[int, int, bytes, int, int]], budget: int
) -> None:
    batching = make(budget=budget)
    arriving = [
        (gap, answers(4 * number, count, prompt, output, salt))
        for number, (prompt, output, salt, gap, count) in enumerate(asks)
    ]
    finished: list[Sequence] = []
    for _ in range(STEPS_MAX):
        while arriving and (arriving[0][0] == 0 or not batching.busy):
            batching.submit(arriving.pop(0)[1])
        if arriving:
            arriving[0] = (arriving[0][0] - 1, arriving[0][1])
        decoding = [s for s in batching.running if s.decoding]
        oldest = min((*batching.running, *batching.waiting), key=lambda s: s.number)
        before = (oldest.computed, len(oldest.tokens))
        batch = batching.next_batch()
        check(batching, batch, decoding)
        done = play(batching, batch)
        finished += done
        if oldest.admitted and oldest not in done:
            assert (oldest.computed, len(oldest.tokens)) > before, "the oldest must always move"
        if not batching.busy and not arriving:
            break
    assert len(finished) == sum(count for *_, count in asks)
    assert all(s.output_tokens == s.ending.tokens_max for s in finished)
    assert batching.blocks.held == 0


def answers(number: int, count: int, prompt: int, output: int, salt: bytes = b"") -> Sequence:
    """The first of several sequences of one prompt, with the others."""
    first, *others = (sequence(number + at, prompt, output, salt) for at in range(count))
    first.followers = others
    return first


def test_several_answers_compute_their_prompt_once_and_share_its_blocks() -> None:
    batching = make(blocks=20, budget=64)
    first = answers(1, 3, 40, 5)
    everyone = [first, *first.followers]
    batching.submit(first)
    batch = batching.next_batch()
    assert batch.prefill_tokens == batch.tokens == 40
    play(batching, batch)
    assert batching.blocks.held == 3
    partial = first.blocks[2]
    batch = batching.next_batch()
    assert {chunk.sequence for chunk in batch.decodes} == set(everyone)
    # The last of them writes to the block itself; the others to copies.
    assert [source for source, _ in batch.copies] == [partial, partial]
    assert [s.blocks[2] for s in everyone] == [*(block for _, block in batch.copies), partial]
    assert len({tuple(s.blocks[:2]) for s in everyone}) == 1
    assert batching.blocks.held == 5
    play(batching, batch)
    assert not batching.next_batch().copies


def test_a_prompt_of_whole_blocks_is_shared_without_a_copy() -> None:
    batching = make(blocks=20, budget=64)
    batching.submit(answers(1, 2, 32, 5))
    play(batching, batching.next_batch())
    batch = batching.next_batch()
    assert not batch.copies
    assert batching.blocks.held == 4


def test_several_answers_are_seated_whole() -> None:
    batching = make(blocks=20, budget=64, sequences=4)
    batching.submit(answers(1, 3, 8, 5))
    batching.submit(answers(11, 2, 8, 5))
    assert len(batching.next_batch().prefills) == 1
    assert [s.number for s in batching.waiting] == [11]


def test_who_gives_way_before_it_wrote_needs_no_copy() -> None:
    batching = make(blocks=4, budget=64)
    batching.submit(answers(1, 4, 40, 20))
    play(batching, batching.next_batch())
    # Three blocks and one to spare: one copy, and then the last two give way.
    batch = batching.next_batch()
    assert len(batch.copies) == 1
    assert batching.preemptions == 2
    assert [s.number for s in batching.waiting] == [3, 4]


def test_a_long_prompt_comes_in_chunks_between_decodes() -> None:
    batching = make(blocks=20, budget=24)
    short = sequence(1, 4, 50)
    batching.submit(short)
    play(batching, batching.next_batch())
    batching.submit(sequence(2, 100, 5))
    for _ in range(4):
        batch = batching.next_batch()
        assert [chunk.sequence for chunk in batch.decodes] == [short]
        assert batch.tokens == 24
        play(batching, batch)


def test_a_second_prompt_finds_the_first_ones_blocks_under_the_same_salt_only() -> None:
    batching = make(blocks=20, budget=64)
    for number, salt, cached in ((1, b"a", 0), (2, b"a", 32), (3, b"b", 0)):
        one = sequence(number, 40, 1, salt)
        batching.submit(one)
        play(batching, batching.next_batch())
        assert one.cached_tokens == cached
    # A prompt of whole blocks still computes its last one: its logits are what is wanted.
    whole = sequence(4, 32, 1, b"a")
    batching.submit(whole)
    play(batching, batching.next_batch())
    assert whole.cached_tokens == 16


def test_the_youngest_gives_way_and_comes_back_whole() -> None:
    batching = make(blocks=4, budget=64)
    old, young = sequence(1, 30, 20), sequence(2, 30, 20, start=100)
    batching.submit(old)
    batching.submit(young)
    while old in batching.running or not batching.preemptions:
        play(batching, batching.next_batch())
    assert batching.preemptions == 1
    assert old.output_tokens == 20
    while batching.busy:
        play(batching, batching.next_batch())
    assert young.output_tokens == 20
    assert batching.blocks.held == 0


def test_cancelling_gives_the_blocks_back_at_once() -> None:
    batching = make()
    running, waiting = sequence(1, 100, 5), sequence(2, 100, 5)
    batching.submit(running)
    batching.next_batch()
    batching.submit(waiting)
    batching.remove(waiting)
    batching.remove(running)
    assert not batching.busy
    assert batching.blocks.held == 0


def test_limits_that_would_starve_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot batch 4 tokens for 4 sequences"):
        Limits(4, 4)


def test_a_stop_token_ends_the_sequence_and_is_not_kept() -> None:
    one = Sequence(1, [5, 6], Ending(3, frozenset({2})))
    assert one.append(9) is None
    assert one.append(2) is Finish.STOP
    assert one.tokens == [5, 6, 9]


def test_the_chain_depends_on_salt_and_on_all_that_came_before() -> None:
    one, other = sequence(1, 32, 1), sequence(2, 32, 1, start=1)
    salted = sequence(3, 32, 1, b"s")
    assert one.chain(2)[1] != other.chain(2)[1]
    assert one.chain(1) != salted.chain(1)
    changed = Sequence(4, [99, *range(1, 32)], Ending(1, frozenset()))
    assert changed.chain(2)[1] != one.chain(2)[1]


class Tiered:
    """Batching over a device and a bounded tier below it, of which only the digests are kept."""

    def __init__(self, blocks: int, below_max: int, block_s: float, token_s: float) -> None:
        self.below: dict[bytes, None] = {}
        self.batching = Batching(Limits(24, 4), Blocks(blocks), below=self.below)
        self.device: dict[int, bytes] = {}
        self.restored = 0
        self._below_max = below_max
        self._block_s, self._token_s = block_s, token_s

    def step(self) -> list[Sequence]:
        batch = self.batching.next_batch()
        # What is wanted is taken out before what is kept pushes it out.
        assert all(digest in self.below for _, digest in batch.restores)
        for block, digest in batch.evicted:
            assert self.device[block] == digest
            self.below[digest] = None
        while len(self.below) > self._below_max:
            del self.below[next(iter(self.below))]
        self.device.update(batch.restores)
        if batch.restores:
            self.restored += len(batch.restores)
            self.batching.trade.note(len(batch.restores), len(batch.restores) * self._block_s)
        for chunk in batch.chunks:
            self._compute(chunk)
        finished = play(self.batching, batch)
        self.batching.pace.note(batch.prefill_tokens, 0, batch.prefill_tokens * self._token_s)
        return finished

    def _compute(self, chunk: Chunk) -> None:
        """Nothing is read but what was computed or brought back for just these tokens."""
        one = chunk.sequence
        chain = one.chain((chunk.start + chunk.tokens) // BLOCK_TOKENS)
        for index, digest in enumerate(chain):
            if (index + 1) * BLOCK_TOKENS <= chunk.start:
                assert self.device[one.blocks[index]] == digest
            else:
                self.device[one.blocks[index]] = digest


ASKS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 50), st.integers(0, 2)), min_size=2, max_size=8
)


@settings(deadline=None, max_examples=60)
@given(ASKS, st.integers(0, 40), st.sampled_from([0.001, 0.1, 10.0]))
def test_whoever_gives_way_comes_back_whole_by_whichever_way(
    asks: list[tuple[int, int, int]], below_max: int, block_s: float
) -> None:
    tiers = Tiered(BLOCKS, below_max, block_s, token_s=0.01)
    batching = tiers.batching
    for number, (prompt, output, start) in enumerate(asks):
        batching.submit(sequence(number, prompt, output, start=start))
    finished: list[Sequence] = []
    for _ in range(STEPS_MAX):
        if not batching.busy:
            break
        finished += tiers.step()
        held = sum(batching.blocks.holders(block) > 0 for block in range(BLOCKS))
        assert held + batching.blocks.free == BLOCKS
    assert len(finished) == len(asks)
    assert all(s.output_tokens == s.ending.tokens_max for s in finished)
    assert batching.blocks.held == 0


@pytest.mark.parametrize(("block_s", "brought"), [(0.001, True), (10.0, False)])
def test_who_gave_way_is_brought_back_where_that_is_faster(block_s: float, brought: bool) -> None:
    tiers = Tiered(8, 99, block_s, token_s=0.01)
    # Measured before: what a copy takes, and what a token takes.
    tiers.batching.trade.note(1, block_s)
    tiers.batching.pace.note(16, 0, 0.16)
    for number in range(2):
        tiers.batching.submit(sequence(number, 40, 70, start=100 * number))
    while tiers.batching.busy:
        tiers.step()
    assert tiers.batching.preemptions > 0
    assert (tiers.restored > 0) == brought
    kept, lost = tiers.batching.kept_tokens, tiers.batching.lost_tokens
    assert (kept > lost) == brought


def test_a_price_that_was_too_high_is_asked_again() -> None:
    trade = Trade()
    assert trade.pays(0.001)
    trade.note(4, 4 * 0.02)
    assert trade.pays(0.0)
    answers = [trade.pays(0.001) for _ in range(20)]
    assert answers[0] is False
    assert answers[-1] is True

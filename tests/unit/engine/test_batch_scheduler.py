"""The batch scheduler keeps its token budget, serves every sequence and releases every block."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.kvcache.swap_or_recompute import SwapOrRecompute
from nodeagent.engine.scheduler.batch import Batch, BatchChunk, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import PRIORITY_LOWEST, SchedulingParams
from nodeagent.engine.scheduler.prefill_budget import PrefillBudget
from nodeagent.engine.scheduler.sequence import FinishReason, Sequence, StopConditions

BLOCKS = 8
STEPS_MAX = 3000


def make(blocks: int = BLOCKS, budget: int = 24, sequences: int = 4) -> BatchScheduler:
    return BatchScheduler(StepLimits(budget, sequences), BlockPool(blocks))


def sequence(number: int, prompt: int, output: int, salt: bytes = b"", start: int = 0) -> Sequence:
    return Sequence(
        number, list(range(start, start + prompt)), StopConditions(output, frozenset()), salt
    )


def play(scheduler: BatchScheduler, batch: Batch, token: int = 7) -> list[Sequence]:
    """Do what the engine does after a step; return the sequences that finished."""
    finished = []
    for chunk in batch.chunks:
        scheduler.mark_computed(chunk)
    for chunk in batch.chunks:
        if not chunk.samples:
            continue
        for sampled in (chunk.sequence, *scheduler.fork(chunk.sequence)):
            # The forks of a prompt continue with different tokens.
            if sampled.append(token + sampled.number) is FinishReason.LENGTH:
                scheduler.remove(sampled)
                finished.append(sampled)
    return finished


def check(scheduler: BatchScheduler, batch: Batch, decoding: list[Sequence]) -> None:
    limits = scheduler.limits
    assert 0 < batch.tokens <= limits.batch_tokens_max
    assert sum(1 + len(s.forks) for s in scheduler.running) <= limits.sequences_max
    assert [s.number for s in scheduler.running] == sorted(s.number for s in scheduler.running)
    ran = [chunk.sequence for chunk in batch.chunks]
    assert len(set(map(id, ran))) == len(ran)
    # Every sequence that was decoding runs, unless it was preempted.
    assert all(s in ran or s in scheduler.waiting for s in decoding)
    for chunk in batch.chunks:
        assert chunk.start == chunk.sequence.computed_tokens
        assert chunk.start + chunk.tokens <= len(chunk.sequence.blocks) * BLOCK_TOKENS
        # Blocks that are written have no other reference.
        written = range(
            chunk.start // BLOCK_TOKENS, -(-(chunk.start + chunk.tokens) // BLOCK_TOKENS)
        )
        assert all(scheduler.pool.reference_count(chunk.sequence.blocks[at]) == 1 for at in written)
    assert len({block for _, block in batch.copies}) == len(batch.copies)
    counts: dict[int, int] = {}
    for running in scheduler.running:
        for block in running.blocks:
            counts[block] = counts.get(block, 0) + 1
    assert all(not s.blocks for s in scheduler.waiting)
    for block in range(scheduler.pool.total):
        assert scheduler.pool.reference_count(block) == counts.get(block, 0)


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
def test_every_sequence_finishes_and_all_blocks_are_released(
    requests: list[tuple[int, int, bytes, int, int]], budget: int
) -> None:
    scheduler = make(budget=budget)
    arriving = [
        (gap, answers(4 * number, count, prompt, output, salt))
        for number, (prompt, output, salt, gap, count) in enumerate(requests)
    ]
    finished: list[Sequence] = []
    for _ in range(STEPS_MAX):
        while arriving and (arriving[0][0] == 0 or not scheduler.has_work):
            scheduler.submit(arriving.pop(0)[1])
        if arriving:
            arriving[0] = (arriving[0][0] - 1, arriving[0][1])
        decoding = [s for s in scheduler.running if s.is_decoding]
        oldest = min((*scheduler.running, *scheduler.waiting), key=lambda s: s.number)
        before = (oldest.computed_tokens, len(oldest.tokens))
        batch = scheduler.next_batch()
        check(scheduler, batch, decoding)
        done = play(scheduler, batch)
        finished += done
        if oldest.was_admitted and oldest not in done:
            assert (oldest.computed_tokens, len(oldest.tokens)) > before, (
                "the oldest must always make progress"
            )
        if not scheduler.has_work and not arriving:
            break
    assert len(finished) == sum(count for *_, count in requests)
    assert all(s.output_tokens == s.stop_conditions.tokens_max for s in finished)
    assert scheduler.pool.used_blocks == 0


def answers(number: int, count: int, prompt: int, output: int, salt: bytes = b"") -> Sequence:
    """Return the first of `count` sequences with the same prompt; the others are its forks."""
    first, *others = (sequence(number + at, prompt, output, salt) for at in range(count))
    first.forks = others
    return first


def test_forks_share_the_blocks_of_a_prompt_computed_once() -> None:
    scheduler = make(blocks=20, budget=64)
    first = answers(1, 3, 40, 5)
    all_answers = [first, *first.forks]
    scheduler.submit(first)
    batch = scheduler.next_batch()
    assert batch.prefill_tokens == batch.tokens == 40
    play(scheduler, batch)
    assert scheduler.pool.used_blocks == 3
    partial = first.blocks[2]
    batch = scheduler.next_batch()
    assert {chunk.sequence for chunk in batch.decodes} == set(all_answers)
    # The last one writes to the shared block itself, the others to copies.
    assert [source for source, _ in batch.copies] == [partial, partial]
    assert [s.blocks[2] for s in all_answers] == [*(block for _, block in batch.copies), partial]
    assert len({tuple(s.blocks[:2]) for s in all_answers}) == 1
    assert scheduler.pool.used_blocks == 5
    play(scheduler, batch)
    assert not scheduler.next_batch().copies


def test_a_prompt_of_full_blocks_is_shared_without_a_copy() -> None:
    scheduler = make(blocks=20, budget=64)
    scheduler.submit(answers(1, 2, 32, 5))
    play(scheduler, scheduler.next_batch())
    batch = scheduler.next_batch()
    assert not batch.copies
    assert scheduler.pool.used_blocks == 4


def test_a_request_is_admitted_with_slots_for_all_its_forks() -> None:
    scheduler = make(blocks=20, budget=64, sequences=4)
    scheduler.submit(answers(1, 3, 8, 5))
    scheduler.submit(answers(11, 2, 8, 5))
    assert len(scheduler.next_batch().prefills) == 1
    assert [s.number for s in scheduler.waiting] == [11]


def test_a_fork_preempted_before_it_writes_needs_no_copy() -> None:
    scheduler = make(blocks=4, budget=64)
    scheduler.submit(answers(1, 4, 40, 20))
    play(scheduler, scheduler.next_batch())
    # Three blocks are used and one is free: one copy, then the last two are preempted.
    batch = scheduler.next_batch()
    assert len(batch.copies) == 1
    assert scheduler.queues.preemptions == 2
    assert [s.number for s in scheduler.waiting] == [3, 4]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    scheduler = make(blocks=20, budget=24)
    short = sequence(1, 4, 50)
    scheduler.submit(short)
    play(scheduler, scheduler.next_batch())
    scheduler.submit(sequence(2, 100, 5))
    for _ in range(4):
        batch = scheduler.next_batch()
        assert [chunk.sequence for chunk in batch.decodes] == [short]
        assert batch.tokens == 24
        play(scheduler, batch)


def test_the_first_token_of_a_prompt_does_not_wait_for_the_next_prompt() -> None:
    """Prompts that came together were computed in one step, and got first tokens at its end."""
    scheduler = make(blocks=80, budget=256, sequences=8)
    budget = scheduler.prefill_budget = PrefillBudget(0.25)
    budget.record_step(100, 0, 0.1)
    budget.record_step(0, 1, 0.005)
    for number in (1, 2, 3):
        scheduler.submit(sequence(number, 100, 9, start=200 * number))
    for number in (4, 5):
        scheduler.submit(sequence(number, 15, 9, start=200 * number))
    ended = []
    for _ in range(4):
        batch = scheduler.next_batch()
        ended.append([chunk.sequence.number for chunk in batch.prefills if chunk.samples])
        play(scheduler, batch)
    assert ended == [[1], [2], [3], [4, 5]]


def test_a_step_does_not_end_early_for_the_first_token_of_a_sequence_that_yields() -> None:
    scheduler = make(blocks=80, budget=256, sequences=8)
    budget = scheduler.prefill_budget = PrefillBudget(5.0)
    budget.record_step(100, 0, 0.1)
    budget.record_step(0, 1, 0.005)
    for number in (1, 2):
        item = sequence(number, 100, 9, start=200 * number)
        item.scheduling = SchedulingParams(priority=PRIORITY_LOWEST)
        scheduler.submit(item)
    assert [chunk.tokens for chunk in scheduler.next_batch().prefills] == [100, 100]


def test_cached_blocks_are_reused_only_under_the_same_salt() -> None:
    scheduler = make(blocks=20, budget=64)
    for number, salt, cached in ((1, b"a", 0), (2, b"a", 32), (3, b"b", 0)):
        submitted = sequence(number, 40, 1, salt)
        scheduler.submit(submitted)
        play(scheduler, scheduler.next_batch())
        assert submitted.cached_tokens == cached
    # A prompt of full blocks still computes its last block, because its logits are needed.
    whole = sequence(4, 32, 1, b"a")
    scheduler.submit(whole)
    play(scheduler, scheduler.next_batch())
    assert whole.cached_tokens == 16


def test_what_a_waiting_prompt_has_cached_outlives_what_was_used_later() -> None:
    scheduler = make(blocks=9, budget=128)
    for number, salt in ((1, b"a"), (2, b"b")):
        scheduler.submit(sequence(number, 64, 1, salt))
        play(scheduler, scheduler.next_batch())
    before, waiting = sequence(3, 60, 1, b"c"), sequence(4, 64, 1, b"a")
    scheduler.submit(before)
    scheduler.submit(waiting)
    while scheduler.has_work:
        play(scheduler, scheduler.next_batch())
    assert waiting.cached_tokens == 48


def test_what_a_waiting_prompt_has_cached_outlives_prompts_that_end_while_it_waits() -> None:
    scheduler = make(blocks=9, budget=128, sequences=1)
    scheduler.submit(sequence(1, 64, 1, b"a"))
    play(scheduler, scheduler.next_batch())
    waiting = sequence(4, 64, 1, b"a")
    for submitted in (sequence(2, 60, 1, b"b"), sequence(3, 60, 1, b"c"), waiting):
        scheduler.submit(submitted)
    while scheduler.has_work:
        play(scheduler, scheduler.next_batch())
    assert waiting.cached_tokens == 48


def test_the_last_sequence_is_preempted_and_resumes() -> None:
    scheduler = make(blocks=4, budget=64)
    old, young = sequence(1, 30, 20), sequence(2, 30, 20, start=100)
    scheduler.submit(old)
    scheduler.submit(young)
    while old in scheduler.running or not scheduler.queues.preemptions:
        play(scheduler, scheduler.next_batch())
    assert scheduler.queues.preemptions == 1
    assert old.output_tokens == 20
    while scheduler.has_work:
        play(scheduler, scheduler.next_batch())
    assert young.output_tokens == 20
    assert scheduler.pool.used_blocks == 0


def test_a_step_keeps_its_budget_where_a_prompt_preempts_a_sequence_that_yields() -> None:
    """The decode that yielded anyway was given to the prompt a second time."""
    scheduler = make(budget=3, sequences=1)
    item = sequence(1, 2, 9)
    item.scheduling = SchedulingParams(priority=PRIORITY_LOWEST)
    scheduler.submit(item)
    play(scheduler, scheduler.next_batch())
    scheduler.submit(sequence(2, 20, 2))
    batch = scheduler.next_batch()
    assert [chunk.sequence.number for chunk in batch.chunks] == [2]
    assert batch.tokens == 3
    assert scheduler.queues.preemptions == 1


def test_no_sequence_is_preempted_for_blocks_that_others_use_too() -> None:
    """It was admitted again at once, in each step, and the other tenant got none of its blocks."""
    scheduler = make(blocks=12, budget=256)
    tenants = {1: b"a", 2: b"a", 3: b"b"}
    params = {number: SchedulingParams(tenant=tenant) for number, tenant in tenants.items()}
    for number in (1, 2):
        sharing = sequence(number, 128, 14)
        sharing.scheduling = params[number]
        scheduler.submit(sharing)
        play(scheduler, scheduler.next_batch())
    assert scheduler.pool.used_blocks == 10
    other = sequence(3, 80, 2, b"b")
    other.scheduling = params[3]
    scheduler.submit(other)
    finished: list[Sequence] = []
    while scheduler.has_work:
        finished += play(scheduler, scheduler.next_batch())
    assert [one.number for one in finished] == [1, 2, 3]
    assert scheduler.queues.preemptions == 0


def test_removing_a_sequence_releases_its_blocks() -> None:
    scheduler = make()
    running, waiting = sequence(1, 100, 5), sequence(2, 100, 5)
    scheduler.submit(running)
    scheduler.next_batch()
    scheduler.submit(waiting)
    scheduler.remove(waiting)
    scheduler.remove(running)
    assert not scheduler.has_work
    assert scheduler.pool.used_blocks == 0


def test_limits_that_would_starve_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot batch 4 tokens for 4 sequences"):
        StepLimits(4, 4)


def test_a_stop_token_ends_the_sequence_and_is_not_appended() -> None:
    ending = Sequence(1, [5, 6], StopConditions(3, frozenset({2})))
    assert ending.append(9) is None
    assert ending.append(2) is FinishReason.STOP
    assert ending.tokens == [5, 6, 9]


def test_block_digests_depend_on_the_salt_and_on_all_earlier_tokens() -> None:
    plain, other = sequence(1, 32, 1), sequence(2, 32, 1, start=1)
    salted = sequence(3, 32, 1, b"s")
    assert plain.block_digests(2)[1] != other.block_digests(2)[1]
    assert plain.block_digests(1) != salted.block_digests(1)
    changed = Sequence(4, [99, *range(1, 32)], StopConditions(1, frozenset()))
    assert changed.block_digests(2)[1] != plain.block_digests(2)[1]


class Tiered:
    """A scheduler over a device and a bounded tier lower_tier it; only digests are stored."""

    def __init__(self, blocks: int, lower_tier_max: int, block_s: float, token_s: float) -> None:
        self.lower_tier: dict[bytes, None] = {}
        self.scheduler = BatchScheduler(
            StepLimits(24, 4), BlockPool(blocks), lower_tiers=self.lower_tier
        )
        self.device: dict[int, bytes] = {}
        self.restored = 0
        self._lower_tier_max = lower_tier_max
        self._block_s, self._token_s = block_s, token_s

    def step(self) -> list[Sequence]:
        batch = self.scheduler.next_batch()
        # Restores are read before the evicted blocks are saved, which may push them out.
        assert all(digest in self.lower_tier for _, digest in batch.restores)
        for block, digest in batch.evicted:
            assert self.device[block] == digest
            self.lower_tier[digest] = None
        while len(self.lower_tier) > self._lower_tier_max:
            del self.lower_tier[next(iter(self.lower_tier))]
        self.device.update(batch.restores)
        if batch.restores:
            self.restored += len(batch.restores)
            self.scheduler.blocks.swap_or_recompute.record_swap(
                len(batch.restores), len(batch.restores) * self._block_s
            )
        for chunk in batch.chunks:
            self._compute(chunk)
        finished = play(self.scheduler, batch)
        self.scheduler.prefill_budget.record_step(
            batch.prefill_tokens, 0, batch.prefill_tokens * self._token_s
        )
        return finished

    def _compute(self, chunk: BatchChunk) -> None:
        """Check that the chunk reads only KV that was computed or restored for its own tokens."""
        blocks = chunk.sequence.blocks
        full = (chunk.start + chunk.tokens) // BLOCK_TOKENS
        for index, digest in enumerate(chunk.sequence.block_digests(full)):
            if (index + 1) * BLOCK_TOKENS <= chunk.start:
                assert self.device[blocks[index]] == digest
            else:
                self.device[blocks[index]] = digest


REQUESTS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 50), st.integers(0, 2)), min_size=2, max_size=8
)


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.integers(0, 40), st.sampled_from([0.001, 0.1, 10.0]))
def test_preempted_sequences_finish_whether_restored_or_recomputed(
    requests: list[tuple[int, int, int]], lower_tier_max: int, block_s: float
) -> None:
    tiers = Tiered(BLOCKS, lower_tier_max, block_s, token_s=0.01)
    scheduler = tiers.scheduler
    for number, (prompt, output, start) in enumerate(requests):
        scheduler.submit(sequence(number, prompt, output, start=start))
    finished: list[Sequence] = []
    for _ in range(STEPS_MAX):
        if not scheduler.has_work:
            break
        finished += tiers.step()
        used = sum(scheduler.pool.reference_count(block) > 0 for block in range(BLOCKS))
        assert used + scheduler.pool.free_blocks == BLOCKS
    assert len(finished) == len(requests)
    assert all(s.output_tokens == s.stop_conditions.tokens_max for s in finished)
    assert scheduler.pool.used_blocks == 0


@pytest.mark.parametrize(("block_s", "is_restored"), [(0.001, True), (10.0, False)])
def test_a_preempted_sequence_is_restored_only_if_that_is_faster(
    block_s: float, is_restored: bool
) -> None:
    tiers = Tiered(8, 99, block_s, token_s=0.01)
    # Both costs are measured already.
    tiers.scheduler.blocks.swap_or_recompute.record_swap(1, block_s)
    tiers.scheduler.prefill_budget.record_step(16, 0, 0.16)
    for number in range(2):
        tiers.scheduler.submit(sequence(number, 40, 70, start=100 * number))
    while tiers.scheduler.has_work:
        tiers.step()
    assert tiers.scheduler.queues.preemptions > 0
    assert (tiers.restored > 0) == is_restored
    blocks = tiers.scheduler.blocks
    assert (blocks.reused_tokens > blocks.recomputed_tokens) == is_restored


def test_swapping_is_tried_again_after_refusals() -> None:
    swap_or_recompute = SwapOrRecompute()
    assert swap_or_recompute.should_swap_in(0.001)
    swap_or_recompute.record_swap(4, 4 * 0.02)
    assert swap_or_recompute.should_swap_in(0.0)
    answers = [swap_or_recompute.should_swap_in(0.001) for _ in range(20)]
    assert answers[0] is False
    assert answers[-1] is True

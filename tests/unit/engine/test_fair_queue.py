"""The fair queue: sessions alternate, low priority does not starve, deadlines are kept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.ttft_order import TtftObjective, ttft_objective
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.scheduler.batch import Batch, StepLimits
from nodeagent.engine.scheduler.batch_scheduler import SHORT_STEPS_S, BatchScheduler
from nodeagent.engine.scheduler.fair_queue import SchedulingParams, VirtualClock
from nodeagent.engine.scheduler.prefill_budget import SHORT_STEP_SHARE, PrefillBudget
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from tests.unit.engine.test_batch_scheduler import make, play


def request(number: int, prompt: int = 20, output: int = 5, **params: object) -> Sequence:
    return Sequence(
        number,
        list(range(number * 1000, number * 1000 + prompt)),
        StopConditions(output, frozenset()),
        scheduling=SchedulingParams(**params),  # type: ignore[arg-type]
    )


def finish_order(scheduler: BatchScheduler) -> list[int]:
    ended: list[int] = []
    while scheduler.has_work:
        ended += [sequence.number for sequence in play(scheduler, scheduler.next_batch())]
    return ended


def test_a_session_with_many_requests_alternates_with_another_session() -> None:
    scheduler = make(sequences=1)
    for number in range(6):
        scheduler.submit(request(number, tenant=b"many"))
    scheduler.submit(request(6, tenant=b"one"))
    assert finish_order(scheduler) == [0, 6, 1, 2, 3, 4, 5]


def test_requests_without_sessions_are_served_in_order_of_arrival() -> None:
    scheduler = make(sequences=1)
    for number in range(5):
        scheduler.submit(request(number))
    assert finish_order(scheduler) == [0, 1, 2, 3, 4]


def test_higher_priority_goes_first_and_preempts_a_running_sequence() -> None:
    scheduler = make(sequences=1)
    scheduler.submit(request(1, priority=10))
    scheduler.submit(request(2, priority=20))
    play(scheduler, scheduler.next_batch())
    assert [s.number for s in scheduler.running] == [2]
    scheduler.submit(request(3, priority=90))
    batch = scheduler.next_batch()
    assert [s.number for s in scheduler.running] == [3]
    assert [chunk.sequence.number for chunk in batch.chunks] == [3]
    play(scheduler, batch)
    assert finish_order(scheduler) == [3, 2, 1]
    assert scheduler.pool.used_blocks == 0


def test_a_sequence_earlier_in_the_queue_is_not_preempted_by_higher_priority() -> None:
    """It would be admitted again at once, being first, and be preempted again without end."""
    scheduler = make(sequences=1)
    scheduler.submit(request(1, priority=10))
    play(scheduler, scheduler.next_batch())
    # The tenant has had much since.
    scheduler.virtual_clock.record_admitted(SchedulingParams(), 200_000)
    scheduler.submit(request(2, priority=90))
    play(scheduler, scheduler.next_batch())
    assert [s.number for s in scheduler.running] == [1]
    assert finish_order(scheduler) == [1, 2]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100), st.integers(1, 400))
def test_low_priority_does_not_starve_behind_endless_high_priority(
    priority: int, prompt: int
) -> None:
    clock, endless = VirtualClock(), SchedulingParams(tenant=b"endless", priority=100)
    mine = clock.assign_start(SchedulingParams(priority=priority), 10, 10)
    for _ in range(100_000 // prompt + 2):
        clock.record_admitted(endless, clock.assign_start(endless, prompt, 10))
    assert clock.assign_start(endless, prompt, 10) > mine


def test_the_number_of_remembered_tenants_is_bounded() -> None:
    clock = VirtualClock()
    for number in range(20_000):
        clock.assign_start(SchedulingParams(tenant=b"%d" % number), 10, 10)
    assert len(clock._tenant_finish) <= 4096


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 60),
            st.integers(1, 20),
            st.integers(0, 100),
            st.sampled_from([b"", b"a", b"b"]),
            st.none() | st.integers(0, 30),
            st.sampled_from([0, 20_000, 200_000]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_request_finishes_or_misses_its_deadline(
    requests: list[tuple[int, int, int, bytes, int | None, int]],
) -> None:
    scheduler = BatchScheduler(StepLimits(12, 3), BlockPool(8))
    arriving = [
        (
            leap,
            request(number, prompt, output, priority=priority, tenant=session, deadline_s=deadline),
        )
        for number, (prompt, output, priority, session, deadline, leap) in enumerate(requests)
    ]
    ended: set[int] = set()
    now = 0.0
    while arriving or scheduler.has_work:
        if arriving:
            leap, sequence = arriving.pop(0)
            # Requests admitted meanwhile, which may use up a lead by priority.
            clock = scheduler.virtual_clock
            clock.record_admitted(SchedulingParams(), clock._virtual_time + leap)
            scheduler.submit(sequence)
        first = min(
            (*scheduler.running, *scheduler.waiting), key=lambda s: (s.virtual_start, s.number)
        )
        batch = scheduler.next_batch(now)
        # The first one goes on, unless it gave way to a tenant that ran nothing.
        tenants = {sequence.scheduling.tenant for sequence in scheduler.running}
        gave_way = first in scheduler.waiting and tenants - {first.scheduling.tenant}
        goes_on = first in scheduler.running or first in batch.late
        assert not first.was_admitted or goes_on or gave_way
        assert batch.tokens <= 12
        assert len(scheduler.running) <= 3
        assert scheduler.running == sorted(
            scheduler.running, key=lambda s: (s.virtual_start, s.number)
        )
        ran = [chunk.sequence for chunk in batch.chunks]
        assert all(sequence in scheduler.running for sequence in ran)
        for sequence in batch.late:
            assert sequence.output_tokens == 0
            assert not sequence.blocks
            ended.add(sequence.number)
        ended |= {sequence.number for sequence in play(scheduler, batch)}
        used = {block for sequence in scheduler.running for block in sequence.blocks}
        assert scheduler.pool.used_blocks == len(used)
        now += 1
        assert now < 3000
    assert ended == set(range(len(requests)))
    assert scheduler.pool.used_blocks == 0


def test_a_sequence_with_output_is_not_dropped_for_its_deadline() -> None:
    scheduler = make()
    scheduler.submit(request(1, deadline_s=5.0))
    play(scheduler, scheduler.next_batch(1.0))
    assert scheduler.next_batch(9.0).late == ()


def test_a_flood_does_not_use_up_its_lead_while_a_small_tenant_is_served() -> None:
    """With computed tokens as virtual time, the small tenant's own ones made up for the lead."""
    scheduler = make(blocks=64, budget=64, sequences=2)
    for number in range(20):
        scheduler.submit(request(number, tenant=b"flood"))
    numbers = iter(range(20, 1000))
    mine: Sequence | None = None
    waited: list[int] = []
    for _ in range(600):
        if mine is None or mine not in (*scheduler.running, *scheduler.waiting):
            mine = request(next(numbers), tenant=b"small")
            scheduler.submit(mine)
            waited.append(0)
        waited[-1] += mine in scheduler.waiting
        for _ended in play(scheduler, scheduler.next_batch()):
            if _ended is not mine:
                scheduler.submit(request(next(numbers), tenant=b"flood"))
    assert len(waited) > 80
    # One step: submitted before it, admitted by it.
    assert max(waited) <= 1


def test_a_tenant_that_runs_nothing_takes_the_place_of_the_last_of_the_tenant_that_runs_most() -> (
    None
):
    scheduler = make(blocks=64, budget=64, sequences=3)
    for number in range(5):
        scheduler.submit(request(number, output=10, tenant=b"flood"))
    play(scheduler, scheduler.next_batch())
    scheduler.submit(request(5, tenant=b"small"))
    scheduler.submit(request(6, tenant=b"small"))
    batch = scheduler.next_batch()
    assert [s.number for s in scheduler.running] == [0, 1, 5]
    # Its short prompt is computed before the decodes of the flood go on.
    assert [chunk.sequence.number for chunk in batch.chunks] == [5]
    play(scheduler, batch)
    # The second one of the small tenant waits for its turn.
    assert [s.number for s in scheduler.running] == [0, 1, 5]
    assert finish_order(scheduler)[:1] == [5]
    assert scheduler.queues.preemptions == 1
    # Only the last block of the preempted sequence was computed again.
    assert scheduler.blocks.recomputed_tokens <= BLOCK_TOKENS


def flooded(budget: int = 64, **params: int) -> BatchScheduler:
    """Return a scheduler in which three sequences of a flood decode and two wait."""
    scheduler = make(blocks=128, budget=budget, sequences=4)
    for number in range(3):
        scheduler.submit(request(number, output=50, tenant=b"flood", **params))
    while not all(s.is_decoding for s in scheduler.running) or not scheduler.running:
        play(scheduler, scheduler.next_batch())
    return scheduler


def numbers(batch: Batch) -> list[int]:
    return [chunk.sequence.number for chunk in batch.chunks]


def test_decodes_are_deferred_for_a_small_tenants_prompt_but_not_twice_in_a_row() -> None:
    scheduler = flooded()
    order = []
    for number in range(4, 10):
        scheduler.submit(request(number, output=1, tenant=b"small"))
        batch = scheduler.next_batch()
        order.append(numbers(batch))
        play(scheduler, batch)
    assert order[0] == [4]
    # The next prompt came beside decodes, the third one alone again.
    assert order[1] == [0, 1, 2, 5]
    assert order[2] == [6] and len(order[3]) == 4


def test_a_long_prompt_or_tenants_that_share_the_engine_defer_no_decodes() -> None:
    scheduler = flooded()
    scheduler.submit(request(4, prompt=65, tenant=b"small"))
    assert set(numbers(scheduler.next_batch())) == {0, 1, 2, 4}
    shared = make(blocks=128, budget=64, sequences=4)
    for number, tenant in enumerate((b"a", b"a", b"b")):
        shared.submit(request(number, output=50, tenant=tenant))
    while not all(s.is_decoding for s in shared.running) or not shared.running:
        play(shared, shared.next_batch())
    shared.submit(request(4, tenant=b"c"))
    assert set(numbers(shared.next_batch())) == {0, 1, 2, 4}


def test_prompts_of_a_flood_are_short_while_a_small_tenant_is_active() -> None:
    scheduler = flooded()
    budget = scheduler.prefill_budget = PrefillBudget(1.0)
    budget.record_step(0, 3, 0.4)
    budget.record_step(50, 3, 0.9)  # 10 ms a token
    scheduler.submit(request(4, output=1, tenant=b"small"))
    play(scheduler, scheduler.next_batch(now_s=5.0))
    scheduler.submit(request(5, prompt=60, tenant=b"flood"))
    # The fourth sequence is admitted in this step, so nothing was pending before it.
    tokens = [chunk.tokens for chunk in scheduler.next_batch(now_s=5.5).prefills]
    assert tokens == [20]  # half of the decodes' time
    tokens = [chunk.tokens for chunk in scheduler.next_batch(now_s=5.0 + SHORT_STEPS_S).prefills]
    assert tokens == [60]


def test_a_step_that_the_machine_held_up_does_not_cut_a_small_tenants_prompt() -> None:
    scheduler = flooded()
    budget = scheduler.prefill_budget = PrefillBudget(0.25)
    budget.record_step(0, 3, 0.02)
    budget.record_step(40, 3, 0.02 + 40 * 0.0006)
    budget.record_step(40, 3, 0.4)  # as if a token took 9.5 ms
    scheduler.submit(request(4, prompt=40, output=1, tenant=b"small"))
    batch = scheduler.next_batch()
    assert [(chunk.sequence.number, chunk.tokens) for chunk in batch.chunks] == [(4, 40)]


@given(
    pending=st.integers(0, 10_000),
    decodes_s=st.floats(0.001, 0.4),
    token_s=st.floats(1e-5, 0.01),
)
def test_a_short_step_takes_half_as_long_as_decodes_or_a_share_of_what_is_pending(
    pending: int, decodes_s: float, token_s: float
) -> None:
    budget = PrefillBudget(0.25)
    budget.record_step(0, 4, decodes_s)
    budget.record_step(1000, 4, decodes_s + 1000 * token_s)
    short = budget.prompt_tokens_allowed(4, 4096, short_step_of=pending)
    assert min(BLOCK_TOKENS, 4096) <= short <= budget.prompt_tokens_allowed(4, 4096)
    share_s = SHORT_STEP_SHARE * min(pending * token_s, 0.25)
    assert short * token_s <= max(decodes_s / 2, share_s, BLOCK_TOKENS * token_s) * 1.001
    # A backlog that takes longer than the interval is worked off as fast as it was before.
    if pending * token_s >= 0.25 and decodes_s < 0.2:
        assert (short + 1) * token_s * 1.001 >= SHORT_STEP_SHARE * 0.25 - token_s


def test_a_tenant_with_one_running_sequence_keeps_it() -> None:
    scheduler = make(blocks=64, budget=64, sequences=2)
    for number, tenant in enumerate((b"a", b"b", b"c")):
        scheduler.submit(request(number, tenant=tenant))
    play(scheduler, scheduler.next_batch())
    assert [s.number for s in scheduler.running] == [0, 1]
    assert scheduler.queues.preemptions == 0


def test_tenants_share_the_prompt_tokens_of_a_step() -> None:
    scheduler = make(blocks=64, budget=16, sequences=4)
    for number in range(2):
        scheduler.submit(request(number, prompt=200, tenant=b"flood"))
    play(scheduler, scheduler.next_batch())
    scheduler.submit(request(2, prompt=20, tenant=b"small"))
    batch = scheduler.next_batch()
    assert [(chunk.sequence.number, chunk.tokens) for chunk in batch.prefills] == [(2, 8), (0, 8)]


def test_what_cancelled_requests_cost_their_tenant_is_bounded() -> None:
    clock, params = VirtualClock(), SchedulingParams(tenant=b"cancels")
    for _ in range(1000):
        clock.assign_start(params, 2000, 100)
    assert clock.assign_start(params, 2000, 100) <= 65_536


OUTPUTS = st.integers(1, 6)


def due(seconds: float | None) -> TtftObjective:
    """Return the objective of a request that arrives at second 0."""
    return ttft_objective(0.0, None if seconds is None else int(1000 * seconds))


def test_within_a_tenant_the_request_that_is_due_first_is_served_first() -> None:
    scheduler = make(sequences=1)
    for number, seconds in enumerate((None, 30.0, 2.0, 8.0, None)):
        scheduler.submit(request(number, tenant=b"a", objective=due(seconds)))
    assert finish_order(scheduler) == [2, 3, 0, 4, 1]


def test_a_request_that_is_too_late_makes_way() -> None:
    scheduler = make(sequences=1)
    late = ttft_objective(0.0, 1_000, prefill_ms=2_000)
    scheduler.submit(request(0, tenant=b"a", objective=late))
    scheduler.submit(request(1, tenant=b"a", objective=due(5.0)))
    scheduler.submit(request(2, tenant=b"a", objective=due(None)))
    assert finish_order(scheduler) == [1, 2, 0]


def test_priority_goes_before_objectives() -> None:
    scheduler = make(sequences=1)
    scheduler.submit(request(0, tenant=b"a", priority=10, objective=due(1.0)))
    scheduler.submit(request(1, tenant=b"a", objective=due(9.0)))
    assert finish_order(scheduler) == [1, 0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from((b"a", b"b", b"c")), st.one_of(st.none(), st.floats(0, 20)), OUTPUTS
        ),
        max_size=12,
    )
)
def test_objectives_leave_tenants_their_turns(
    requests: list[tuple[bytes, float | None, int]],
) -> None:
    """Which tenant is served when is the same with and without objectives."""
    with_objectives, without = make(sequences=1), make(sequences=1)
    for number, (tenant, seconds, output) in enumerate(requests):
        sequence = request(number, output=output, tenant=tenant, objective=due(seconds))
        with_objectives.submit(sequence)
        without.submit(request(number, output=output, tenant=tenant))
    served = finish_order(with_objectives)
    assert sorted(served) == list(range(len(requests)))
    tenants = [requests[number][0] for number in finish_order(without)]
    assert [requests[number][0] for number in served] == tenants

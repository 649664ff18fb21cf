"""The fair queue: sessions alternate, low priority does not starve, deadlines are kept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.kvcache.block_pool import BlockPool
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.fair_queue import SchedulingParams, VirtualClock
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
        scheduler.submit(request(number, session=b"many"))
    scheduler.submit(request(6, session=b"one"))
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
    scheduler.virtual_clock.advance(200_000)
    scheduler.submit(request(2, priority=90))
    play(scheduler, scheduler.next_batch())
    assert [s.number for s in scheduler.running] == [1]
    assert finish_order(scheduler) == [1, 2]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100), st.integers(1, 400))
def test_low_priority_does_not_starve_behind_endless_high_priority(
    priority: int, prompt: int
) -> None:
    clock = VirtualClock()
    mine = clock.assign_start(SchedulingParams(priority=priority), 10, 10)
    for _ in range(100_000 // prompt + 2):
        clock.advance(prompt)
    assert clock.assign_start(SchedulingParams(priority=100), prompt, 10) > mine


def test_the_number_of_remembered_sessions_is_bounded() -> None:
    clock = VirtualClock()
    for number in range(20_000):
        clock.assign_start(SchedulingParams(session=b"%d" % number), 10, 10)
    assert len(clock._session_finish) <= 4096


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
            request(
                number, prompt, output, priority=priority, session=session, deadline_s=deadline
            ),
        )
        for number, (prompt, output, priority, session, deadline, leap) in enumerate(requests)
    ]
    ended: set[int] = set()
    now = 0.0
    while arriving or scheduler.has_work:
        if arriving:
            leap, sequence = arriving.pop(0)
            # Tokens computed meanwhile, which may use up a lead by priority.
            scheduler.virtual_clock.advance(leap)
            scheduler.submit(sequence)
        first = min(
            (*scheduler.running, *scheduler.waiting), key=lambda s: (s.virtual_start, s.number)
        )
        batch = scheduler.next_batch(now)
        assert not first.was_admitted or first in scheduler.running or first in batch.late
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

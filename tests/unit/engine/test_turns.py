"""Turns: sessions in turn, priority without starving, deadlines kept."""

from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.kvcache.blocks import Blocks
from nodeagent.engine.scheduler.batching import Batching, Limits
from nodeagent.engine.scheduler.fair_queue import Standing, Turns
from nodeagent.engine.scheduler.sequence import Ending, Sequence
from tests.unit.engine.test_batching import make, play


def one(number: int, prompt: int = 20, output: int = 5, **standing: object) -> Sequence:
    return Sequence(
        number,
        list(range(number * 1000, number * 1000 + prompt)),
        Ending(output, frozenset()),
        standing=Standing(**standing),  # type: ignore[arg-type]
    )


def order_of_ends(batching: Batching) -> list[int]:
    ended: list[int] = []
    while batching.busy:
        ended += [sequence.number for sequence in play(batching, batching.next_batch())]
    return ended


def test_a_session_of_many_requests_lets_another_session_pass() -> None:
    batching = make(sequences=1)
    for number in range(6):
        batching.submit(one(number, session=b"many"))
    batching.submit(one(6, session=b"one"))
    assert order_of_ends(batching) == [0, 6, 1, 2, 3, 4, 5]


def test_without_sessions_first_come_is_first_served() -> None:
    batching = make(sequences=1)
    for number in range(5):
        batching.submit(one(number))
    assert order_of_ends(batching) == [0, 1, 2, 3, 4]


def test_higher_priority_goes_first_and_takes_a_running_ones_place() -> None:
    batching = make(sequences=1)
    batching.submit(one(1, priority=10))
    batching.submit(one(2, priority=20))
    play(batching, batching.next_batch())
    assert [s.number for s in batching.running] == [2]
    batching.submit(one(3, priority=90))
    batch = batching.next_batch()
    assert [s.number for s in batching.running] == [3]
    assert [chunk.sequence.number for chunk in batch.chunks] == [3]
    play(batching, batch)
    assert order_of_ends(batching) == [3, 2, 1]
    assert batching.blocks.held == 0


def test_who_has_waited_out_anothers_priority_keeps_its_place() -> None:
    """It would come back at once, being first, only to give way again: without end."""
    batching = make(sequences=1)
    batching.submit(one(1, priority=10))
    play(batching, batching.next_batch())
    batching.turns.pass_by(200_000)
    batching.submit(one(2, priority=90))
    play(batching, batching.next_batch())
    assert [s.number for s in batching.running] == [1]
    assert order_of_ends(batching) == [1, 2]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100), st.integers(1, 400))
def test_nobody_starves_behind_an_endless_stream_of_higher_priority(
    priority: int, prompt: int
) -> None:
    turns = Turns()
    mine = turns.give(Standing(priority=priority), 10, 10)
    for _ in range(100_000 // prompt + 2):
        turns.pass_by(prompt)
    assert turns.give(Standing(priority=100), prompt, 10) > mine


def test_the_memory_of_sessions_is_bounded() -> None:
    turns = Turns()
    for number in range(20_000):
        turns.give(Standing(session=b"%d" % number), 10, 10)
    assert len(turns._sessions) <= 4096


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
def test_everyone_ends_or_is_given_up_in_time(
    asks: list[tuple[int, int, int, bytes, int | None, int]],
) -> None:
    batching = Batching(Limits(12, 3), Blocks(8))
    arriving = [
        (leap, one(number, prompt, output, priority=priority, session=session, deadline_s=deadline))
        for number, (prompt, output, priority, session, deadline, leap) in enumerate(asks)
    ]
    ended: set[int] = set()
    now = 0.0
    while arriving or batching.busy:
        if arriving:
            leap, sequence = arriving.pop(0)
            # What was computed meanwhile, so that a lead by priority may be used up.
            batching.turns.pass_by(leap)
            batching.submit(sequence)
        first = min((*batching.running, *batching.waiting), key=lambda s: (s.turn, s.number))
        batch = batching.next_batch(now)
        assert not first.admitted or first in batching.running or first in batch.late
        assert batch.tokens <= 12
        assert len(batching.running) <= 3
        assert batching.running == sorted(batching.running, key=lambda s: (s.turn, s.number))
        ran = [chunk.sequence for chunk in batch.chunks]
        assert all(sequence in batching.running for sequence in ran)
        for sequence in batch.late:
            assert sequence.output_tokens == 0
            assert not sequence.blocks
            ended.add(sequence.number)
        ended |= {sequence.number for sequence in play(batching, batch)}
        held = {block for sequence in batching.running for block in sequence.blocks}
        assert batching.blocks.held == len(held)
        now += 1
        assert now < 3000
    assert ended == set(range(len(asks)))
    assert batching.blocks.held == 0


def test_who_has_begun_is_not_given_up() -> None:
    batching = make()
    batching.submit(one(1, deadline_s=5.0))
    play(batching, batching.next_batch(1.0))
    assert batching.next_batch(9.0).late == ()

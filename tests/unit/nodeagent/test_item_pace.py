"""Items of batches begin one after another in a vendor engine, and not while a prompt is read."""

import asyncio
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.item_pace import PACE_SHARE, TURNS_BEHIND_MAX, ItemPace
from nodeagent.decide.requests.preemption import BatchItem
from nodeagent.decide.requests.seats import STARTED_AFTER_S, SeatRequest, Seats
from nodeagent.host.engine_seats import EngineSeats

PREFILL_S = 0.05


def test_before_an_item_has_ended_the_next_begins_once_its_prompt_should_be_read() -> None:
    pace = ItemPace(16)
    assert pace.due_s(5.0) == 5.0
    pace.record_begin(5.0, 5.3)
    assert pace.due_s(5.1) == 5.3


def test_items_begin_a_little_faster_than_they_end() -> None:
    pace = ItemPace(16)
    pace.record_end(1.0, 3.0)
    pace.record_begin(5.0, 9.0)
    assert pace.due_s(5.0) == 5.0 + PACE_SHARE * 2.0 / 16
    pace.record_end(5.0, 15.0)
    pace.record_begin(20.0, 29.0)
    assert pace.due_s(20.0) == 20.0 + PACE_SHARE * 3.0 / 16


def test_however_long_items_take_the_next_waits_for_one_prompt_only() -> None:
    pace = ItemPace(2)
    pace.record_end(0.0, 600.0)
    pace.record_begin(5.0, 5.3)
    assert pace.due_s(5.0) == 5.3


def test_items_wait_for_clients_first_tokens_up_to_a_limit_that_they_catch_up() -> None:
    pace, turn_s = ItemPace(10), 0.2
    pace.record_end(0.0, 10 * turn_s)
    pace.record_begin(4.0, 9.0)
    pace.unread_prompts = 1
    limit_s = TURNS_BEHIND_MAX * turn_s
    assert pace.due_s(5.0) == pytest.approx(5.0 + limit_s)
    pace.unread_prompts = 0
    assert pace.due_s(5.3) == 5.3
    pace.record_begin(5.3, 9.0)
    pace.unread_prompts = 1
    begin_s = 5.3 + PACE_SHARE * turn_s
    left_s = limit_s - 0.3 + (1 - PACE_SHARE) * turn_s
    assert pace.due_s(begin_s) == pytest.approx(begin_s + left_s)
    pace.record_begin(begin_s + left_s, 90.0)
    assert pace.due_s(20.0) == pytest.approx(20.0 + (1 - PACE_SHARE) * turn_s)


def test_unread_items_end_for_clients_while_that_can_be_caught_up() -> None:
    pace = ItemPace(10)
    pace.record_end(0.0, 4.0)
    pace.record_begin(5.0, 9.0)
    for _ in range(TURNS_BEHIND_MAX):
        assert pace.may_preempt()
        pace.record_preemption()
    assert not pace.may_preempt()
    pace.record_begin(6.0, 9.0)
    assert not pace.may_preempt()
    for begin_s in (7.0, 8.0):
        pace.record_begin(begin_s, 9.0)
    assert pace.may_preempt()


@given(
    st.integers(1, 40),
    st.floats(0.05, 20.0),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.booleans()), max_size=200),
)
def test_items_begin_as_often_as_they_end_whatever_clients_do(
    seats: int, item_s: float, steps: list[tuple[float, bool, bool]]
) -> None:
    """With a free seat and a backlog, clients delay items by a bounded time in all."""
    pace, now_s, begins, ended = ItemPace(seats), 0.0, 0, 0
    pace.record_end(0.0, item_s)
    for wait_s, is_reading, ends_items in steps:
        pace.unread_prompts = int(is_reading)
        if ends_items:
            while begins > ended and pace.may_preempt():
                pace.record_preemption()
                ended += 1
        until_s = now_s + wait_s
        while (due_s := pace.due_s(now_s)) <= until_s:
            now_s = due_s
            pace.record_begin(now_s, now_s + 1e9)
            begins += 1
            assert pace.due_s(now_s) >= now_s + PACE_SHARE * item_s / seats
        now_s = until_s
    between_ends_s = item_s / seats
    answered = begins - ended
    assert answered >= now_s / between_ends_s - TURNS_BEHIND_MAX - 2


class PacedEngine:
    """Seats with items and clients in simulated time, as `EngineSeats` uses them."""

    def __init__(self, size: int) -> None:
        self.seats = Seats(size, spare=1)
        self.now_s = 0.0
        self.all: list[SeatRequest] = []
        self.begins_s: list[float] = []

    @property
    def seated(self) -> list[SeatRequest]:
        return [one for one in self.all if one.is_seated]

    def ask(self, item: BatchItem | None) -> None:
        objective = TtftObjective(self.now_s, prefill_s=PREFILL_S)
        request = self.seats.request(
            "tenant", objective, self.now_s, yields=item is not None, item=item
        )
        self.all.append(request)
        if item is not None:
            item.on_preempt(lambda: self._check(self.seats.release(request, self.now_s)))
        self._check([request] if request.is_seated else [])
        for which in (self.seats.unread_item, self.seats.item_to_preempt):
            ended = which(request, self.now_s)
            if ended is not None:
                ended.preempt()

    def _check(self, begun: list[SeatRequest]) -> None:
        for request in begun:
            if request.item is not None:
                self.begins_s.append(self.now_s)

    def start(self, request: SeatRequest) -> None:
        self._check(self.seats.record_start(request, self.now_s))

    def end(self, request: SeatRequest) -> None:
        self._check(self.seats.release(request, self.now_s))

    def wait(self, seconds: float) -> None:
        """Let time pass, with the timer of `EngineSeats`."""
        until_s = self.now_s + seconds
        while (due_s := self.seats.next_fill_s) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self._check(self.seats.fill(self.now_s))
        self.now_s = until_s


_STEP = st.tuples(
    st.sampled_from(["item", "client", "token", "end", "wait"]), st.integers(0, 9), st.booleans()
)


@given(st.lists(_STEP, max_size=80), st.integers(1, 5))
def test_every_item_begins_in_its_turn(steps: list[tuple[str, int, bool]], size: int) -> None:
    engine = PacedEngine(size)
    for step, number, is_kept in steps:
        chosen = engine.seated[number % len(engine.seated)] if engine.seated else None
        if step == "item":
            engine.ask(BatchItem(3 if is_kept else 0))
        elif step == "client":
            engine.ask(None)
        elif step == "wait":
            engine.wait(number / 10)
        elif chosen is not None:
            (engine.start if step == "token" else engine.end)(chosen)
    # Nothing is left waiting once those before it have ended and their time has passed.
    left = [one for one in engine.all if not (one.item and one.item.is_preempted)]
    for _ in range(2 * len(left) + 1):
        engine.wait(STARTED_AFTER_S + PREFILL_S)
        for request in engine.seated:
            engine.start(request)
            engine.end(request)
    assert not engine.seats._waiting and not engine.seats._taken
    assert engine.seats._item_pace.unread_prompts == 0


@given(st.integers(1, 32), st.floats(0.1, 60.0))
def test_seats_that_become_free_together_fill_within_the_time_of_an_item(
    size: int, item_s: float
) -> None:
    engine = PacedEngine(size)
    engine.seats._item_pace.record_end(0.0, item_s)
    for _ in range(2 * size):
        engine.ask(BatchItem(0))
    assert len(engine.seated) == 1
    engine.wait(item_s)
    assert len(engine.seated) == size
    gaps = [after - before for before, after in pairwise(engine.begins_s)]
    shortest_s = min(PACE_SHARE * item_s / size, STARTED_AFTER_S + PREFILL_S)
    assert all(gap >= shortest_s - 1e-9 for gap in gaps)


async def test_the_node_wakes_an_item_whose_turn_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.decide.requests.seats.STARTED_AFTER_S", 0.001)
    seats = EngineSeats(4)
    async with seats.seat("a", yields=True, item=BatchItem(0)):
        pass
    # The engine takes so long to read their prompts that only their turn can wake them.
    objective = TtftObjective(prefill_s=600.0)
    async with AsyncExitStack() as stack, asyncio.timeout(10):
        for _ in range(3):
            item = seats.seat("a", objective, yields=True, item=BatchItem(0))
            await stack.enter_async_context(item)


async def test_items_wait_on_the_node_for_a_clients_first_token() -> None:
    seats = EngineSeats(4)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(seats.seat("a", yields=True, item=BatchItem(0)))
        started = await stack.enter_async_context(seats.seat("client"))
        item = seats.seat("a", yields=True, item=BatchItem(0))
        waiting = asyncio.create_task(stack.enter_async_context(item))
        await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
        started()
        await waiting

"""Items of batches end for clients' requests: which, how often, and what they give back."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.ttft_order import TtftObjective
from nodeagent.decide.requests.admission import ReplicaAdmission, TokenReservation
from nodeagent.decide.requests.preemption import PREEMPTIONS_MAX, BatchItem, in_order_of_preemption
from nodeagent.decide.requests.seats import SeatRequest, Seats

TOKENS_MAX = 1_000


def an_item(preemptions: int = 0, began_s: float = inf) -> BatchItem:
    item = BatchItem(preemptions)
    item.began_s = began_s
    return item


def test_the_item_that_loses_least_goes_first() -> None:
    old, young, again = an_item(0, 1.0), an_item(0, 5.0), an_item(1, 6.0)
    waiting, last = an_item(2), an_item(PREEMPTIONS_MAX)
    answering = an_item(0, 9.0)
    answering.keep()
    items = [old, young, again, waiting, last, answering]
    assert in_order_of_preemption(items) == [waiting, young, old, again]
    young.preempt()
    assert in_order_of_preemption(items) == [waiting, old, again]


def test_a_request_that_does_not_fit_ends_as_few_items_as_needed_or_none() -> None:
    admission = ReplicaAdmission(TOKENS_MAX)
    items = [an_item(0, float(number)) for number in range(4)]
    for item in items:
        assert admission.admit(100, 100, item=item) is not None
    assert admission.admit(100, 200) is not None
    assert [item.is_preempted for item in items] == [False, False, False, True]
    # An item ends no other item, and nothing ends for a request that would not fit even then.
    assert admission.admit(100, 100, item=an_item()) is None
    assert admission.admit(0, TOKENS_MAX) is None
    assert [item.is_preempted for item in items] == [False, False, False, True]
    assert admission.load().running == 4


def test_a_generation_takes_the_place_of_an_item() -> None:
    admission = ReplicaAdmission(10**6, sequences_max=4)
    items = [an_item(0, float(number)) for number in range(12)]
    admitted = [admission.admit(1, 1, generates_for="a", item=item) for item in items]
    assert sum(reservation is not None for reservation in admitted) == 6
    assert admission.admit(1, 1, generates_for="a") is not None
    assert sum(item.is_preempted for item in items) == 1 and items[5].is_preempted


class SeatBench:
    """Seats as the node uses them: a preempted item gives its seat back."""

    def __init__(self, size: int) -> None:
        self.seats = Seats(size)

    def ask(self, tenant: str, item: BatchItem | None = None, now_s: float = 0.0) -> SeatRequest:
        yields = item is not None
        request = self.seats.request(tenant, TtftObjective(now_s), now_s, yields=yields, item=item)
        if item is not None:
            item.on_preempt(lambda: self.seats.release(request, now_s))
        for which in (self.seats.unread_item, self.seats.item_to_preempt):
            preempted = which(request, now_s)
            if preempted is not None:
                preempted.preempt()
        return request

    def begin(self, tenant: str, item: BatchItem | None = None, now_s: float = 0.0) -> SeatRequest:
        """Ask for a seat, and let the engine read the prompt."""
        request = self.ask(tenant, item, now_s)
        self.seats.record_start(request, now_s)
        return request


def test_a_client_takes_the_seat_of_the_youngest_item_at_once() -> None:
    bench = SeatBench(2)
    old, young, next_one = an_item(), an_item(), an_item()
    bench.begin("batch", old, 1.0), bench.begin("batch", young, 2.0)
    waiting = bench.ask("batch", next_one, 3.0)
    assert not waiting.is_seated
    assert bench.ask("client").is_seated
    assert (old.is_preempted, young.is_preempted, next_one.is_preempted) == (False, True, False)
    # The item that waits begins after the clients' requests.
    assert bench.ask("client").is_seated and old.is_preempted and not waiting.is_seated
    assert not bench.ask("client").is_seated


def test_a_flood_that_must_start_one_after_another_preempts_nothing_meanwhile() -> None:
    bench, item = SeatBench(4), an_item()
    bench.begin("other"), bench.begin("batch", item)
    share = [bench.ask("flood"), bench.ask("flood")]
    waiting = bench.ask("flood")
    assert not waiting.is_seated and not item.is_preempted
    for request in share:
        bench.seats.record_start(request, 0.0)
    bench.ask("flood")
    assert item.is_preempted and waiting.is_seated


def test_items_that_are_kept_leave_a_seat() -> None:
    bench = SeatBench(4)
    kept = [bench.begin("batch", an_item(PREEMPTIONS_MAX), number) for number in range(6)]
    assert sum(request.is_seated for request in kept) == 3
    assert bench.ask("client").is_seated


def test_a_clients_request_ends_the_last_item_whose_prompt_is_not_read() -> None:
    """The engine would read their prompts in one step with the client's."""
    bench = SeatBench(16)
    early, unread, kept, read = an_item(), an_item(), an_item(PREEMPTIONS_MAX), an_item()
    for began_s, item in enumerate((early, unread, kept)):
        bench.ask("batch", item, began_s)
    bench.begin("batch", read, 3.0)
    bench.seats.request("flexible", TtftObjective(4.0), 4.0, yields=True)
    items = (early, unread, kept, read)
    assert not any(item.is_preempted for item in items)
    assert bench.ask("client", None, 5.0).is_seated
    assert [item.is_preempted for item in items] == [False, True, False, False]


def test_many_clients_end_only_so_many_unread_items_as_can_be_caught_up() -> None:
    bench = SeatBench(16)
    bench.seats._item_pace.record_end(0.0, 4.0)
    items = [an_item() for _ in range(8)]
    for number, item in enumerate(items):
        assert bench.ask("batch", item, 1.0 + number).is_seated
    assert all(bench.ask("client", None, 9.0).is_seated for _ in range(8))
    assert [item.is_preempted for item in items] == [False] * 6 + [True] * 2


def test_a_clients_request_that_must_wait_its_turn_ends_no_item() -> None:
    bench, item = SeatBench(4), an_item()
    bench.begin("other"), bench.ask("batch", item, 1.0)
    share = [bench.ask("flood", None, 0.0), bench.ask("flood", None, 0.0)]
    again = an_item()
    for request in share:
        bench.seats.record_start(request, 2.0)
    bench.seats.release(share[0], 2.0)
    assert bench.ask("batch", again, 2.0).is_seated
    bench.ask("flood", None, 2.0)
    later = bench.ask("flood", None, 2.0)
    assert item.is_preempted and not later.is_seated


@pytest.mark.parametrize("size", [1, 2, 5])
def test_with_idle_seats_every_item_finishes(size: int) -> None:
    """Clients that always preempt cannot keep an item out for ever."""
    bench, left = SeatBench(size), dict.fromkeys(range(20), 0)
    for turn in range(1_000):
        if not left:
            break
        tried = list(left)[: size + 1]
        items = {number: BatchItem(left[number]) for number in tried}
        requests = {number: bench.ask("batch", item, turn) for number, item in items.items()}
        clients = [bench.ask("client", None, turn) for _ in range(size)]
        for client in clients:
            bench.seats.release(client, turn)
        for number, item in items.items():
            if item.is_preempted:
                left[number] += 1
                assert left[number] <= PREEMPTIONS_MAX
            elif requests[number].is_seated:
                del left[number]
            bench.seats.release(requests[number], turn)
    assert not left
    assert not bench.seats._taken and not bench.seats._waiting and not bench.seats._yielding


_STEP = st.tuples(
    st.sampled_from(["client", "item", "end", "token", "keep"]),
    st.integers(0, 3),
    st.integers(1, 400),
    st.integers(0, 40),
)


@given(st.lists(_STEP, max_size=80), st.integers(0, 4))
def test_tokens_in_flight_are_exact_whatever_is_preempted(
    steps: list[tuple[str, int, int, int]], sequences: int
) -> None:
    """The load is the sum of what lives, and never negative, also if all is released twice."""
    admission = ReplicaAdmission(TOKENS_MAX, sequences)
    made: list[TokenReservation] = []
    for now_s, (step, preemptions, tokens, place) in enumerate(steps):
        alive = [one for one in made if one.held_tokens]
        if step in ("client", "item"):
            item = an_item(preemptions, now_s) if step == "item" else None
            reservation = admission.admit(
                tokens, tokens, generates_for=str(place % 3), router=str(place % 2), item=item
            )
            ended = [one for one in alive if not one.held_tokens]
            assert all(one.item is not None and one.item.is_preempted for one in ended)
            assert not ended or (item is None and reservation is not None)
            if reservation is not None:
                made.append(reservation)
        elif alive and step == "end":
            alive[place % len(alive)].release(now_s)
        elif alive and step == "token":
            alive[place % len(alive)].first_token(now_s)
        elif alive and (kept := alive[place % len(alive)].item) is not None:
            kept.keep()
        living = [one for one in made if one.held_tokens]
        load = admission.load()
        assert load.running == len(living)
        assert load.prefill_tokens + load.decode_tokens == sum(one.held_tokens for one in living)
        assert min(load.prefill_tokens, load.decode_tokens, load.pending_prefill_tokens) >= 0
        assert load.running <= 1 or sum(one.held_tokens for one in living) <= TOKENS_MAX
    for reservation in made * 2:
        reservation.release()
    assert admission.load().running == 0 and admission.load().decode_tokens == 0
    assert not admission._items and not admission._generations and not admission._in_prefill

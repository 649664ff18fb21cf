"""What a vendor engine runs, and what waits on the node: fairly between tenants."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.ttft_order import TtftObjective, ttft_objective
from isochrone.wire.models.model import EngineSettings
from nodeagent.decide.requests.seats import ACTIVE_S, SeatRequest, Seats, spare_seats
from nodeagent.drivers import DRIVERS, sequences_max, spare_seats_of
from nodeagent.drivers.driver import EngineLaunch, with_spare_seats
from nodeagent.host.engine_seats import EngineSeats
from tests.builders import a_spec


def ask(seats: Seats, tenant: str, ttft_ms: int | None = None) -> SeatRequest:
    """Ask for a seat at second 0."""
    return seats.request(tenant, ttft_objective(0.0, ttft_ms), 0.0)


def test_a_flood_gets_all_seats_of_the_option_and_others_the_spare_ones() -> None:
    seats = Seats(4, spare=2)
    flood = [ask(seats, "flood") for _ in range(7)]
    assert [request.is_seated for request in flood] == [True] * 4 + [False] * 3
    small, again = ask(seats, "small"), ask(seats, "small")
    assert small.is_seated and not again.is_seated
    assert ask(seats, "third").is_seated
    fourth = ask(seats, "fourth")
    assert not fourth.is_seated
    # The next one is of the tenant with fewest, however long the flood has waited.
    assert seats.release(flood[0], 0.0) == [fourth]
    assert seats.release(small, 0.0) == [again]
    assert seats.release(flood[5], 0.0) == [] and not flood[5].is_seated


def test_within_a_tenant_seats_are_given_in_order_of_arrival() -> None:
    seats = Seats(1)
    first, second, third = (ask(seats, "a") for _ in range(3))
    assert seats.release(first, 0.0) == [second]
    assert seats.release(first, 0.0) == [] and seats.release(second, 0.0) == [third]


def test_within_a_tenant_the_one_that_is_due_first_has_the_next_seat() -> None:
    seats = Seats(1)
    first, slack = ask(seats, "a"), ask(seats, "a", 8_000)
    none, urgent = ask(seats, "a"), ask(seats, "a", 500)
    other = ask(seats, "b")
    assert seats.release(first, 0.0) == [urgent]
    assert seats.release(urgent, 0.0) == [slack]
    assert seats.release(slack, 0.0) == [none]
    assert seats.release(none, 0.0) == [other]


def test_requests_of_the_lowest_priority_wait_until_no_other_request_waits() -> None:
    seats = Seats(1)
    first = ask(seats, "a")
    item = seats.request("idle", ttft_objective(0.0, 100), 0.0, yields=True)
    late, later = ask(seats, "a", 9_000), ask(seats, "a", 9_500)
    own_item = seats.request("a", ttft_objective(0.0, 100), 0.0, yields=True)
    assert seats.release(first, 0.0) == [late]
    assert seats.release(late, 0.0) == [later]
    assert seats.release(later, 0.0) == [item]
    assert seats.release(item, 0.0) == [own_item]


def test_flexible_requests_leave_a_seat_that_a_client_takes_at_once() -> None:
    seats = Seats(16)
    items = [seats.request("idle", ttft_objective(0.0, 100), 0.0, yields=True) for _ in range(20)]
    assert sum(item.is_seated for item in items) == 15
    client, other = ask(seats, "a"), ask(seats, "a")
    assert client.is_seated
    for item in items:
        seats.record_start(item, 0.0)
    # The next seat is the waiting client's; then items must leave one free again.
    assert seats.release(items[0], 0.0) == [other]
    assert seats.release(items[1], 0.0) == []
    assert seats.release(client, 0.0) == [items[15]]


def test_beside_another_tenant_a_floods_requests_start_one_after_another() -> None:
    """Their prompts would otherwise be in one long step, which the other tenant waits for."""
    seats = Seats(16, spare=2)
    flood = [ask(seats, "flood") for _ in range(40)]
    assert sum(request.is_seated for request in flood) == 16
    small = ask(seats, "small")
    assert small.is_seated
    ended, running = flood[:6], flood[6:16]
    for request in flood[:16]:
        seats.record_start(request, 0.0)
    begun = [seats.release(request, 0.0) for request in ended]
    assert begun == [[], [flood[16]], [], [], [], []]
    assert seats.record_start(flood[16], 0.0) == [flood[17]]
    assert seats.record_start(flood[16], 0.0) == []
    # Its place is free, too, if it ends without a token.
    assert seats.release(flood[17], 0.0) == [flood[18]]
    # Up to its share a tenant's requests start at once, and those of others at any time.
    for request in running[:6]:
        seats.release(request, 0.0)
    assert sum(request.is_seated for request in flood[:18]) == 5
    assert sum(request.is_seated for request in flood[18:]) == 3
    assert ask(seats, "third").is_seated


def test_a_flood_has_the_engine_for_itself_again_some_time_after_the_last_other_request() -> None:
    seats = Seats(16, spare=2)
    flood = [ask(seats, "flood") for _ in range(60)]
    small = ask(seats, "small")
    for request in (*flood[:16], small):
        seats.record_start(request, 0.0)
    seats.release(small, 5.0)
    for request in flood[:8]:
        seats.release(request, 5.0)
    assert sum(request.is_seated for request in flood[16:]) == 1
    seats.record_start(flood[16], 5.0 + ACTIVE_S)
    assert sum(request.is_seated for request in flood[16:]) == 8


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 20_000)), st.booleans()),
        max_size=60,
    )
)
def test_objectives_change_no_tenants_share(steps: list[tuple[int, int | None, bool]]) -> None:
    """A seat goes to a tenant with fewest, whatever its requests and those of others are due."""
    seats, waiting, seated = Seats(2), list[SeatRequest](), list[SeatRequest]()
    for now_s, (tenant, ttft_ms, ends) in enumerate(steps):
        objective = ttft_objective(now_s, ttft_ms)
        request = seats.request(str(tenant), objective, now_s)
        seats.record_start(request, now_s)
        (seated if request.is_seated else waiting).append(request)
        if ends and seated:
            ended = seated.pop(0)
            taken = Counter(other.tenant for other in seated)
            begun = seats.release(ended, now_s)
            assert len(begun) == min(1, len(waiting))
            for following in begun:
                seats.record_start(following, now_s)
                assert taken[following.tenant] == min(taken[other.tenant] for other in waiting)
                waiting.remove(following)
                seated.append(following)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_no_seat_is_lost_or_given_twice(steps: list[tuple[int, int]]) -> None:
    seats, requests = Seats(3, spare=1), []
    for tenant, released in steps:
        requests.append(ask(seats, str(tenant)))
        if released < len(requests):
            seats.release(requests.pop(released), 0.0)
        for request in requests:
            seats.record_start(request, 0.0)
        seated = sum(request.is_seated for request in requests)
        assert seated <= 4 and (seated >= min(3, len(requests)))
    for request in requests:
        seats.release(request, 0.0)
    assert not seats._taken and not seats._waiting and not seats._starting


async def test_a_wait_that_is_cancelled_takes_no_seat() -> None:
    seats = EngineSeats(1)
    order: list[str] = []

    async def use(name: str, done: asyncio.Event) -> None:
        async with seats.seat("tenant"):
            order.append(name)
            await done.wait()

    done = asyncio.Event()
    tasks = [asyncio.create_task(use(name, done)) for name in "abc"]
    while len(seats._seated) < 2:
        await asyncio.wait(tasks, timeout=0)
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    assert order == ["a"]
    done.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert order == ["a", "c"]
    assert not seats._seated


async def test_a_request_that_time_alone_gives_a_seat_does_not_wait_on() -> None:
    now_s, done = 0.0, asyncio.Event()
    seats = EngineSeats(4, clock=lambda: now_s)
    names: list[str] = []

    async def use(name: str) -> None:
        async with seats.seat("flood", TtftObjective(prefill_s=60.0)):
            names.append(name)
            await done.wait()

    async with seats.seat("small"):
        pass
    tasks = [asyncio.create_task(use(name)) for name in "abc"]
    while not seats._seated:
        await asyncio.wait(tasks, timeout=0)
    assert names == ["a", "b"], "half of the seats while another tenant uses the engine"
    now_s = ACTIVE_S
    tasks.append(asyncio.create_task(use("d")))
    for _ in range(20):
        await asyncio.wait(tasks, timeout=0)
    assert sorted(names) == ["a", "b", "c", "d"]
    done.set()
    await asyncio.gather(*tasks)


def test_tenants_that_are_gone_take_no_memory() -> None:
    seats = Seats(16)
    for number in range(1000):
        now_s = float(number)
        request = seats.request(f"tenant {number}", TtftObjective(now_s), now_s)
        seats.record_start(request, now_s)
        seats.release(request, now_s)
    assert list(seats._last_used_s) == [f"tenant {number}" for number in range(990, 1000)]


@pytest.mark.parametrize(("tokens", "spare"), [("256", 0), ("260", 4), ("2k", 32), ("128", 0)])
def test_vllm_has_no_more_seats_than_tokens_of_a_step(tokens: str, spare: int) -> None:
    """It refuses to start with more (`SchedulerConfig.verify_max_model_len`)."""
    options = {"max_num_seqs": "256", "max_num_batched_tokens": tokens}
    spec = a_spec(engine=EngineSettings(driver="vllm", options=options))
    assert (sequences_max(spec), spare_seats_of(spec)) == (256, spare)
    assert with_spare_seats(DRIVERS["vllm"], options)["max_num_seqs"] == str(256 + spare)


@pytest.mark.parametrize(
    ("driver", "option"), [("vllm", "max-num-seqs"), ("sglang", "max-running-requests")]
)
def test_vendor_engines_are_started_with_spare_seats(
    driver: str, option: str, tmp_path: Path
) -> None:
    engine = EngineSettings(driver=driver, options={option.replace("-", "_"): "16"})
    spec = a_spec(engine=engine)
    launch = EngineLaunch(spec=spec, folder=tmp_path, model_path=tmp_path, port=1, threads=1)
    arguments = DRIVERS[driver].command(launch).arguments
    assert arguments[arguments.index(f"--{option}") + 1] == str(16 + spare_seats(16))
    assert (sequences_max(spec), spare_seats_of(spec)) == (16, spare_seats(16))
    unknown = a_spec(engine=EngineSettings(driver=driver))
    assert spare_seats_of(unknown) == 0
    assert ask(Seats(0), "any").is_seated

"""What a vendor engine runs, and what waits on the node: fairly between tenants."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.model import EngineSettings
from nodeagent.decide.seats import Seats, spare_seats
from nodeagent.drivers import DRIVERS, sequences_max, spare_seats_of
from nodeagent.drivers.driver import EngineLaunch
from nodeagent.host.engine_seats import EngineSeats
from tests.builders import a_spec


def test_a_flood_gets_all_seats_of_the_option_and_others_the_spare_ones() -> None:
    seats = Seats(4, spare=2)
    flood = [seats.request("flood") for _ in range(7)]
    assert [request.is_seated for request in flood] == [True] * 4 + [False] * 3
    small, again = seats.request("small"), seats.request("small")
    assert small.is_seated and not again.is_seated
    assert seats.request("third").is_seated
    fourth = seats.request("fourth")
    assert not fourth.is_seated
    # The next one is of the tenant with fewest, however long the flood has waited.
    assert seats.release(flood[0]) == [fourth]
    assert seats.release(small) == [again]
    assert seats.release(flood[5]) == [] and not flood[5].is_seated


def test_within_a_tenant_seats_are_given_in_order_of_arrival() -> None:
    seats = Seats(1)
    first, second, third = (seats.request("a") for _ in range(3))
    assert seats.release(first) == [second]
    assert seats.release(first) == [] and seats.release(second) == [third]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_no_seat_is_lost_or_given_twice(steps: list[tuple[int, int]]) -> None:
    seats, requests = Seats(3, spare=1), []
    for tenant, released in steps:
        requests.append(seats.request(str(tenant)))
        if released < len(requests):
            seats.release(requests.pop(released))
        seated = sum(request.is_seated for request in requests)
        assert seated <= 4 and (seated >= min(3, len(requests)))
    for request in requests:
        seats.release(request)
    assert not seats._taken and not seats._waiting


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
    assert Seats(0).request("any").is_seated

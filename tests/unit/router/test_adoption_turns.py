"""Requests have their turns while a table is checked, refused, merged and adopted."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from isochrone.wire.ids import Generation
from isochrone.wire.peers.routes import RouteTable, diff
from router.decide.routes.route_directory import RouteDirectory
from router.decide.routes.table_acceptance import SILENCE_COUNTS_AFTER_S
from router.fleet_state import FleetState
from router.loops import follow_routes
from router.loops.follow_routes import LOG_AGAIN_S
from tests.unit.router.test_follow_routes import Bench, a_route, a_table, withdraw


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def send(message: object) -> bool:
    raise AssertionError(f"sent {message}")


def finish(job: Coroutine[Any, Any, Any]) -> Any:
    """Run a job to its end without any other turn; return its result."""
    while True:
        try:
            job.send(None)
        except StopIteration as end:
            return end.value


async def quarantine(bench: Bench) -> RouteTable:
    """Have the follower refuse a table that drops three replicas of four; return it."""
    await bench.offer("abcd", 1)
    bench.now_s += SILENCE_COUNTS_AFTER_S
    bench.probe("abcd")
    await bench.offer("a", 2)
    assert bench.follower.quarantined is not None
    return a_table("a", 2)


async def test_no_table_is_indexed_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand routes take ten milliseconds; a scheduler that takes over sends many changes."""

    def adopt(self: RouteDirectory, table: RouteTable) -> None:
        raise AssertionError(f"generation {table.generation} is indexed at once")

    monkeypatch.setattr(RouteDirectory, "adopt", adopt)
    refused = await quarantine(bench)
    more = a_table("ae", 3)
    await bench.follower.on_table(diff(refused, more), send)
    assert bench.served() == "abcde"
    bench.probe("", disowned="bcd")
    assert await bench.follower.recheck() == "accepted"
    assert bench.served() == "ae"
    (entry,) = more.deployments
    renamed = msgspec.structs.replace(
        a_table("ae", 4), deployments=(msgspec.structs.replace(entry, name="other"),)
    )
    await bench.follower.on_table(diff(more, renamed), send)
    assert bench.fleet.directory.deployment("other") is not None
    await bench.follower.accept_change(diff(renamed, a_table("aef", 5)))
    assert bench.served() == "aef"


async def test_a_check_and_what_follows_it_are_different_turns(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any) -> Any:
            done.append(name)
            return function(*arguments)

        return note

    await bench.offer("abcd", 1)
    bench.now_s += SILENCE_COUNTS_AFTER_S
    bench.probe("abcd")
    monkeypatch.setattr(FleetState, "adopt", noted("adopt", FleetState.adopt))
    for name in ("check_table", "merge_additions"):
        monkeypatch.setattr(follow_routes, name, noted(name, getattr(follow_routes, name)))
    for table, expected in (
        (a_table("abcde", 2), ["check_table", "adopt"]),
        (a_table("f", 3), ["check_table", "merge_additions", "adopt"]),
    ):
        done.clear()
        turns, job = list[str](), bench.follower.on_table(table, send)
        while True:
            try:
                job.send(None)
            except StopIteration:
                break
            assert len(done) <= 1
            turns += done
            done.clear()
        assert turns + done == expected


async def test_a_table_that_stays_refused_is_logged_now_and_then(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> int:
        return sum(record.message == "table refused" for record in caplog.records)

    await quarantine(bench)
    for generation in range(3, 9):
        await bench.offer("a", generation)
    assert lines() == 1
    assert bench.follower.quarantined is not None
    assert bench.follower.quarantined.table.generation == 8
    bench.now_s += LOG_AGAIN_S
    bench.probe("abcd")
    await bench.offer("a", 9)
    assert lines() == 2
    # Another one is logged at once.
    bench.probe("", disowned="bcd")
    assert await bench.follower.recheck() == "accepted"
    await bench.offer("abcd", 10)
    bench.probe("abcd")
    await bench.offer("b", 11)
    assert lines() == 3


async def test_a_refused_table_that_was_accepted_meanwhile_is_not_undone(bench: Bench) -> None:
    await bench.offer("abcd", 1)
    bench.now_s += SILENCE_COUNTS_AFTER_S
    bench.probe("abcd")
    job = bench.follower.on_table(a_table("ae", 2), send)
    job.send(None)
    assert bench.follower.quarantined is not None
    bench.probe("", disowned="bcd")
    assert await bench.follower.recheck() == "accepted"
    finish(job)
    assert (bench.served(), bench.follower.progress().generation) == ("ae", 2)


async def test_a_newer_table_is_not_undone_by_one_that_is_checked_again(bench: Bench) -> None:
    await quarantine(bench)
    bench.probe("", disowned="bcd")
    job = bench.follower.recheck()
    job.send(None)
    await bench.offer("ab", 3)
    assert finish(job) == "a newer table has come"
    assert (bench.served(), bench.follower.progress().generation) == ("ab", Generation(3))


async def test_withdrawn_replicas_that_are_gone_again_have_no_table_indexed_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await withdraw(bench, "abc")
    for name in "abc":
        bench.follower.record_answer(a_route(name), "")
    bench.probe("", disowned="ab")
    monkeypatch.setattr(RouteDirectory, "adopt", None)
    job = bench.follower.recheck()
    job.send(None)
    # A table that comes meanwhile is served without them, too.
    await bench.offer("", 3)
    assert bench.served() == "c"
    finish(job)
    assert (bench.served(), bench.follower.progress().generation) == ("c", 3)

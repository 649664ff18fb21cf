"""Print the CPU time of the longest step in which a router follows each change of its table.

    python -m ops.bench.table_steps [--replicas N] [--keys N]

Requests have their turn between two steps. The table follower, with its real fleet state, runs
without an event loop: each of its coroutines is resumed step by step, and the CPU time of each step
is measured. All nodes have answered a ping, all replicas have a reported load, and all deployments
have had requests.
"""

import argparse
import asyncio
import gc
import logging
import time
from collections.abc import Coroutine, Generator, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.ids import Generation, PopId
from isochrone.wire.peers.routes import (
    KeyLimits,
    Pop,
    Route,
    RouteDelta,
    RouteTable,
    apply_delta,
    diff,
)
from ops.bench.large_table import CLUSTER, POPS, make_key, make_table
from router.build import is_compiled
from router.decide.admission.limits import KeyLimiter
from router.fleet_state import FleetState
from router.loops.follow_routes import TableFollower
from router.recording.metrics import Metrics

REPEATS: Final = 5
LONG_AGO_S: Final = 3600.0
RETURNED_AT_FIRST: Final = 100
RETURNED_AT_ONCE: Final = 50
WITHDRAWN_DEPLOYMENTS: Final = 30
"""Enough that more replicas are withdrawn than a router remembers."""


class StepTimes(NamedTuple):
    """The CPU times in ms: of the longest step, and of all; and where the longest began."""

    longest_ms: float
    total_ms: float
    steps: int
    began: str


class DrivenFollower:
    """A router's table follower, driven step by step."""

    def __init__(self, table: RouteTable) -> None:
        self.now_s = LONG_AGO_S
        self.fleet = FleetState(PopId("p000"), lambda: self.now_s, "bench")
        self.follower = TableFollower(
            fleet=self.fleet,
            limiter=KeyLimiter(),
            metrics=Metrics(),
            cluster_id=CLUSTER,
            snapshot=Path("/nonexistent"),
            clock=lambda: self.now_s,
        )
        self.table = table

    def start(self) -> StepTimes:
        """Follow the first table."""
        return self._follow(self.table)

    def use(self) -> None:
        """Have all nodes answered, and all replicas used."""
        self.now_s += LONG_AGO_S
        for route in self.table.routes:
            self.fleet.nodes.record_round_trip(route.node_id, 20.0, self.now_s)
            self.fleet.in_flight.record_report(route.replica_id, 100, 100, self.now_s)
        for entry in self.table.deployments:
            self.fleet.snapshot(entry.deployment_id, self.fleet.clock())

    def change(self, **fields: Any) -> StepTimes:
        """Follow a delta with these changes of the last table's fields."""
        changed = msgspec.structs.replace(self._next(), **fields)
        return self._send_delta(diff(self.table, changed))

    def change_keys(self) -> StepTimes:
        """Follow a delta of one key."""
        key = make_key(len(self.table.keys), KeyLimits())
        return self._send_delta(
            RouteDelta(
                cluster_id=CLUSTER,
                base=self.table.generation,
                generation=Generation(self.table.generation + 1),
                epoch=self.table.epoch,
                keys_set=(key,),
            )
        )

    def replace(self, **fields: Any) -> StepTimes:
        """Follow a whole table with these changes of the last one's fields."""
        self.table = msgspec.structs.replace(self._next(), **fields)
        return self._follow(self.table)

    def answer(self, routes: Iterable[Route]) -> StepTimes:
        """Have withdrawn replicas serve again; each is a step of its own."""
        steps = []
        for route in routes:
            began = time.thread_time()
            self.follower.record_answer(route, "")
            steps.append((1000 * (time.thread_time() - began), "record_answer"))
        return _summary(steps)

    def recheck(self) -> StepTimes:
        """Check a refused table again."""
        return drive(self.follower.recheck())

    def forget(self) -> StepTimes:
        """Drop what is known of replicas that have left the table, as before a table is written."""

        async def forget() -> None:
            while self.fleet.forget_removed():  # noqa: ASYNC110 - it waits for nothing
                await asyncio.sleep(0)

        return drive(forget())

    def _next(self) -> RouteTable:
        return msgspec.structs.replace(self.table, generation=Generation(self.table.generation + 1))

    def _send_delta(self, delta: RouteDelta) -> StepTimes:
        self.table = apply_delta(self.table, delta)
        return self._follow(delta)

    def _follow(self, message: RouteTable | RouteDelta) -> StepTimes:
        async def send(wanted: msgspec.Struct) -> bool:
            raise SystemExit(f"cannot follow: the router asks for {wanted}")

        return drive(self.follower.on_table(message, send))


def drive(coroutine: Coroutine[Any, Any, Any]) -> StepTimes:
    """Run a coroutine that pauses only with `sleep(0)`; measure each of its steps."""
    steps: list[tuple[float, str]] = []
    began_at = "its start"
    gc.collect()
    gc.disable()
    try:
        while True:
            began = time.thread_time()
            try:
                coroutine.send(None)
            except StopIteration:
                steps.append((1000 * (time.thread_time() - began), began_at))
                return _summary(steps)
            steps.append((1000 * (time.thread_time() - began), began_at))
            began_at = _location(coroutine)
    finally:
        gc.enable()


def _location(coroutine: Coroutine[Any, Any, Any]) -> str:
    """Return the function in which a coroutine is paused, and the line."""
    inner: Any = coroutine
    found = ""
    while inner is not None and not isinstance(inner, Generator):
        frame = getattr(inner, "cr_frame", None)
        if frame is None:
            break
        if not frame.f_code.co_filename.endswith("tasks.py"):
            found = f"{frame.f_code.co_name}:{frame.f_lineno}"
        inner = inner.cr_await
    return found


def _summary(steps: list[tuple[float, str]]) -> StepTimes:
    longest_ms, began = max(steps)
    return StepTimes(longest_ms, sum(ms for ms, _ in steps), len(steps), began)


def with_version(routes: tuple[Route, ...], numbers: range, version: int) -> tuple[Route, ...]:
    """Return the routes, of which some have another version."""
    changed = list(routes)
    for number in numbers:
        changed[number] = msgspec.structs.replace(changed[number], version=version)
    return tuple(changed)


def make_pops(longitude: float) -> tuple[Pop, ...]:
    """Return the PoPs of the table."""
    return tuple(
        Pop(pop=PopId(f"p{n:03d}"), city=f"c{n}", country="NL", latitude=n / 3, longitude=longitude)
        for n in range(POPS)
    )


def scenarios(table: RouteTable) -> Iterable[tuple[str, StepTimes]]:
    """Measure each kind of change once."""
    bench = DrivenFollower(table)
    yield "the first table", bench.start()
    bench.use()
    routes = table.routes
    one = with_version(routes, range(7, 8), 2)
    yield "one key changes", bench.change_keys()
    yield "one replica changes", bench.change(routes=one)
    some = with_version(one, range(100, 150), 3)
    yield "50 replicas of 50 deployments change", bench.change(routes=some)
    many = with_version(some, range(len(routes)), 4)
    yield "all replicas change", bench.change(routes=many)
    bench.use()
    yield "the PoPs move", bench.change(pops=make_pops(5.0))
    entry = msgspec.structs.replace(table.deployments[0], context_tokens=4096)
    yield "one deployment changes", bench.change(deployments=(entry, *table.deployments[1:]))
    yield (
        "a table lacks every third replica",
        bench.replace(routes=tuple(route for number, route in enumerate(many) if number % 3)),
    )
    yield "the third is back", bench.replace(routes=many)
    bench.use()
    yield "a table lacks nearly all, refused", bench.replace(routes=many[:RETURNED_AT_FIRST])
    yield (
        "50 are back, refused again",
        bench.change(
            routes=with_version(
                many[: RETURNED_AT_FIRST + RETURNED_AT_ONCE],
                range(RETURNED_AT_FIRST, RETURNED_AT_FIRST + RETURNED_AT_ONCE),
                5,
            )
        ),
    )
    yield "it is checked again, refused", bench.recheck()
    bench.now_s += LONG_AGO_S
    yield "it is checked again, accepted", bench.recheck()
    yield "what is known of the others is dropped", bench.forget()
    yield "all are back", bench.replace(routes=many)
    bench.use()
    yield from withdrawn_scenarios(bench, many)


def withdrawn_scenarios(
    bench: DrivenFollower, routes: tuple[Route, ...]
) -> Iterable[tuple[str, StepTimes]]:
    """Measure what happens to deployments that lose all of their routes."""
    entries = bench.table.deployments[:WITHDRAWN_DEPLOYMENTS]
    unrouted = {entry.deployment_id for entry in entries}
    left = tuple(route for route in routes if route.deployment_id not in unrouted)
    yield f"{len(unrouted)} deployments lose their replicas", bench.change(routes=left)
    asked = bench.follower.dropped()
    yield f"{len(asked)} withdrawn replicas serve again, each", bench.answer(asked)
    yield "one key changes, they are served", bench.change_keys()
    changed = with_version(left, range(7, 8), 9)
    yield "one replica changes, they are served", bench.change(routes=changed)
    for route in asked[:RETURNED_AT_ONCE]:
        bench.fleet.nodes.record_refusal(route.replica_id, "unknown_replica")
    yield f"{RETURNED_AT_ONCE} of them are gone again", bench.recheck()
    bench.now_s += 1.0
    yield "all are back, none is withdrawn", bench.replace(routes=routes)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=10_000)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    table = make_table(given.keys, given.replicas)
    table = msgspec.structs.replace(table, pops=make_pops(4.9))
    best: dict[str, StepTimes] = {}
    for _ in range(REPEATS):
        for name, times in scenarios(table):
            best[name] = min(times, best.get(name, times))
    build = "compiled" if is_compiled() else "interpreted"
    print(f"{given.replicas} replicas, {given.keys} keys, {build}: CPU time in ms")
    print(
        f"| change | longest step | all steps | steps | the longest begins after |\n|{'---|' * 5}"
    )
    for name, times in best.items():
        figures = f"{times.longest_ms:.1f} | {times.total_ms:.1f} | {times.steps}"
        print(f"| {name} | {figures} | {times.began} |")


if __name__ == "__main__":
    main()

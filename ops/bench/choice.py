"""What a choice costs: picture, prefix match and ranking over 200 routes with 64 prefix keys.

    python -m ops.bench.choice

The fleet is a router's own (`router.fleet.Fleet`), warmed with traffic; its time is passed in. What
is measured is the thread's CPU time: on a shared machine the wall clock also shows its neighbours.
Prints the table of ops/bench/choice.md.
"""

import gc
import random
import statistics
from collections.abc import Callable
from time import thread_time_ns
from typing import Final

from isochrone.wire.headers import ReportedLoad
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.routes import DeploymentEntry, Pop, Route, RouteTable
from router.decide.pick import Ask, rank
from router.decide.prefixes import PrefixKeys, ends_of, keys_of
from router.fleet import Fleet

ROUTES: Final = 200
KEYS: Final = 64
POPS: Final = 20
ROUNDS: Final = 4000
DEPLOYMENT: Final = DeploymentId("d")


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def a_fleet(clock: Clock, routes: int, seed: int) -> Fleet:
    """Return a router of one PoP with `routes` replicas in twenty."""
    chance = random.Random(seed)
    fleet = Fleet(PopId("p00"), clock)
    pops = tuple(
        Pop(
            pop=PopId(f"p{n:02}"),
            city=f"p{n}",
            country="NL",
            latitude=chance.uniform(-50, 60),
            longitude=chance.uniform(-180, 180),
        )
        for n in range(POPS)
    )
    fleet.adopt(
        RouteTable(
            cluster_id=ClusterId("c"),
            generation=Generation(1),
            epoch=Epoch(1),
            pops=pops,
            deployments=(
                DeploymentEntry(
                    deployment_id=DEPLOYMENT, name="m", model_id=ModelId("m"), context_tokens=8192
                ),
            ),
            routes=tuple(
                Route(
                    replica_id=ReplicaId(f"r{n:03}"),
                    deployment_id=DEPLOYMENT,
                    version=1,
                    node_id=NodeId(f"n{n:03}"),
                    pop=pops[n % POPS].pop,
                    address="x:1",
                    tokens_in_flight_max=400_000,
                    prefill_tokens_per_s=chance.choice((5300.0, 9600.0)),
                )
                for n in range(routes)
            ),
        )
    )
    return fleet


def a_prompt(chance: random.Random) -> PrefixKeys:
    """Return a chain of 64 keys: a system prompt that all share, then a conversation's own."""
    conversation = chance.randrange(400)
    length = ends_of(10**7, keys_max=KEYS)[-1] + 1
    words = random.Random(conversation).randbytes(length)
    return keys_of(bytes(2048) + words[2048:], 7)


def busy(
    fleet: Fleet, clock: Clock, chance: random.Random, alike: bool, at_once: int
) -> Callable[[int], None]:
    """Return one turn of traffic: a choice, what is booked for it, and what answers tell."""
    prompts = [a_prompt(chance) for _ in range(300)]
    open_requests = []

    def turn(number: int) -> None:
        clock.now_s += 0.004
        keys = prompts[number % len(prompts)]
        ask = Ask(f"q{number}", 6000, 300, held=fleet.held(DEPLOYMENT, keys))
        ranked = rank(fleet.view(DEPLOYMENT), ask)[0]
        held = fleet.reserve(ranked.route, prefill=ranked.uncached_tokens, decode=300)
        fleet.sent(ranked, keys)
        open_requests.append((ranked, held))
        if len(open_requests) > at_once:
            ranked, held = open_requests.pop(chance.randrange(at_once // 2))
            fleet.heard(ranked.route, ReportedLoad(chance.randrange(20_000), 4000, 9, 0))
            fleet.first_token(ranked, ranked.ttft_ms * chance.uniform(0.9, 1.4), held)
            held.release()

    if alike:
        for node in range(len(fleet.nodes())):
            fleet.measured(NodeId(f"n{node:03}"), 1.0)
    return turn


def time_choices(
    fleet: Fleet, prompts: list[PrefixKeys], turn: Callable[[int], None]
) -> dict[str, list[float]]:
    """Return microseconds by step of many choices, with traffic going on between them."""
    took: dict[str, list[float]] = {"picture": [], "prefix match": [], "rank": [], "all": []}
    for number in range(ROUNDS):
        turn(number)
        keys = prompts[number % len(prompts)]
        began = thread_time_ns()
        held = fleet.held(DEPLOYMENT, keys)
        matched = thread_time_ns()
        picture = fleet.view(DEPLOYMENT)
        seen = thread_time_ns()
        first = rank(picture, Ask(f"r{number}", 6000, 300, held=held))[0]
        ended = thread_time_ns()
        assert first.ttft_ms >= 0
        took["prefix match"].append((matched - began) / 1000)
        took["picture"].append((seen - matched) / 1000)
        took["rank"].append((ended - seen) / 1000)
        took["all"].append((ended - began) / 1000)
    return took


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def row(name: str, values: list[float]) -> str:
    """Return one line of the table."""
    figures = [statistics.median(values), percentile(values, 0.9), percentile(values, 0.99)]
    return f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |"


def main() -> None:
    """Time each case and print the table."""
    gc.collect()
    gc.freeze()
    print("| case | p50 us | p90 us | p99 us |\n|---|---|---|---|")
    for name, routes, alike in (
        (f"{ROUTES} routes in {POPS} PoPs", ROUTES, False),
        (f"{ROUTES} routes, all equally near", ROUTES, True),
        ("3 routes", 3, False),
    ):
        clock, chance = Clock(), random.Random(1)
        fleet = a_fleet(clock, routes, 2)
        turn = busy(fleet, clock, chance, alike, routes * 2)
        for number in range(3000):
            turn(number)
        prompts = [a_prompt(chance) for _ in range(300)]
        for step, values in time_choices(fleet, prompts, turn).items():
            print(row(f"{name}: {step}", values))
    body = random.Random(3).randbytes(ends_of(10**7, keys_max=KEYS)[-1])
    hashed = []
    for _ in range(2000):
        began = thread_time_ns()
        keys_of(body, 1)
        hashed.append((thread_time_ns() - began) / 1000)
    print(row(f"hashing a prompt of {len(body) // 1000} kB into {KEYS} keys", hashed))


if __name__ == "__main__":
    main()

"""Measures ranking: snapshot, prefix match and ranking over up to 10,000 routes with 64 keys.

    python -m ops.bench.choice

The fleet state is the router's own, warmed up with traffic on a manual clock. The times are CPU
time of the thread, because on a shared machine the wall clock also includes other processes.
Prints the table of ops/bench/choice.md.
"""

import argparse
import gc
import random
import statistics
from collections.abc import Callable
from time import thread_time_ns
from typing import Final

from isochrone.wire.http.headers import ReportedLoad
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
from isochrone.wire.peers.routes import DeploymentEntry, Pop, Route, RouteTable
from ops.sim.measure import percentile
from router.decide.caches.prefix_index import PrefixKeys, block_ends, prefix_keys
from router.decide.choice.ranking import RouteQuery, rank
from router.decide.liveness.probe_plan import plan_groups
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.tokens_in_flight import Reservation
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState

ROUTES: Final = 200
KEYS: Final = 64
POPS: Final = 20
ROUNDS: Final = 4000
WARM_UP_ROUNDS: Final = 3000
PROMPTS: Final = 300
HASHED_PROMPTS: Final = 2000
CONCURRENT_MAX: Final = 2000
"""This router's requests in flight, at most: with more, none would be answered before the end."""

TURN_S: Final = 0.004
LOADS_EVERY_S: Final = 2.0
"""In a fleet of more than PING_ALL_NODES_MAX nodes, another node reports the loads of a group of
them. Each node's load arrives this often (`router/config.py`: probe_interval_s)."""

IDLE_SHARE: Final = 0.3
"""The share of reports without prompts that wait, and the mean of the prompts' tokens otherwise."""

PENDING_TOKENS_MEAN: Final = 4000.0

HARDLY_USED: Final = 0.95
"""The share of idle reports in a fleet at night, in which thousands of replicas cost the same."""
DEPLOYMENT: Final = DeploymentId("d")
BEST_OF: Final = "all, best of 4"


class ManualClock:
    """Seconds that pass only when they are set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s


def make_fleet(clock: ManualClock, routes: int, seed: int, pop_count: int = POPS) -> FleetState:
    """Return the fleet state of one PoP's router, with `routes` replicas in `pop_count` PoPs."""
    chance = random.Random(seed)
    fleet = FleetState(PopId("p00"), clock)
    pops = tuple(
        Pop(
            pop=PopId(f"p{n:02}"),
            city=f"p{n}",
            country="NL",
            latitude=chance.uniform(-50, 60),
            longitude=chance.uniform(-180, 180),
        )
        for n in range(pop_count)
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
                    replica_id=ReplicaId(f"r{n:05}"),
                    deployment_id=DEPLOYMENT,
                    version=1,
                    node_id=NodeId(f"n{n:05}"),
                    pop=pops[n % pop_count].pop,
                    address="x:1",
                    tokens_in_flight_max=400_000,
                    prefill_tokens_per_s=chance.choice((5300.0, 9600.0)),
                )
                for n in range(routes)
            ),
        )
    )
    return fleet


def make_prompt(chance: random.Random) -> PrefixKeys:
    """Return a chain of KEYS keys: a shared system prompt, then a conversation's own text."""
    conversation = chance.randrange(400)
    length = block_ends(10**7, keys_max=KEYS)[-1] + 1
    text = random.Random(conversation).randbytes(length)
    return prefix_keys(bytes(2048) + text[2048:], 7)


def load_reports(
    fleet: FleetState, clock: ManualClock, chance: random.Random, idle_share: float
) -> Callable[[], None]:
    """Return a function that delivers the loads of other routers' requests that are due now."""
    plan = plan_groups(fleet.directory.node_pops(), router="r", failed_at_s={}, now_s=0.0)
    probes = ProbeFeedback(fleet)
    began_s, group_count, delivered = clock.now_s, len(plan.groups), 0

    def report() -> None:
        nonlocal delivered
        due = int((clock.now_s - began_s) / LOADS_EVERY_S * group_count)
        for number in range(delivered, due):
            for node_id in plan.groups[number % group_count].node_ids:
                is_idle = chance.random() < idle_share
                pending = 0 if is_idle else int(chance.expovariate(1 / PENDING_TOKENS_MEAN))
                load = ReportedLoad(pending, 4000, 9, pending, pending, 4000)
                replica_ids = fleet.directory.replicas_on(node_id)
                probes.record_relayed(node_id, 0.2, dict.fromkeys(replica_ids, load))
            fleet.refresh_changed((DEPLOYMENT,))
        delivered = due

    return report


def traffic_turn(
    fleet: FleetState,
    clock: ManualClock,
    chance: random.Random,
    concurrent: int,
    idle_share: float,
) -> Callable[[int], None]:
    """Return a function that sends one request and lets an earlier one be answered.

    In a large fleet it also delivers the loads that other nodes report meanwhile.
    """
    prompts = [make_prompt(chance) for _ in range(PROMPTS)]
    attempts = AttemptFeedback(fleet)
    in_flight: list[tuple[RankedRoute, Reservation]] = []
    report = load_reports(fleet, clock, chance, idle_share)

    def turn(number: int) -> None:
        clock.now_s += TURN_S
        report()
        keys = prompts[number % len(prompts)]
        matches = fleet.routing(DEPLOYMENT).prefix_matches(keys)
        query = RouteQuery(f"q{number}", 6000, 300, matches=matches)
        ranked = rank(fleet.snapshot(DEPLOYMENT, fleet.clock()), query)[0]
        reservation = attempts.reserve(
            ranked.route, fleet.clock(), prefill=ranked.uncached_tokens, decode=300
        )
        attempts.record_sent(ranked, fleet.clock(), keys)
        in_flight.append((ranked, reservation))
        if len(in_flight) > concurrent:
            ranked, reservation = in_flight.pop(chance.randrange(concurrent // 2))
            load = ReportedLoad(chance.randrange(20_000), 4000, 9, 0)
            attempts.record_answer_head(ranked.route, load)
            took_ms = ranked.ttft_ms * chance.uniform(0.9, 1.4)
            attempts.record_first_token(ranked, took_ms, reservation)
            reservation.release()

    return turn


def time_rankings(
    fleet: FleetState, prompts: list[PrefixKeys], turn: Callable[[int], None]
) -> dict[str, list[float]]:
    """Return the microseconds of each step of many rankings, with traffic between them.

    `best of 4` repeats a ranking and takes the fastest: on a busy machine the others show mostly
    what other processes do to caches.
    """
    steps = ("snapshot", "prefix match", "rank", "all", BEST_OF)
    took_us: dict[str, list[float]] = {step: [] for step in steps}
    for number in range(ROUNDS):
        turn(number)
        keys = prompts[number % len(prompts)]
        began = thread_time_ns()
        matches = fleet.routing(DEPLOYMENT).prefix_matches(keys)
        matched = thread_time_ns()
        snapshot = fleet.snapshot(DEPLOYMENT, fleet.clock())
        frozen = thread_time_ns()
        first = rank(snapshot, RouteQuery(f"r{number}", 6000, 300, matches=matches))[0]
        ended = thread_time_ns()
        assert first.ttft_ms >= 0
        took_us["prefix match"].append((matched - began) / 1000)
        took_us["snapshot"].append((frozen - matched) / 1000)
        took_us["rank"].append((ended - frozen) / 1000)
        took_us["all"].append((ended - began) / 1000)
        fastest = ended - began
        for _ in range(3):
            began = thread_time_ns()
            matches = fleet.routing(DEPLOYMENT).prefix_matches(keys)
            query = RouteQuery(f"r{number}", 6000, 300, matches=matches)
            first = rank(fleet.snapshot(DEPLOYMENT, fleet.clock()), query)[0]
            fastest = min(fastest, thread_time_ns() - began)
        took_us[BEST_OF].append(fastest / 1000)
    return took_us


def table_row(name: str, values: list[float]) -> str:
    """Return one row of the table."""
    figures = [statistics.median(values), percentile(values, 0.9), percentile(values, 0.99)]
    return f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |"


def main() -> None:
    """Time each case and print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    gc.collect()
    gc.freeze()
    print("| case | p50 us | p90 us | p99 us |\n|---|---|---|---|")
    for name, routes, pop_count, is_equally_near, idle_share in (
        (f"{ROUTES} routes in {POPS} PoPs", ROUTES, POPS, False, IDLE_SHARE),
        (f"{ROUTES} routes, all equally near", ROUTES, POPS, True, IDLE_SHARE),
        ("3 routes", 3, POPS, False, IDLE_SHARE),
        ("1,000 routes in 20 PoPs", 1000, 20, False, IDLE_SHARE),
        ("10,000 routes in 200 PoPs", 10_000, 200, False, IDLE_SHARE),
        ("10,000 routes, hardly used", 10_000, 200, False, HARDLY_USED),
    ):
        clock, chance = ManualClock(), random.Random(1)
        fleet = make_fleet(clock, routes, 2, pop_count)
        turn = traffic_turn(fleet, clock, chance, min(CONCURRENT_MAX, routes * 2), idle_share)
        if is_equally_near:
            probes = ProbeFeedback(fleet)
            for node_id in fleet.directory.node_addresses():
                probes.record_round_trip(node_id, 1.0)
        for number in range(WARM_UP_ROUNDS):
            turn(number)
        prompts = [make_prompt(chance) for _ in range(PROMPTS)]
        for step, values in time_rankings(fleet, prompts, turn).items():
            print(table_row(f"{name}: {step}", values))
    body = random.Random(3).randbytes(block_ends(10**7, keys_max=KEYS)[-1])
    hashed_us = []
    for _ in range(HASHED_PROMPTS):
        began = thread_time_ns()
        prefix_keys(body, 1)
        hashed_us.append((thread_time_ns() - began) / 1000)
    print(table_row(f"hashing a prompt of {len(body) // 1000} kB into {KEYS} keys", hashed_us))


if __name__ == "__main__":
    main()

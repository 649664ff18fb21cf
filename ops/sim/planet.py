"""A week of the planet under the production planner, with what goes wrong in a week.

    python -m ops.sim.planet --data ../shared/data --days 7 --plan-min 5

Each minute demand changes, loading replicas may become warm, and requests are served by the nearest
warm replicas up to their full capacity. The cluster state is built as the store builds it and
planned as the scheduler plans it: every `--plan-min` minutes, and whenever a node is lost or
returns, a new model arrives or the rollout takes a step (production is nudged then). Starts take
the time that fetching and loading take.

Planned demand is, by city and deployment, the current demand raised to the production forecast
(`planet_forecast.py`, which has learned the days before). With `--peaks` it is the maximum of the
last ten minutes and of each hour of the day before: the whole day is then planned for its peak.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any, Final

import msgspec
import numpy as np

from isochrone.wire.ids import ClusterId, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.report import ReplicaState
from ops.sim.planet_forecast import PlanetForecast
from ops.sim.planet_rollout import PlanetRollout
from ops.sim.planet_world import PlanetWorld, demand_rows, draw, world_parser
from ops.sim.served import UserTraffic, WarmNodes
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.start_times import (
    DISK_BYTES_PER_S,
    ENGINE_START_S,
    POP_BYTES_PER_S,
    WAN_FAR_BYTES_PER_S,
)
from scheduler.decide.cluster import ClusterState, FleetNode, Placement, PlacementPlan
from scheduler.decide.placement import PlanLimits, plan_fleet, residency_allows
from scheduler.decide.rollout import StartCounts

HOUR: Final = 60
DAY: Final = 24 * HOUR
POP_LOST: Final = (2 * DAY + 12 * HOUR, 2 * DAY + 16 * HOUR)
FLASH: Final = (3 * DAY + 18 * HOUR, 3 * DAY + 20 * HOUR)
FLASH_DEPLOYMENT: Final = 20
FLASH_TIMES: Final = 10.0
NEW_AT: Final = 4 * DAY
NEW_DEPLOYMENT: Final = 12
ROLLOUT_AT: Final = 5 * DAY
ROLLOUT_DEPLOYMENT: Final = 5
LIMITS: Final = PlanLimits(moves_share=0.05, effort=20)
FIRST: Final = PlanLimits(starts_max=10**6, endings_max=10**6, effort=1_500)


class Planet:
    """The state of the fleet between steps, as nodes and the store would hold it.

    Without a `forecast` it plans for known peaks.
    """

    def __init__(
        self, world: PlanetWorld, seed: int, forecast: PlanetForecast | None = None
    ) -> None:
        self.world = world
        self._forecast = forecast
        self.minute = 0
        self.deployments = list(world.deployments)
        self._nodes = {node.node_id: node for node in world.nodes}
        self._artifacts: dict[NodeId, set[str]] = {node.node_id: set() for node in world.nodes}
        self._ready_at: dict[ReplicaId, float] = {}
        self.placements: dict[ReplicaId, Placement] = {}
        self._placed_at: dict[ReplicaId, int] = {}
        self._digest_of = {
            d.deployment_id: model.artifact.digest
            for d, model in zip(world.deployments, world.models, strict=True)
        }
        self._pop_of = {node.node_id: node.pop for node in world.nodes}
        self.rollout_run: PlanetRollout | None = None
        self._generation = 1
        self._recent: list[Floats] = []
        # Peaks of each hour of the day before, a Sunday.
        self._hour_peaks = [
            np.maximum.reduce([self.demand(6 * DAY + hour * HOUR + m) for m in (0, 30)])
            for hour in range(24)
        ]
        rng = np.random.default_rng(seed)
        names = [node.node_id for node in world.nodes]
        self._losses = [
            (int(start), int(start) + 4 * HOUR, names[int(rng.integers(len(names)))])
            for start in np.arange(3 * HOUR, 7 * DAY, 8 * HOUR)
        ]

    def demand(self, minute: int) -> Floats:
        """Return requests/s by city and deployment, with the events of the week."""
        demand = self.world.requests(minute % (7 * DAY))
        if FLASH[0] <= minute < FLASH[1]:
            in_europe = np.array([region == "Europe" for region in self.world.regions])
            demand[in_europe, FLASH_DEPLOYMENT] *= FLASH_TIMES
        if self.minute < NEW_AT:
            demand[:, NEW_DEPLOYMENT] = 0.0
        return demand

    def lost_nodes(self) -> set[NodeId]:
        """Return the nodes that are silent now."""
        lost = {name for start, end, name in self._losses if start <= self.minute < end}
        if POP_LOST[0] <= self.minute < POP_LOST[1]:
            lost |= {n.node_id for n in self.world.nodes if n.pop == self.world.pops[0].pop}
        return lost

    def observe_demand(self) -> Floats:
        """Return the demand of this minute, and let the forecast learn it."""
        now = self.demand(self.minute)
        self._recent = [*self._recent[-9:], now]
        if self._forecast:
            self._forecast.observe(self.minute, now)
        hour = (self.minute // HOUR) % 24
        self._hour_peaks[hour] = (
            np.maximum(now, self._hour_peaks[hour]) if self.minute % HOUR else now
        )
        return now

    def cluster_state(self) -> ClusterState:
        """Return the cluster state of this minute with the demand to plan for."""
        if self._forecast is None:
            return self._with_demand(np.maximum.reduce([*self._recent, *self._hour_peaks]))
        level = np.maximum(self._recent[-1], np.mean(self._recent, axis=0))
        return self._with_demand(np.maximum(level, self._forecast.rates))

    def _with_demand(self, planned: Floats) -> ClusterState:
        """Return the cluster state with a given demand."""
        lost = self.lost_nodes()
        nodes = tuple(
            msgspec.structs.replace(
                node,
                silent_s=3600.0 if node.node_id in lost else 0.0,
                artifacts=tuple(sorted(self._artifacts[node.node_id])),
            )
            for node in self.world.nodes
        )
        return ClusterState(
            cluster_id=ClusterId("planet"),
            generation=Generation(self._generation),
            acting_for_s=1e6,
            pops=self.world.pops,
            nodes=nodes,
            models=self.world.models,
            deployments=tuple(self.deployments),
            placements=tuple(
                msgspec.structs.replace(
                    placement, age_s=60.0 * (self.minute - self._placed_at[name])
                )
                for name, placement in self.placements.items()
            ),
            demand=demand_rows(self.world, planned),
            profiles=self.world.profiles,
            rollouts=(self.rollout_run.rollout,) if self.rollout_run else (),
        )

    def carry_out(self, plan: PlacementPlan) -> None:
        """Begin the starts of a plan, and carry out its ends at once."""
        self._generation += 1
        for start in plan.starts:
            spec = start.spec
            node = self._nodes[start.node_id]
            self._ready_at[spec.replica_id] = self.minute + self._start_s(node, spec) / 60
            self._placed_at[spec.replica_id] = self.minute
            self.placements[spec.replica_id] = Placement(
                replica_id=spec.replica_id,
                deployment_id=spec.deployment_id,
                version=spec.version,
                node_id=start.node_id,
                device_ids=spec.device_ids,
                memory_bytes=spec.memory_bytes,
                role=spec.role,
                state=ReplicaState.LOADING,
            )
        for ending in plan.endings:
            self.placements.pop(ending.replica_id, None)
            self._ready_at.pop(ending.replica_id, None)

    def pass_time(self, minutes: int) -> None:
        """Let time pass, and make replicas warm that have finished loading."""
        self.minute += minutes
        for name in [n for n, ready in self._ready_at.items() if ready <= self.minute]:
            del self._ready_at[name]
            placement = self.placements[name]
            self._artifacts[placement.node_id].add(self._digest_of[placement.deployment_id])
            self.placements[name] = msgspec.structs.replace(placement, state=ReplicaState.WARM)

    def warm_at_once(self) -> None:
        """Make all loading replicas warm and a day old, as in a fleet that has run for long."""
        for name in self.placements:
            self._ready_at[name] = self.minute
            self._placed_at[name] = self.minute - DAY
        self.pass_time(0)

    def warm_nodes(self) -> WarmNodes:
        """Return by deployment the node of each warm replica."""
        nodes: dict[int, list[NodeId]] = defaultdict(list)
        for placement in self.placements.values():
            if placement.state is ReplicaState.WARM:
                nodes[int(placement.deployment_id[1:])].append(placement.node_id)
        return nodes

    def memory_bytes(self) -> int:
        """Return the device memory of all replicas."""
        return sum(p.memory_bytes * len(p.device_ids) for p in self.placements.values())

    def advance_rollout(self, demand: Floats, seed: int) -> str:
        """Begin or advance the rollout when it is due; return what happened, or ""."""
        if self.minute == ROLLOUT_AT:
            self.rollout_run = PlanetRollout(self.deployments[ROLLOUT_DEPLOYMENT], seed)
            return "begun: both versions are planned"
        if self.rollout_run is None or self.rollout_run.is_done():
            return ""
        is_warm = [
            p.state is ReplicaState.WARM
            for p in self.placements.values()
            if p.deployment_id == self.rollout_run.rollout.deployment_id
            and p.version == self.rollout_run.rollout.to_version
        ]
        event = self.rollout_run.advance_minute(
            demand[:, ROLLOUT_DEPLOYMENT], self.world.pops, StartCounts(warm=sum(is_warm))
        )
        if self.rollout_run.is_done():
            self.deployments[ROLLOUT_DEPLOYMENT] = msgspec.structs.replace(
                self.deployments[ROLLOUT_DEPLOYMENT], version=self.rollout_run.rollout.to_version
            )
        return event

    def _start_s(self, node: FleetNode, spec: ReplicaSpec) -> float:
        size = spec.artifact.size_bytes
        digest = spec.artifact.digest
        load_s = ENGINE_START_S + size / DISK_BYTES_PER_S
        if digest in self._artifacts[node.node_id]:
            return load_s
        is_in_pop = any(
            digest in artifacts and self._pop_of[other] == node.pop
            for other, artifacts in self._artifacts.items()
        )
        return load_s + size / (POP_BYTES_PER_S if is_in_pop else 4 * WAN_FAR_BYTES_PER_S)


def breaches(planet: Planet) -> int:
    """Count replicas that violate residency."""
    pops = {pop.pop: pop for pop in planet.world.pops}
    where: dict[NodeId, PopId] = {node.node_id: node.pop for node in planet.world.nodes}
    policies = {d.deployment_id: d.policy for d in planet.deployments}
    return sum(
        not residency_allows(policies[p.deployment_id], pops[where[p.node_id]])
        for p in planet.placements.values()
    )


def run(
    world: PlanetWorld,
    days: int,
    plan_min: int,
    seed: int,
    forecast: PlanetForecast | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield one row per minute."""
    planet, users = Planet(world, seed, forecast), UserTraffic(world)
    lost_before: set[NodeId] = set()
    while planet.minute < days * DAY:
        demand, lost = planet.observe_demand(), planet.lost_nodes()
        rollout_event = planet.advance_rollout(demand, seed)
        is_nudged = lost != lost_before or rollout_event or planet.minute == NEW_AT
        lost_before = lost
        row: dict[str, Any] = {"minute": planet.minute}
        if rollout_event:
            row["rollout"] = rollout_event
        if is_nudged or planet.minute % plan_min == 0:
            row |= plan_once(planet)
        row |= users.serve(demand, planet.warm_nodes(), lost)._asdict()
        row |= {"replicas": len(planet.placements), "lost": len(lost)}
        yield row
        planet.pass_time(1)


def plan_once(planet: Planet) -> dict[str, Any]:
    """Plan, carry the plan out, and return what it did and its CPU time."""
    state = planet.cluster_state()
    is_first = not planet.placements
    began = process_time()
    plan = plan_fleet(state, limits=FIRST if is_first else LIMITS)
    plan_s = process_time() - began
    planet.carry_out(plan)
    if is_first:
        planet.warm_at_once()
    return {
        "plan_cpu_s": round(plan_s, 4),
        "starts": len(plan.starts),
        "endings": len(plan.endings),
        "unmet": len(plan.unmet),
        "frozen": plan.frozen,
        "breaches": breaches(planet),
        "memory_tib": round(planet.memory_bytes() / 2**40, 2),
    }


def main() -> None:
    """Simulate the week and write one row per minute as JSON lines."""
    parser = world_parser(__doc__)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--plan-min", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("planet.jsonl"))
    parser.add_argument("--peaks", action="store_true", help="plan for known peaks")
    parser.add_argument(
        "--learned-days", type=int, default=7, help="days the forecast has learned before"
    )
    args = parser.parse_args()
    world = draw(args.data, args.seed)
    forecast = None if args.peaks else PlanetForecast(world, (FLASH_DEPLOYMENT, NEW_DEPLOYMENT))
    if forecast:
        forecast.learn_before(args.learned_days, NEW_DEPLOYMENT)
    with args.out.open("w") as file:
        for row in run(world, args.days, args.plan_min, args.seed, forecast):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()

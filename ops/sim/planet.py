"""A week of the planet under the production planner, with what goes wrong in a week.

    python -m ops.sim.planet --data ../shared/data --days 7 --plan-min 5

Each minute demand moves, what was loading may be warm, and users are served by what is warm, the
nearest first, up to its full capacity. The picture is built as the store would build it and planned
as the scheduler plans it every `--plan-min` minutes, and in the minute in which a node falls silent
or comes back, a new model arrives or a rollout takes a step (where production is nudged). Moves are
carried out after the time that fetching and loading take.

What is planned for is, by city and deployment, what is asked now raised to the production forecast
(`foretold.py`, which has learned the days before), or with `--peaks` to the most of the last ten
minutes and of each hour of the day before: all the day is then seated for its peak.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from typing import Any, Final

import msgspec
import numpy as np

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.ids import ClusterId, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.report import ReplicaState
from ops.sim.planet_forecast import PlanetForecast
from ops.sim.planet_rollout import PlanetRollout
from ops.sim.planet_world import PlanetWorld, demand_rows, draw, world_parser
from ops.sim.served import Seats, Users
from scheduler.decide.capacity.start_times import (
    DISK_BYTES_PER_S,
    ENGINE_START_S,
    POP_BYTES_PER_S,
    WAN_FAR_BYTES_PER_S,
)
from scheduler.decide.cluster import ClusterState, FleetNode, Placement, PlacementPlan
from scheduler.decide.placement.fleet.slots import residency_allows
from scheduler.decide.placement.planner import PlanLimits
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.placement.search.load_assignment import Floats
from scheduler.decide.rollout.lifecycle import StartCounts

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
    """The fleet's state between steps, as nodes and the store would hold it."""

    def __init__(
        self, world: PlanetWorld, seed: int, foretold: PlanetForecast | None = None
    ) -> None:
        self.world = world
        self._foretold = foretold
        self.minute = 0
        self.deployments = list(world.deployments)
        self._nodes = {node.node_id: node for node in world.nodes}
        self._held: dict[NodeId, set[str]] = {node.node_id: set() for node in world.nodes}
        self._ready_at: dict[ReplicaId, float] = {}
        self.placements: dict[ReplicaId, Placement] = {}
        self._placed_at: dict[ReplicaId, int] = {}
        self._digest_of = {
            d.deployment_id: model.artifact.digest
            for d, model in zip(world.deployments, world.models, strict=True)
        }
        self._pop_of = {node.node_id: node.pop for node in world.nodes}
        self.rolling: PlanetRollout | None = None
        self._generation = 1
        self._recent: list[Floats] = []
        # The day before is known: Sunday, as the week is drawn.
        self._day = [
            np.maximum.reduce([self.asked(6 * DAY + hour * HOUR + m) for m in (0, 30)])
            for hour in range(24)
        ]
        rng = np.random.default_rng(seed)
        names = [node.node_id for node in world.nodes]
        self._losses = [
            (int(start), int(start) + 4 * HOUR, names[int(rng.integers(len(names)))])
            for start in np.arange(3 * HOUR, 7 * DAY, 8 * HOUR)
        ]

    def asked(self, minute: int) -> Floats:
        """Return requests/s by city and deployment, with what the week has in store."""
        asked = self.world.requests(minute % (7 * DAY))
        if FLASH[0] <= minute < FLASH[1]:
            near = np.array([region == "Europe" for region in self.world.regions])
            asked[near, FLASH_DEPLOYMENT] *= FLASH_TIMES
        if self.minute < NEW_AT:
            asked[:, NEW_DEPLOYMENT] = 0.0
        return asked

    def lost(self) -> set[NodeId]:
        """Return the nodes that do not answer now."""
        gone = {name for start, end, name in self._losses if start <= self.minute < end}
        if POP_LOST[0] <= self.minute < POP_LOST[1]:
            gone |= {n.node_id for n in self.world.nodes if n.pop == self.world.pops[0].pop}
        return gone

    def ask(self) -> Floats:
        """Return what is asked in this minute, which the forecast remembers."""
        now = self.asked(self.minute)
        self._recent = [*self._recent[-9:], now]
        if self._foretold:
            self._foretold.hear(self.minute, now)
        hour = (self.minute // HOUR) % 24
        self._day[hour] = np.maximum(now, self._day[hour]) if self.minute % HOUR else now
        return now

    def picture(self) -> ClusterState:
        """Return the picture of this minute."""
        if self._foretold is None:
            return self.cluster(np.maximum.reduce([*self._recent, *self._day]))
        level = np.maximum(self._recent[-1], np.mean(self._recent, axis=0))
        return self.cluster(np.maximum(level, self._foretold.rates))

    def cluster(self, planned: Floats) -> ClusterState:
        """Return a picture with given demand."""
        lost = self.lost()
        nodes = tuple(
            msgspec.structs.replace(
                node,
                silent_s=3600.0 if node.node_id in lost else 0.0,
                artifacts=tuple(sorted(self._held[node.node_id])),
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
            rollouts=(self.rolling.rollout,) if self.rolling else (),
        )

    def carry_out(self, decided: PlacementPlan) -> None:
        """Begin what starts, end what ends."""
        self._generation += 1
        for start in decided.starts:
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
        for ending in decided.endings:
            self.placements.pop(ending.replica_id, None)
            self._ready_at.pop(ending.replica_id, None)

    def pass_time(self, minutes: int) -> None:
        """Let time pass: what was loading may be warm."""
        self.minute += minutes
        for name in [n for n, ready in self._ready_at.items() if ready <= self.minute]:
            del self._ready_at[name]
            placement = self.placements[name]
            self._held[placement.node_id].add(self._digest_of[placement.deployment_id])
            self.placements[name] = msgspec.structs.replace(placement, state=ReplicaState.WARM)

    def warm_at_once(self) -> None:
        """Take all that is loading as warm: how a fleet looks that has long been running."""
        for name in self.placements:
            self._ready_at[name] = self.minute
            self._placed_at[name] = self.minute - DAY
        self.pass_time(0)

    def seats(self) -> Seats:
        """Return by deployment the node of each warm replica."""
        held: dict[int, list[NodeId]] = defaultdict(list)
        for placement in self.placements.values():
            if placement.state is ReplicaState.WARM:
                held[int(placement.deployment_id[1:])].append(placement.node_id)
        return held

    def memory_bytes(self) -> int:
        """Return what all replicas hold of their devices."""
        return sum(p.memory_bytes * len(p.device_ids) for p in self.placements.values())

    def roll(self, asked: Floats, seed: int) -> str:
        """Take the rollout on, once it is due; return what happened to it."""
        if self.minute == ROLLOUT_AT:
            self.rolling = PlanetRollout(self.deployments[ROLLOUT_DEPLOYMENT], seed)
            return "begun: the new version is planned beside the old one"
        if self.rolling is None or self.rolling.is_done():
            return ""
        new = [
            p.state is ReplicaState.WARM
            for p in self.placements.values()
            if p.deployment_id == self.rolling.rollout.deployment_id
            and p.version == self.rolling.rollout.to_version
        ]
        told = self.rolling.minute(
            asked[:, ROLLOUT_DEPLOYMENT], self.world.pops, StartCounts(warm=sum(new))
        )
        if self.rolling.is_done():
            self.deployments[ROLLOUT_DEPLOYMENT] = msgspec.structs.replace(
                self.deployments[ROLLOUT_DEPLOYMENT], version=self.rolling.rollout.to_version
            )
        return told

    def _start_s(self, node: FleetNode, spec: ReplicaSpec) -> float:
        size = spec.artifact.size_bytes
        digest = spec.artifact.digest
        load_s = ENGINE_START_S + size / DISK_BYTES_PER_S
        if digest in self._held[node.node_id]:
            return load_s
        near = any(
            digest in held and self._pop_of[other] == node.pop for other, held in self._held.items()
        )
        return load_s + size / (POP_BYTES_PER_S if near else 4 * WAN_FAR_BYTES_PER_S)


def breaches(planet: Planet) -> int:
    """Count replicas where residency does not allow them."""
    pops = {pop.pop: pop for pop in planet.world.pops}
    where: dict[NodeId, PopId] = {node.node_id: node.pop for node in planet.world.nodes}
    policies = {d.deployment_id: d.policy for d in planet.deployments}
    return sum(
        not residency_allows(policies[p.deployment_id], pops[where[p.node_id]])
        for p in planet.placements.values()
    )


def run(
    world: PlanetWorld, days: int, plan_min: int, seed: int, foretold: PlanetForecast | None = None
) -> Iterator[dict[str, Any]]:
    """Yield one row a minute."""
    planet, users = Planet(world, seed, foretold), Users(world)
    was_lost: set[NodeId] = set()
    while planet.minute < days * DAY:
        asked, lost = planet.ask(), planet.lost()
        told = planet.roll(asked, seed)
        nudged = lost != was_lost or told or planet.minute == NEW_AT
        was_lost = lost
        row: dict[str, Any] = {"minute": planet.minute}
        if told:
            row["rollout"] = told
        if nudged or planet.minute % plan_min == 0:
            row |= planned(planet)
        row |= users.serve(asked, planet.seats(), lost)._asdict()
        row |= {"replicas": len(planet.placements), "lost": len(lost)}
        yield row
        planet.pass_time(1)


def planned(planet: Planet) -> dict[str, Any]:
    """Plan, carry it out, and return what it did and what it took."""
    picture = planet.picture()
    began = process_time()
    decided = plan_fleet(picture, limits=LIMITS if planet.placements else FIRST)
    took_s = process_time() - began
    is_first = not planet.placements
    planet.carry_out(decided)
    if is_first:
        planet.warm_at_once()
    return {
        "plan_cpu_s": round(took_s, 4),
        "starts": len(decided.starts),
        "endings": len(decided.endings),
        "unmet": len(decided.unmet),
        "frozen": decided.frozen,
        "breaches": breaches(planet),
        "memory_tib": round(planet.memory_bytes() / 2**40, 2),
    }


def main() -> None:
    """Run the week and write a row a minute as JSON lines."""
    parser = world_parser(__doc__)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--plan-min", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("planet.jsonl"))
    parser.add_argument("--peaks", action="store_true", help="plan for known peaks")
    parser.add_argument("--learned-days", type=int, default=7, help="what the forecast has seen")
    given = parser.parse_args()
    world = draw(given.data, given.seed)
    foretold = None if given.peaks else PlanetForecast(world, (FLASH_DEPLOYMENT, NEW_DEPLOYMENT))
    if foretold:
        foretold.learn_before(given.learned_days, NEW_DEPLOYMENT)
    with given.out.open("w") as file:
        for row in run(world, given.days, given.plan_min, given.seed, foretold):
            print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()

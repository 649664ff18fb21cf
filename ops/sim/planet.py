"""A week of the planet under the production planner, with what goes wrong in a week.

    python -m ops.sim.planet --data ../shared/data --days 7 --step-min 15

Each step the picture is built as the store would build it, `plan()` is called as the scheduler
calls it, and its moves are carried out after the time that fetching and loading take. What is
planned for is, by city and deployment, the most of the last ten steps and of each hour of the day
before: a forecast that knows yesterday. Users are served by what is warm, nearest first, up to its
full capacity.
"""

import argparse
import json
import os
from pathlib import Path
from time import process_time
from typing import Any, Final

import msgspec
import numpy as np

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.ids import ClusterId, Generation, NodeId, PopId, ReplicaId
from isochrone.wire.report import ReplicaState
from ops.sim.planet_world import World, demand_rows, draw
from ops.sim.served import read_seats, serve
from scheduler.decide.cluster import ClusterState, Node, Placement, Plan
from scheduler.decide.feasible import allowed
from scheduler.decide.flow import Floats
from scheduler.decide.plan import PlanLimits, plan
from scheduler.decide.start_time import (
    DISK_BYTES_PER_S,
    ENGINE_START_S,
    POP_BYTES_PER_S,
    WAN_FAR_BYTES_PER_S,
)

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
FIRST: Final = PlanLimits(starts_max=10**6, endings_max=10**6, effort=0)


class Planet:
    """The fleet's state between steps, as nodes and the store would hold it."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.minute = 0
        self.deployments = list(world.deployments)
        self._nodes = {node.node_id: node for node in world.nodes}
        self._held: dict[NodeId, set[str]] = {node.node_id: set() for node in world.nodes}
        self._ready_at: dict[ReplicaId, float] = {}
        self.placements: dict[ReplicaId, Placement] = {}
        self._placed_at: dict[ReplicaId, int] = {}
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

    def picture(self) -> ClusterState:
        """Return the picture of this minute."""
        now = self.asked(self.minute)
        self._recent = [*self._recent[-9:], now]
        self._day[(self.minute // HOUR) % 24] = np.maximum(
            now, self._day[(self.minute // HOUR) % 24] if self.minute % HOUR else 0.0
        )
        planned = np.maximum.reduce([*self._recent, *self._day])
        return self.cluster(planned)

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
            placements=tuple(self.placements.values()),
            demand=demand_rows(self.world, planned),
            profiles=self.world.profiles,
        )

    def carry_out(self, decided: Plan) -> None:
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

    def pass_time(self, minutes: int) -> None:
        """Let time pass: what was loading may be warm."""
        self.minute += minutes
        for name, placement in self.placements.items():
            age_s = 60.0 * (self.minute - self._placed_at[name])
            ready = self._ready_at[name] <= self.minute
            if ready and placement.state is ReplicaState.LOADING:
                self._held[placement.node_id].add(self._digest(placement))
            state = ReplicaState.WARM if ready else placement.state
            self.placements[name] = msgspec.structs.replace(placement, state=state, age_s=age_s)

    def warm_at_once(self) -> None:
        """Take all that is loading as warm: how a fleet looks that has long been running."""
        for name in self.placements:
            self._ready_at[name] = self.minute
            self._placed_at[name] = self.minute - DAY
        self.pass_time(0)

    def roll_out(self) -> None:
        """Ask for a new version of one deployment."""
        old = self.deployments[ROLLOUT_DEPLOYMENT]
        self.deployments[ROLLOUT_DEPLOYMENT] = msgspec.structs.replace(old, version=2)

    def _digest(self, placement: Placement) -> str:
        number = int(placement.deployment_id[1:])
        return self.world.models[number].artifact.digest

    def _start_s(self, node: Node, spec: ReplicaSpec) -> float:
        size = spec.artifact.size_bytes
        digest = spec.artifact.digest
        load_s = ENGINE_START_S + size / DISK_BYTES_PER_S
        if digest in self._held[node.node_id]:
            return load_s
        near = any(
            digest in self._held[other.node_id]
            for other in self.world.nodes
            if other.pop == node.pop
        )
        return load_s + size / (POP_BYTES_PER_S if near else 4 * WAN_FAR_BYTES_PER_S)


def breaches(planet: Planet) -> int:
    """Count replicas where residency does not allow them."""
    pops = {pop.pop: pop for pop in planet.world.pops}
    where: dict[NodeId, PopId] = {node.node_id: node.pop for node in planet.world.nodes}
    policies = {d.deployment_id: d.policy for d in planet.deployments}
    return sum(
        not allowed(policies[p.deployment_id], pops[where[p.node_id]])
        for p in planet.placements.values()
    )


def run(world: World, days: int, step_min: int, seed: int) -> list[dict[str, Any]]:
    """Return one row a step."""
    planet = Planet(world, seed)
    rows: list[dict[str, Any]] = []
    rolled_out = False
    while planet.minute < days * DAY:
        if planet.minute >= ROLLOUT_AT and not rolled_out:
            planet.roll_out()
            rolled_out = True
        picture = planet.picture()
        began = process_time()
        decided = plan(picture, FIRST if not rows else LIMITS)
        took_s = process_time() - began
        row: dict[str, Any] = {
            "minute": planet.minute,
            "plan_cpu_s": round(took_s, 4),
            "starts": len(decided.starts),
            "endings": len(decided.endings),
            "replicas": len(planet.placements),
            "unmet": len(decided.unmet),
            "frozen": decided.frozen,
        }
        planet.carry_out(decided)
        if not rows:
            planet.warm_at_once()
        row |= {"breaches": breaches(planet)}
        if planet.minute % 30 == 0 or _is_eventful(planet.minute):
            served = serve(world, planet.asked(planet.minute), read_seats(planet), planet.lost())
            row |= served._asdict()
        rows.append(row)
        if len(rows) % 10 == 1:
            print(row, flush=True)
        planet.pass_time(1 if _is_eventful(planet.minute) else step_min)
    return rows


def _is_eventful(minute: int) -> bool:
    """Say whether something has just broken: such half hours are taken a minute at a time."""
    return any(0 <= minute - start < 30 for start in (POP_LOST[0], FLASH[0]))


def main() -> None:
    """Run the week and write a row a step as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("ISOCHRONE_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--step-min", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("planet.jsonl"))
    given = parser.parse_args()
    rows = run(draw(given.data, given.seed), given.days, given.step_min, given.seed)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()

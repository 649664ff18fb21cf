"""One deployment's wish while a plan is sought: its demand, its seats, and what a change is worth.

Load is counted as demand.py reads it: in replicas of the slowest class. A seat on a faster class
has more room in the same measure.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from isochrone.wire.assignment import Role
from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.model import Deployment, Model
from isochrone.wire.report import ReplicaState
from scheduler.decide.capacity.replica_capacity import Profiles, replica_rates
from scheduler.decide.capacity.start_times import COMING
from scheduler.decide.cluster import Placement
from scheduler.decide.demand.demand_rates import DeploymentDemand, demand_load
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import Slot, replica_memory_bytes
from scheduler.decide.placement.score import (
    ABSENT,
    HEADROOM,
    MISSING,
    MISSING_SPREAD,
    ONE_POP_MS,
    UNSERVED_MS,
    hold_cost,
    weight_of,
)
from scheduler.decide.placement.search.load_assignment import NO_FLOATS, Floats, LoadAssignment


class PlannedReplica(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A seat that counts: a standing placement, or (with `seat`) one that this plan would start.

    One that `waits` has its place when what is there has ended.
    """

    wish: "DeploymentState"
    pop: PopId
    site: int
    room: float
    hold: float
    placement: Placement | None = None
    seat: Slot | None = None
    start: float = 0.0
    reason: str = ""
    waits: bool = False


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a seat more in a PoP is worth beside shorter waits. The higher tier goes first."""

    tier: int
    worth: float
    reason: str


NOTHING_NEEDED: Final = Need(tier=0, worth=0.0, reason="")


class DeploymentState:
    """A deployment, and the seats it has at this point of the search.

    `number` is its place among the wishes of the search, by which equals are put in order.
    """

    def __init__(
        self,
        ground: FleetCapacity,
        deployment: Deployment,
        model: Model,
        asked: DeploymentDemand,
        profiles: Profiles,
        standing: Sequence[Placement],
    ) -> None:
        self.number = 0
        self.ground = ground
        self.deployment = deployment
        self.model = model
        self.weight = weight_of(deployment.policy)
        self.most = deployment.policy.replicas_max
        self.least = min(deployment.policy.replicas_min, self.most)
        self.memory_bytes = (
            replica_memory_bytes(model, deployment.engine) * deployment.engine.devices
        )
        self.hold = hold_cost(self.memory_bytes)
        self.nodes_of = ground.may_hold(deployment, model)
        self.stamp = 0
        self.seats: list[PlannedReplica] = []
        self._held: tuple[int, frozenset[PopId]] = (-1, frozenset())
        self._losses: tuple[int, Floats] = (-1, NO_FLOATS)
        self._saves: tuple[int, Floats] = (-1, NO_FLOATS)
        rates = {
            name: replica_rates(name, deployment, model, profiles) for name in ground.device_classes
        }
        load = demand_load(asked, rates)
        self.cities, self.asked = asked.cities, asked.requests_per_s
        self.room_of = {name: HEADROOM * speed for name, speed in load.speed.items()}
        self.requests_per_s = float(self.asked.sum())
        self.rooms = np.zeros(len(ground.sites))
        held_at = list(self.nodes_of)
        rooms = np.array([self.room_of[name] for name in ground.device_classes])
        self.rooms[held_at] = rooms[ground.class_at[held_at]]
        taken = np.zeros(len(ground.sites))
        for placement in standing:
            seated = self._seated(placement)
            self.seats.append(seated)
            if seated.site >= 0:
                taken[seated.site] += seated.room
        far = ground.far_from(self.cities)
        self.flow = LoadAssignment(self.asked * self.weight, load.replicas, far, taken, UNSERVED_MS)

    @property
    def name(self) -> DeploymentId:
        """Return the deployment's id."""
        return self.deployment.deployment_id

    @property
    def is_asked_for(self) -> bool:
        """Say whether any city asks for it."""
        return self.requests_per_s > 0

    def new_seats(self) -> list[PlannedReplica]:
        """Return the seats that this plan would start at once."""
        return [seated for seated in self.seats if seated.seat and not seated.waits]

    def pops(self) -> list[PopId]:
        """Return the PoP of each seat."""
        return [seated.pop for seated in self.seats]

    def _held_pops(self) -> frozenset[PopId]:
        """Return the PoPs that have a seat, read once a change."""
        if self._held[0] != self.stamp:
            self._held = self.stamp, frozenset(seated.pop for seated in self.seats)
        return self._held[1]

    def warm_pops(self) -> list[PopId]:
        """Return the PoP of each seat that serves."""
        warm = ReplicaState.WARM
        return [s.pop for s in self.seats if s.placement and s.placement.state is warm]

    def is_coming(self) -> bool:
        """Say whether a replica is on its way up, or about to be."""
        if self.new_seats():
            return True
        return any(s.placement and s.placement.state in COMING for s in self.seats)

    def lacks_nothing(self) -> bool:
        """Say that a seat more could mend nothing but waits, wherever it is."""
        enough = len(self.seats) >= max(1, self.least) and not self.deployment.policy.keep_warm
        return enough and len(self._held_pops()) >= min(2, self.most)

    def need(self, pop: PopId) -> Need:
        """Return what a seat more in `pop` would mend: the minimum, a PoP kept warm, the spread."""
        if self.lacks_nothing():
            return NOTHING_NEEDED
        policy, pops = self.deployment.policy, self.pops()
        worth = self.shortfall(pops) - self.shortfall([*pops, pop])
        if pop in policy.keep_warm and pop not in pops:
            return Need(tier=3, worth=worth, reason=f"{pop} is kept warm")
        if len(pops) < self.least:
            return Need(tier=2, worth=worth, reason=self.least_asked())
        tier = 1 if not pops and self.is_asked_for else 0
        return Need(tier=tier, worth=worth, reason="a PoP less would leave none" if worth else "")

    def kept_pops_without(self) -> int:
        """Count the PoPs to be kept warm that have no seat."""
        return len(set(self.deployment.policy.keep_warm) - self._held_pops())

    def least_asked(self) -> str:
        """Say the minimum."""
        return f"at least {self.least} replica{'s are' if self.least > 1 else ' is'} asked for"

    def needed_in(self) -> list[PopId]:
        """Return PoPs among which is one where a seat more would mend most."""
        held = self._held_pops()
        other = next(([site.pop] for site in self.ground.sites if site.pop not in held), [])
        return [*self.deployment.policy.keep_warm, *other, *self.pops()[:1]]

    def shortfall(self, pops: Sequence[PopId]) -> float:
        """Return what seats in `pops` leave wanting beside waits, in the measure of score.py."""
        policy, held = self.deployment.policy, set(pops)
        lacking = max(0, self.least - len(pops)) + len(set(policy.keep_warm) - held)
        cost = MISSING * self.weight * lacking
        if self.is_asked_for and not pops:
            cost += ABSENT * self.weight
        if len(held) < 2 <= self.most:
            cost += ONE_POP_MS * self.weight * self.requests_per_s
            cost += MISSING_SPREAD * self.weight * (self.least >= 2)
        return cost

    def saves_at_least(self) -> Floats:
        """Return for each site at least what a seat more would save, read once a change."""
        if self._saves[0] != self.stamp:
            saves = np.zeros(len(self.rooms))
            if len(self.cities):
                sites = np.flatnonzero(self.rooms > 0)
                saves[sites] = self.flow.bounds(sites, self.rooms[sites])
            self._saves = self.stamp, saves
        return self._saves[1]

    def cost(self) -> float:
        """Return this deployment's part of the sum that the planner lowers."""
        seats = sum(seated.hold + seated.start for seated in self.seats)
        return self.flow.cost() + self.shortfall(self.pops()) + seats

    def add(self, seated: PlannedReplica) -> None:
        """Seat one replica more."""
        self.seats.append(seated)
        self.flow = self.flow.copy()
        self.flow.add(seated.site, seated.room)
        self.stamp += 1

    def drop(self, seated: PlannedReplica) -> None:
        """Take one seat away."""
        self.seats.remove(seated)
        if seated.site >= 0:
            self.flow = self.flow.copy()
            self.flow.remove(seated.site, seated.room)
        self.stamp += 1

    def loss(self, seated: PlannedReplica) -> float:
        """Return what the rest would pay for one seat less; what the seat itself costs is apart."""
        pops = self.pops()
        pops.remove(seated.pop)
        worse = self.shortfall(pops) - self.shortfall(self.pops())
        if seated.site < 0:
            return worse
        return worse + self.flow.loss(seated.site, seated.room)

    def loss_at_least(self, seated: PlannedReplica) -> float:
        """Return an estimate of what a seat's loss costs that is cheap and never too high."""
        if seated.site < 0:
            return 0.0
        if self.flow.room[seated.site] > seated.room * 1.001:
            return self.flow.loss_at_least(seated.site, seated.room)
        if self._losses[0] != self.stamp:
            self._losses = self.stamp, self.flow.losses_at_least()
        return float(self._losses[1][seated.site])

    def role_in(self, pop: PopId) -> Role:
        """Return the role that a seat more in `pop` should have."""
        share = self.deployment.policy.prefill_share
        there = [s.placement.role for s in self.seats if s.pop == pop and s.placement]
        there += [Role.UNIFIED for s in self.seats if s.pop == pop and not s.placement]
        if not share or not there:
            return Role.UNIFIED
        prefill = sum(role is Role.PREFILL for role in there)
        return Role.PREFILL if prefill < round(share * (len(there) + 1)) else Role.DECODE

    def _seated(self, placement: Placement) -> PlannedReplica:
        site = self.ground.site_of_placement(placement)
        node = self.ground.nodes[placement.node_id]
        room = self.room_of.get(self.ground.sites[site].device_class, 0.0) if site >= 0 else 0.0
        return PlannedReplica(
            wish=self,
            pop=node.pop,
            site=site if room else -1,
            room=room,
            hold=self.hold,
            placement=placement,
        )

"""One deployment during the search for a plan: the replicas it has so far."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, NodeId, PopId
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.arrays import NO_FLOATS, Floats, Ints
from scheduler.decide.capacity.default_sizes import prompt_step_s
from scheduler.decide.capacity.replica_capacity import UNMEASURED
from scheduler.decide.capacity.start_times import COMING
from scheduler.decide.cluster import Placement
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import Slot
from scheduler.decide.placement.roles import TokenMix
from scheduler.decide.placement.score import UNSERVED_MS
from scheduler.decide.placement.search.deployment_needs import DeploymentNeeds
from scheduler.decide.placement.search.load_assignment import LoadAssignment
from scheduler.decide.placement.search.role_pins import RolePins, has_pins, pinned_rates


class PlannedReplica(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A replica that counts in the plan: a running `placement`, or one to start on `slot`.

    `site` is -1 for a placement whose devices are not known. A replica that `waits` starts when the
    replica in its slot has ended.
    """

    state: "DeploymentState"
    pop: PopId
    site: int
    capacity: float
    hold_cost: float
    placement: Placement | None = None
    slot: Slot | None = None
    start_cost: float = 0.0
    reason: str = ""
    waits: bool = False

    @property
    def node_ids(self) -> Sequence[NodeId]:
        """The nodes that it runs on, or will."""
        if self.slot:
            return [part.node.node_id for part in self.slot.parts]
        return self.placement.node_ids if self.placement else ()


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The worth of one more replica in a PoP besides lower latency. A higher tier goes first."""

    tier: int
    worth: float
    reason: str


NO_NEED: Final = Need(tier=0, worth=0.0, reason="")


class SiteNeeds(NamedTuple):
    """The tier and worth of one more replica at each site besides lower latency (see `Need`)."""

    tiers: Ints
    worths: Floats


class DeploymentState:
    """A deployment's needs and the replicas it has at this point of the search.

    `number` is its place in the draft and breaks ties. `version` moves with every change of its
    replicas, so that what was computed from them can be cached.
    """

    def __init__(
        self, fleet: FleetCapacity, needs: DeploymentNeeds, running: Sequence[Placement]
    ) -> None:
        self.number = 0
        self.needs = needs
        self.version = 0
        self._fleet = fleet
        self._pops_cache: tuple[int, frozenset[PopId]] = (-1, frozenset())
        self._loss_cache: tuple[int, Floats] = (-1, NO_FLOATS)
        self._gain_cache: tuple[tuple[int, float], Floats] = ((-1, 0.0), NO_FLOATS)
        self._saves_cache: tuple[int, dict[int, float]] = (-1, {})
        self.replicas = [self._from_placement(placement) for placement in running]
        capacity = np.zeros(len(fleet.sites))
        for replica in self.replicas:
            if replica.site >= 0:
                capacity[replica.site] += replica.capacity
        self.assignment = self.assignment_of(capacity)
        policy = needs.deployment.policy
        self._pins: RolePins | None = None
        if has_pins(policy):
            eligible, rate = needs.eligible_nodes, needs.total_requests_per_s
            self._pins = RolePins(policy, fleet.table, eligible, rate, self.token_mix)

    @property
    def deployment_id(self) -> DeploymentId:
        """The deployment's id."""
        return self.needs.deployment_id

    def assignment_of(self, capacity: Floats) -> LoadAssignment:
        """Return its load assigned to replicas that can carry `capacity` at each site."""
        needs = self.needs
        return LoadAssignment(
            needs.requests_per_s * needs.weight,
            needs.load,
            self._fleet.table.latency,
            capacity,
            UNSERVED_MS,
            needs.cities,
        )

    def latency_ms(self, sites: Ints) -> Floats:
        """Return the round trips from each city of the fleet to some sites."""
        return self._fleet.table.latency.by_city.take(sites, axis=1)

    @property
    def is_full(self) -> bool:
        """Say whether it has replicas_max replicas or more."""
        return len(self.replicas) >= self.needs.replicas_max

    def new_replicas(self) -> list[PlannedReplica]:
        """Return the replicas that this plan would start at once."""
        return [replica for replica in self.replicas if replica.slot and not replica.waits]

    def new_per_site(self) -> list[PlannedReplica]:
        """Return one of the replicas that this plan would start at each site."""
        return list({replica.site: replica for replica in self.new_replicas()}.values())

    def pops(self) -> list[PopId]:
        """Return the PoP of each replica."""
        return [replica.pop for replica in self.replicas]

    def warm_pops(self) -> list[PopId]:
        """Return the PoP of each warm replica."""
        warm = ReplicaState.WARM
        return [r.pop for r in self.replicas if r.placement and r.placement.state is warm]

    def has_replica_coming(self) -> bool:
        """Say whether a replica is starting, or would be started by this plan."""
        if self.new_replicas():
            return True
        return any(r.placement and r.placement.state in COMING for r in self.replicas)

    def requirements_met(self) -> bool:
        """Say whether one more replica could improve nothing but latency, in any PoP."""
        needs = self.needs
        has_minimum = len(self.replicas) >= max(1, needs.replicas_min)
        if not has_minimum or needs.deployment.policy.keep_warm or self._pins is not None:
            return False
        return len(self._distinct_pops()) >= min(2, needs.replicas_max)

    def token_mix(self, pop: PopId) -> TokenMix:
        """Return the mix of the demand that a PoP serves; of all demand if it serves none yet."""
        needs, sites = self.needs, self._fleet.table.sites_of_pop.get(pop, [])
        shares = self.assignment.shares_at(np.array(sites, np.int64))
        if not shares.any():
            shares = np.ones(len(needs.cities))
        policy = needs.deployment.policy
        if has_pins(policy):
            rate = pinned_rates(policy, needs.rates)
        else:
            taken = {r.site for r in self.replicas if r.pop == pop and r.site >= 0}
            names = {self._fleet.sites[site].device_class for site in taken}
            rates = [needs.rates[name] for name in sorted(names)] or list(needs.rates.values())
            rate = min(rates, key=lambda rate: rate.decode_tokens_per_s, default=UNMEASURED)
        return TokenMix(
            uncached_per_s=float(needs.demand.prompt_tokens_per_s @ shares),
            output_per_s=float(needs.demand.output_tokens_per_s @ shares),
            prefill_rate=rate.prefill_tokens_per_s,
            decode_rate=rate.decode_tokens_per_s,
            prompt_step_s=prompt_step_s(needs.deployment.engine, rate.prefill_tokens_per_s),
        )

    def need_at(self, site: int) -> Need:
        """Return what one more replica at a site is worth besides latency: what `need_in` says, and
        the improvement of the ratio of roles."""
        need = self.need_in(self._fleet.sites[site].pop)
        if self._pins is None:
            return need
        taken = [replica.site for replica in self.replicas]
        improvement = self._pins.worth(taken, site, self.needs.weight)
        reason = need.reason or ("a prefill replica is missing" if improvement > 0 else "")
        return Need(tier=need.tier, worth=need.worth + improvement, reason=reason)

    def ratio_cost(self, replicas: Sequence[PlannedReplica]) -> float:
        """Return the cost of errors in the ratio of pinned roles among some replicas."""
        if self._pins is None:
            return 0.0
        sites = [replica.site for replica in replicas]
        return self._pins.ratio_cost(sites, self.needs.weight)

    def pops_without_prefill(self) -> list[PopId]:
        """Return the PoPs where fewer replicas prefill than should, with pinned roles."""
        if self._pins is None:
            return []
        return self._pins.missing_in(replica.site for replica in self.replicas)

    def role_at(self, site: int, wanted: Role, is_first: bool) -> Role:
        """Return the role of a replica at a site: the one that is wanted, if its class may."""
        return wanted if self._pins is None else self._pins.role_at(site, wanted, is_first)

    def need_in(self, pop: PopId) -> Need:
        """Return what one more replica in `pop` is worth besides latency: the minimum, a PoP to
        keep warm, the spread over PoPs."""
        if self.requirements_met():
            return NO_NEED
        needs, pops = self.needs, self.pops()
        worth = needs.requirement_cost(pops) - needs.requirement_cost([*pops, pop])
        if pop in needs.deployment.policy.keep_warm and pop not in pops:
            return Need(tier=3, worth=worth, reason=f"{pop} is kept warm")
        if len(pops) < needs.replicas_min:
            return Need(tier=2, worth=worth, reason=needs.minimum_reason)
        tier = 1 if not pops and needs.has_demand else 0
        reason = "with the loss of one PoP none would be left" if worth else ""
        return Need(tier=tier, worth=worth, reason=reason)

    def cold_keep_warm_pops(self) -> int:
        """Count the keep_warm PoPs that have no replica."""
        return len(set(self.needs.deployment.policy.keep_warm) - self._distinct_pops())

    def needs_by_site(self) -> SiteNeeds:
        """Return what one more replica at each site is worth besides latency, as `need_in` does."""
        count = len(self._fleet.sites)
        tiers, worths = np.zeros(count, np.int64), np.zeros(count)
        if not self.requirements_met():
            by_pop = self._fleet.table.sites_of_pop
            special = self._distinct_pops().union(self.needs.deployment.policy.keep_warm)
            # All other PoPs are alike.
            other = next((pop for pop in by_pop if pop not in special), None)
            if other is not None:
                need = self.need_in(other)
                tiers[:], worths[:] = need.tier, need.worth
            for pop in special:
                need, sites = self.need_in(pop), by_pop.get(pop, [])
                tiers[sites], worths[sites] = need.tier, need.worth
        if self._pins is not None:
            taken = [replica.site for replica in self.replicas]
            for site in np.flatnonzero(self.needs.site_capacity > 0).tolist():
                worths[site] += self._pins.worth(taken, site, self.needs.weight)
        return SiteNeeds(tiers, worths)

    def cost(self) -> float:
        """Return this deployment's part of the sum that the planner lowers."""
        replicas = sum(replica.hold_cost + replica.start_cost for replica in self.replicas)
        replicas += self.ratio_cost(self.replicas)
        return self.assignment.cost() + self.needs.requirement_cost(self.pops()) + replicas

    def gain_upper_bounds(self, least: float = 0.0) -> Floats:
        """Return for each site an upper bound of the latency that one more replica saves, or
        `least` where it can save no more than that."""
        if self._gain_cache[0] != (self.version, least):
            needs, capacity = self.needs, self.needs.site_capacity
            gains = np.full(len(capacity), least)
            # Where even a replica at every site would save little, one site need not be looked at.
            if len(needs.cities) and self.assignment.gain_limit(needs.nearest_ms) > least:
                sites = needs.sites
                gains[sites.numbers] = self.assignment.gain_upper_bounds(
                    sites.latency_ms, capacity[sites.numbers], least
                )
            self._gain_cache = (self.version, least), gains
        return self._gain_cache[1]

    def saves_at(self, site: int) -> float:
        """Return the latency that one more replica at a site saves."""
        if self._saves_cache[0] != self.version:
            self._saves_cache = self.version, {}
        saves = self._saves_cache[1]
        if site not in saves:
            saves[site] = self.assignment.gain(site, float(self.needs.site_capacity[site]))
        return saves[site]

    def loss(self, replica: PlannedReplica) -> float:
        """Return what the removal of a replica costs in latency and unmet requirements.

        The hold and start costs that it saves are not subtracted.
        """
        pops = self.pops()
        pops.remove(replica.pop)
        unmet = self.needs.requirement_cost(pops) - self.needs.requirement_cost(self.pops())
        unmet += self._ratio_loss(replica)
        if replica.site < 0:
            return unmet
        return unmet + self.assignment.loss(replica.site, replica.capacity)

    def loss_lower_bound(self, replica: PlannedReplica) -> float:
        """Return a lower bound of `loss` that is cheap to compute."""
        if replica.site < 0:
            return 0.0
        if self._pins is not None:
            return self._ratio_loss(replica)
        if self.assignment.capacity[replica.site] > replica.capacity * 1.001:
            return self.assignment.loss_lower_bound(replica.site, replica.capacity)
        if self._loss_cache[0] != self.version:
            self._loss_cache = self.version, self.assignment.loss_lower_bounds()
        return float(self._loss_cache[1][replica.site])

    def add(self, replica: PlannedReplica) -> None:
        """Add a replica and reassign load."""
        self.replicas.append(replica)
        self.assignment = self.assignment.copy()
        self.assignment.add_capacity(replica.site, replica.capacity)
        self.version += 1

    def remove(self, replica: PlannedReplica) -> None:
        """Remove a replica and reassign its load."""
        self.replicas.remove(replica)
        if replica.site >= 0:
            self.assignment = self.assignment.copy()
            self.assignment.remove_capacity(replica.site, replica.capacity)
        self.version += 1

    def restore(self, replicas: list[PlannedReplica], assignment: LoadAssignment) -> None:
        """Return to replicas and an assignment that it had before."""
        self.replicas, self.assignment = replicas, assignment
        self.version += 1

    def _ratio_loss(self, replica: PlannedReplica) -> float:
        if self._pins is None:
            return 0.0
        others = [other for other in self.replicas if other is not replica]
        return self.ratio_cost(others) - self.ratio_cost(self.replicas)

    def _distinct_pops(self) -> frozenset[PopId]:
        if self._pops_cache[0] != self.version:
            self._pops_cache = self.version, frozenset(replica.pop for replica in self.replicas)
        return self._pops_cache[1]

    def _from_placement(self, placement: Placement) -> PlannedReplica:
        site = self._fleet.site_of_placement(placement)
        capacity = 0.0
        if site >= 0:
            device_class = self._fleet.sites[site].device_class
            capacity = self.needs.class_capacity.get(device_class, 0.0)
        return PlannedReplica(
            state=self,
            pop=self._fleet.nodes[placement.node_id].pop,
            site=site if capacity else -1,
            capacity=capacity,
            hold_cost=self.needs.hold_cost,
            placement=placement,
        )

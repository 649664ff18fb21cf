"""The needs of one deployment: its demand and policy, and a replica's cost and capacity.

Load is measured in replicas of the slowest device class (see `demand/demand_rates.py`); a replica
on a faster class has more capacity in the same unit.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.models.model import UNIFIED_ROLES, CatalogModel, Deployment
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.replica_capacity import Profiles, replica_rates
from scheduler.decide.cluster import FleetNode
from scheduler.decide.demand.demand_rates import DeploymentDemand, demand_load
from scheduler.decide.placement.fleet.eligible_sites import EligibleSites
from scheduler.decide.placement.fleet.fleet_capacity import FleetCapacity
from scheduler.decide.placement.fleet.slots import awake_memory_bytes, class_refusal
from scheduler.decide.placement.roles import generating_share
from scheduler.decide.placement.score import (
    ABSENT,
    HEADROOM,
    MISSING,
    MISSING_SPREAD,
    ONE_POP_MS,
    hold_cost,
    weight_of,
)
from scheduler.decide.placement.search.role_pins import has_pins, pinned_load, pinned_sites


class DeploymentNeeds:
    """A deployment's demand and policy, and the cost and capacity of a replica of it. Immutable.

    A replica takes `device_bytes` of each device in the plan, `memory_bytes` of all, and
    `awake_bytes` of each while it is awake. `sites` are those that could take one; `site_capacity`
    is what one can serve at each site, 0 where none can be. `nearest_ms` is the round trip from
    each city of its demand to the nearest site that could take a replica. `cities` and
    `requests_per_s` are the rows of its `demand`; `latency_ms[row, site]` is the round trip.
    `rates` are those of one replica by device class.
    """

    def __init__(
        self,
        fleet: FleetCapacity,
        deployment: Deployment,
        model: CatalogModel,
        demand: DeploymentDemand,
        profiles: Profiles,
    ) -> None:
        self.deployment = deployment
        self.model = model
        self.weight = weight_of(deployment.policy)
        self.replicas_max = deployment.policy.replicas_max
        self.replicas_min = min(deployment.policy.replicas_min, self.replicas_max)
        self.awake_bytes = awake_memory_bytes(model, deployment)
        self.device_bytes = ceil(self.awake_bytes / deployment.policy.overcommit)
        self.memory_bytes = self.device_bytes * deployment.engine.devices
        self.hold_cost = hold_cost(self.memory_bytes)
        self.sites = _eligible_sites(fleet, deployment, model, self.awake_bytes)
        classes = fleet.table.device_classes
        self.rates = {name: replica_rates(name, deployment, model, profiles) for name in classes}
        policy = deployment.policy
        load = (
            pinned_load(policy, demand, self.rates)
            if has_pins(policy)
            else demand_load(demand, self.rates, generating_share(policy))
        )
        self.demand = demand
        self.load = load.replicas
        self.cities, self.requests_per_s = demand.cities, demand.requests_per_s
        self.total_requests_per_s = float(self.requests_per_s.sum())
        self._by_city = fleet.table.latency.by_city
        self.class_capacity = {name: HEADROOM * speed for name, speed in load.speed.items()}
        self.site_capacity = np.zeros(len(fleet.sites))
        by_class = np.array([self.class_capacity[name] for name in classes])
        self.site_capacity[self.sites.numbers] = by_class[self.sites.class_numbers]
        self.nearest_ms = self.sites.nearest_ms[self.cities]

    @property
    def deployment_id(self) -> DeploymentId:
        """The deployment's id."""
        return self.deployment.deployment_id

    @property
    def eligible_nodes(self) -> Mapping[int, Sequence[FleetNode]]:
        """The nodes of each site that could take a replica."""
        return self.sites.nodes

    @property
    def latency_ms(self) -> Floats:
        """The round trip from each city of its demand to each site."""
        return self._by_city[self.cities]

    @property
    def has_demand(self) -> bool:
        """Say whether any city sends requests for it."""
        return self.total_requests_per_s > 0

    @property
    def has_roles(self) -> bool:
        """Say whether its replicas may have roles of their own."""
        policy = self.deployment.policy
        return policy.roles != UNIFIED_ROLES or policy.prefill_share > 0

    @property
    def minimum_reason(self) -> str:
        """The reason of a replica that is needed for replicas_min."""
        count = self.replicas_min
        return f"at least {count} replica{'s are' if count > 1 else ' is'} required"

    def requirement_cost(self, pops: Sequence[PopId]) -> float:
        """Return the cost of what replicas in `pops` leave unmet besides latency (see score.py)."""
        policy, distinct = self.deployment.policy, set(pops)
        lacking = max(0, self.replicas_min - len(pops)) + len(set(policy.keep_warm) - distinct)
        cost = MISSING * self.weight * lacking
        if self.has_demand and not pops:
            cost += ABSENT * self.weight
        if len(distinct) < 2 <= self.replicas_max:
            cost += ONE_POP_MS * self.weight * self.total_requests_per_s
            cost += MISSING_SPREAD * self.weight * (self.replicas_min >= 2)
        return cost


def _eligible_sites(
    fleet: FleetCapacity, deployment: Deployment, model: CatalogModel, needed: int
) -> EligibleSites:
    """Return the sites that could take a replica, and of which the policy allows the class."""
    policy, eligible = deployment.policy, fleet.eligible_sites(deployment, model, needed)
    if policy.overcommit <= 1 and not has_pins(policy):
        return eligible
    is_open = pinned_sites(policy, fleet.table)
    nodes = {
        site: found
        for site, found in eligible.nodes.items()
        if is_open[site] and not class_refusal(deployment, fleet.sites[site].device_class)
    }
    return fleet.sites_with(nodes)

"""Roles that a policy pins to device classes: which sites may have which role, and the errors.

A PoP takes replicas of a pinned deployment only if it has devices for both roles. A replica's class
then decides what it can be, so the ratio of roles has to be kept while replicas are placed, not
afterwards: a prefill replica that is missing in a PoP and one that has nothing to read are costs
of a plan.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from isochrone.wire.ids import PopId
from isochrone.wire.models.model import PlacementPolicy
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.capacity.device_classes import is_named_by
from scheduler.decide.cluster import FleetNode
from scheduler.decide.demand.demand_rates import DemandLoad, DeploymentDemand, demand_load
from scheduler.decide.placement.fleet.sites import SiteTable
from scheduler.decide.placement.roles import (
    PrefillBounds,
    TokenMix,
    generating_share,
    prefill_bounds,
)
from scheduler.decide.placement.score import ABSENT, MISSING, UNSERVED_MS


class PinnedCount(NamedTuple):
    """A PoP's replicas of one deployment: those that only prefill, and the others."""

    prefill: int = 0
    others: int = 0


class RatioErrors(NamedTuple):
    """Errors in the ratio of roles: prefill replicas that are missing, and those without work."""

    missing: int
    idle: int

    def cost(self, weight: float, requests_per_s: float) -> float:
        """Return what it costs a plan.

        A missing prefill replica costs more than any other replica of the deployment can save, so
        that it starts first; one without work costs more still.
        """
        missing = ABSENT + UNSERVED_MS * requests_per_s
        return weight * (missing * self.missing + (MISSING + missing) * self.idle)


def has_pins(policy: PlacementPolicy) -> bool:
    """Say whether a policy pins a role to device classes."""
    return bool(policy.prefill_devices or policy.decode_devices)


def can_prefill(policy: PlacementPolicy, device_class: str) -> bool:
    """Say whether replicas on a device class may be prefill replicas."""
    return not policy.prefill_devices or is_named_by(device_class, policy.prefill_devices)


def can_generate(policy: PlacementPolicy, device_class: str) -> bool:
    """Say whether replicas on a device class may generate."""
    return not policy.decode_devices or is_named_by(device_class, policy.decode_devices)


def pinned_sites(policy: PlacementPolicy, table: SiteTable) -> NDArray[np.bool_]:
    """Say for each site whether it may have replicas: its class has a role, its PoP both roles."""
    prefills = {site.pop for site in table.sites if can_prefill(policy, site.device_class)}
    generates = {site.pop for site in table.sites if can_generate(policy, site.device_class)}
    both = prefills & generates
    return np.array(
        [
            site.pop in both
            and (can_prefill(policy, site.device_class) or can_generate(policy, site.device_class))
            for site in table.sites
        ],
        bool,
    )


def pinned_load(
    policy: PlacementPolicy, demand: DeploymentDemand, rates: Mapping[str, ReplicaProfile]
) -> DemandLoad:
    """Return the load of a demand, with the speed of each role in its own unit.

    A class that is pinned to one role is as fast as it reads, or as it generates.
    """
    load = demand_load(demand, rates)
    if not load.speed:
        return load
    reference = rates[load.reference]
    speed = dict(load.speed)
    for name, rate in rates.items():
        if not can_generate(policy, name):
            speed[name] = rate.prefill_tokens_per_s / reference.prefill_tokens_per_s
        elif not can_prefill(policy, name):
            speed[name] = rate.decode_tokens_per_s / reference.decode_tokens_per_s
    share = generating_share(policy)
    if share < 1:
        prefill = min((speed[name] for name in rates if can_prefill(policy, name)), default=1.0)
        decode = min((speed[name] for name in rates if can_generate(policy, name)), default=1.0)
        share = share * decode / ((1 - share) * prefill + share * decode)
    return DemandLoad(demand_load(demand, rates, share).replicas, speed, load.reference)


def pinned_rates(policy: PlacementPolicy, rates: Mapping[str, ReplicaProfile]) -> ReplicaProfile:
    """Return the rates of the slowest class that may prefill and of the slowest that generates."""
    prefill = [r.prefill_tokens_per_s for name, r in rates.items() if can_prefill(policy, name)]
    decode = [r.decode_tokens_per_s for name, r in rates.items() if can_generate(policy, name)]
    return ReplicaProfile(
        prefill_tokens_per_s=min(prefill, default=0.0), decode_tokens_per_s=min(decode, default=0.0)
    )


def pins_refusal(policy: PlacementPolicy, table: SiteTable, allowed_pops: Set[PopId]) -> str:
    """Return why no PoP of this fleet has the devices for both roles; "" if one has."""
    if not has_pins(policy):
        return ""
    for field, names, may in (
        ("prefill_devices", policy.prefill_devices, can_prefill),
        ("decode_devices", policy.decode_devices, can_generate),
    ):
        if not any(may(policy, name) for name in table.device_classes):
            classes = ", ".join(table.device_classes) or "none"
            return f"{field} {list(names)} names no device here: the classes are {classes}"
    is_open = pinned_sites(policy, table)
    if any(is_open[site.index] and site.pop in allowed_pops for site in table.sites):
        return ""
    prefill, decode = list(policy.prefill_devices), list(policy.decode_devices)
    return (
        f"no PoP that it may use has devices for both roles: prefill {prefill or 'any'} and decode"
        f" {decode or 'any'}"
    )


def pins_refuse_node(policy: PlacementPolicy, table: SiteTable, node: FleetNode) -> str:
    """Return why a node may have no replica of either role; "" if it may."""
    classes = sorted({device.device_class for device in node.devices})
    if not has_pins(policy) or not classes:
        return ""
    is_open = pinned_sites(policy, table)
    if any(is_open[table.index[node.pop, name]] for name in classes):
        return ""
    if not any(can_prefill(policy, name) or can_generate(policy, name) for name in classes):
        return f"its {', '.join(classes)} is neither in prefill_devices nor in decode_devices"
    missing = "decode" if any(can_prefill(policy, name) for name in classes) else "prefill"
    return f"{node.pop} has no device that {missing}_devices names, and both roles are in one PoP"


class RolePins:
    """Judges the ratio of roles of one deployment with pins, while a plan is sought.

    `eligible_sites` have devices that could take a replica if they were empty. A PoP without one
    for prefill replicas lacks none. `mix_in` returns the mix of the demand that a PoP serves now.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        table: SiteTable,
        eligible_sites: Iterable[int],
        requests_per_s: float,
        mix_in: Callable[[PopId], TokenMix],
    ) -> None:
        self._policy = policy
        self._sites = table.sites
        self._mix_in = mix_in
        self._mixes: dict[PopId, TokenMix] = {}
        self._requests_per_s = requests_per_s
        self._prefill_pops = {
            table.sites[site].pop
            for site in eligible_sites
            if can_prefill(policy, table.sites[site].device_class)
        }
        self._only_prefill = [not can_generate(policy, site.device_class) for site in table.sites]

    def counts(self, sites: Iterable[int]) -> dict[PopId, PinnedCount]:
        """Count replicas on these sites by PoP."""
        prefill: dict[PopId, int] = defaultdict(int)
        total: dict[PopId, int] = defaultdict(int)
        for site in sites:
            if site >= 0:
                pop = self._sites[site].pop
                prefill[pop] += self._only_prefill[site]
                total[pop] += 1
        return {pop: PinnedCount(prefill[pop], total[pop] - prefill[pop]) for pop in total}

    def ratio_cost(self, sites: Iterable[int], weight: float) -> float:
        """Return the cost of the errors in the ratio of roles of replicas on these sites."""
        missing = idle = 0
        for pop, count in self.counts(sites).items():
            errors = self._errors(pop, count)
            missing, idle = missing + errors.missing, idle + errors.idle
        return RatioErrors(missing, idle).cost(weight, self._requests_per_s)

    def missing_in(self, sites: Iterable[int]) -> list[PopId]:
        """Return the PoPs that lack prefill replicas, of those with replicas on these sites."""
        counts = self.counts(sites)
        return [p for p in sorted(counts) if self._bounds(p, counts[p]).least > counts[p].prefill]

    def worth(self, sites: Iterable[int], site: int, weight: float) -> float:
        """Return how much one more replica at `site` improves the ratio; negative if it worsens it.

        A replica that would only give work to an idle prefill replica improves nothing: the idle
        one ends.
        """
        pop = self._sites[site].pop
        before = self.counts(sites).get(pop, PinnedCount())
        is_prefill = self._only_prefill[site]
        after = PinnedCount(before.prefill + is_prefill, before.others + (not is_prefill))
        now, then = self._errors(pop, before), self._errors(pop, after)
        improved = RatioErrors(now.missing - then.missing, min(0, now.idle - then.idle))
        return improved.cost(weight, self._requests_per_s)

    def role_at(self, site: int, wanted: Role, is_first: bool) -> Role:
        """Return the role of a replica at a site: the one that is wanted, if its class may."""
        name = self._sites[site].device_class
        if not can_generate(self._policy, name):
            return Role.PREFILL
        if wanted is Role.PREFILL and not can_prefill(self._policy, name):
            return Role.UNIFIED if is_first else Role.DECODE
        return wanted

    def _errors(self, pop: PopId, count: PinnedCount) -> RatioErrors:
        bounds = self._bounds(pop, count)
        missing = max(0, bounds.least - count.prefill) if pop in self._prefill_pops else 0
        return RatioErrors(missing, max(0, count.prefill - bounds.most))

    def _bounds(self, pop: PopId, count: PinnedCount) -> PrefillBounds:
        if pop not in self._mixes:
            # Once: a ratio that follows each step of the search would not settle.
            self._mixes[pop] = self._mix_in(pop)
        return prefill_bounds(self._policy, self._mixes[pop], count.others)

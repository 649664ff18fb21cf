"""Predicts the service of a fleet: TTFT by city, how full each PoP is, and its cost.

A city's load goes to its nearest warm replicas with capacity, as routers send it. TTFT is the round
trip, plus the uncached prompt at the replica's rate, plus a queueing time: the mean of a queue with
as many servers as the PoP has replicas, by Sakasegawa's formula. Its 90th percentile is taken as
that of an exponential distribution with this mean.

Prefill replicas serve no requests: they read prompts for the others of their PoP, up to the share
of the load that is reading. In such a PoP, prompts queue for the prefill replicas.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, log, sqrt
from typing import Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, NodeId, PopId
from isochrone.wire.models.model import Deployment
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.report import ReplicaProfile, ReplicaState
from scheduler.decide.arrays import Floats
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.capacity.measured_rates import measured_rates
from scheduler.decide.capacity.replica_capacity import is_measured, replica_rates
from scheduler.decide.cluster import ClusterState, Placement
from scheduler.decide.demand.demand_rates import (
    DeploymentDemand,
    demand_by_deployment,
    demand_load,
    reading_share,
)
from scheduler.decide.placement.search.role_pins import has_pins, pinned_load

FULL: Final = 0.95
"""The share of a replica's capacity that may be used; above it the queue grows without limit."""

P90_OF_MEAN: Final = log(10.0)
"""The 90th percentile of an exponential distribution, in multiples of its mean."""

LOAD_MIN: Final = 1e-9

# Looked up once: a large fleet has tens of thousands of replicas.
WARM: Final = ReplicaState.WARM

_Site = tuple[PopId, str]
"""A PoP and one of its device classes."""


class CityOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The service of one city; `ttft_p90_ms` is None if a tenth or more is not served."""

    pop: PopId
    requests_per_s: float
    ttft_p90_ms: float | None
    unserved_per_s: float


class PopOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How full one PoP is: `load` of its replicas, `memory` of its devices, as shares."""

    pop: PopId
    nodes: int
    replicas: int
    load: float
    memory: float


class DevicesUsed(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one class: how many, how many hold a replica, and the cost of these per hour, 0
    without a price."""

    device_class: str
    devices: int
    used: int
    cost_per_hour: float


class FleetPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted service and cost of a fleet.

    `assumed_rates` are deployments with demand whose rates were not measured.
    """

    cities: tuple[CityOutcome, ...]
    pops: tuple[PopOutcome, ...]
    devices: tuple[DevicesUsed, ...]
    replicas: int
    assumed_rates: tuple[DeploymentId, ...]


class _PrefillHelp(msgspec.Struct, frozen=True):
    """The effect of prefill replicas on the serving replicas of their PoP.

    `factor` multiplies the serving replicas' capacity; `replicas` is the number of prefill
    replicas, and `reading` the share of all load that they take.
    """

    factor: float
    replicas: int
    reading: float


_NO_HELP: Final = _PrefillHelp(1.0, 0, 0.0)


class _Share(msgspec.Struct, frozen=True):
    """A share of a city's requests, and the 90th percentile of its TTFT."""

    requests_per_s: float
    ttft_ms: float


class _RoutedLoad(NamedTuple):
    """The load of a row of demand that one site serves; with `site` None, no replica does."""

    row: int
    site: _Site | None
    load: float
    requests_per_s: float


def predict_service(
    cluster: ClusterState, prices: Mapping[str, float] | None = None
) -> FleetPrediction:
    """Return how the warm replicas of a cluster state would serve its demand."""
    fleet = _WarmFleet(cluster)
    parts: dict[PopId, list[_Share]] = defaultdict(list)
    used: dict[PopId, float] = defaultdict(float)
    demands = demand_by_deployment(cluster.demand, fleet.distances.index)
    assumed = []
    for deployment in cluster.deployments:
        demand = demands[deployment.deployment_id]
        for city, shares in _serve(fleet, deployment, demand, used).items():
            parts[city] += shares
        if len(demand.cities) and not fleet.is_measured(deployment):
            assumed.append(deployment.deployment_id)
    return FleetPrediction(
        cities=tuple(_city(pop, parts[pop]) for pop in sorted(parts)),
        pops=_pops(cluster, fleet.pop_of, used),
        devices=_devices(cluster, prices or {}),
        replicas=sum(p.state is ReplicaState.WARM for p in cluster.placements),
        assumed_rates=tuple(assumed),
    )


class _WarmFleet:
    """Indexes a cluster state: the warm replicas of each deployment by site, and their rates."""

    def __init__(self, cluster: ClusterState) -> None:
        self.distances = Distances(cluster.pops, cluster.distances)
        self.pop_of = {node.node_id: node.pop for node in cluster.nodes}
        self._models = {model.model_id: model for model in cluster.models}
        self._profiles = measured_rates(cluster)
        self._classes = {
            (node.node_id, device.device_id): device.device_class
            for node in cluster.nodes
            for device in node.devices
        }
        self._warm: dict[DeploymentId, dict[_Site, int]] = defaultdict(lambda: defaultdict(int))
        self._prefill: dict[DeploymentId, dict[_Site, int]] = defaultdict(lambda: defaultdict(int))
        warm = (p for p in cluster.placements if p.state is WARM and not p.is_ending)
        # A node may no longer report the devices of a replica: its site is not known then.
        known = [(p, site) for p in warm if (site := self._site_of(p)) is not None]
        # Prefill replicas alone in a PoP take requests: their engines can do both.
        serving = {(p.deployment_id, site[0]) for p, site in known if p.role is not Role.PREFILL}
        for placement, site in known:
            has_others = (placement.deployment_id, site[0]) in serving
            is_prefill = placement.role is Role.PREFILL and has_others
            counts = self._prefill if is_prefill else self._warm
            counts[placement.deployment_id][site] += 1

    def replicas(self, deployment: Deployment) -> Mapping[_Site, int]:
        """Return how many warm replicas a deployment has at each site that take requests."""
        return self._warm.get(deployment.deployment_id, {})

    def prefill_help(
        self, deployment: Deployment, speed: Mapping[str, float], reading_share: float
    ) -> Mapping[PopId, _PrefillHelp]:
        """Return the help of a deployment's prefill replicas for the others of their PoP.

        `reading_share` is the share of the load that reading prompts is.
        """
        serving: dict[PopId, float] = defaultdict(float)
        for (pop, device_class), count in self.replicas(deployment).items():
            serving[pop] += count * speed[device_class]
        helping: dict[PopId, float] = defaultdict(float)
        replicas: dict[PopId, int] = defaultdict(int)
        for (pop, device_class), count in self._prefill.get(deployment.deployment_id, {}).items():
            helping[pop] += count * speed[device_class]
            replicas[pop] += count
        return {
            pop: _prefill_help(serving[pop], helping[pop], replicas[pop], reading_share)
            for pop in replicas
        }

    def rates(self, deployment: Deployment) -> Mapping[str, ReplicaProfile]:
        """Return the rates of a replica on each device class, as the planner reads them."""
        model = self._models.get(deployment.model_id)
        if model is None:
            return {}
        return {
            name: replica_rates(name, deployment, model, self._profiles)
            for name in sorted(set(self._classes.values()))
        }

    def is_measured(self, deployment: Deployment) -> bool:
        """Return whether rates were measured on every class that a deployment runs on.

        If it does not run, measurements on any class count.
        """
        measured = {
            name
            for (model_id, name), profile in self._profiles.items()
            if model_id == deployment.model_id and is_measured(profile)
        }
        return bool(measured) and {name for _, name in self.replicas(deployment)} <= measured

    def _site_of(self, placement: Placement) -> _Site | None:
        pop = self.pop_of.get(placement.node_id)
        keys = ((placement.node_id, device_id) for device_id in placement.device_ids)
        name = next((self._classes[key] for key in keys if key in self._classes), None)
        return None if pop is None or name is None else (pop, name)


def _serve(
    fleet: _WarmFleet, deployment: Deployment, demand: DeploymentDemand, used: dict[PopId, float]
) -> Mapping[PopId, list[_Share]]:
    """Assign one deployment's demand to its replicas; return the shares of each city.

    Adds the load of each PoP to `used`.
    """
    rates = fleet.rates(deployment)
    # Without the model in the catalogue, no rates are known.
    replicas = fleet.replicas(deployment) if rates else {}
    load = demand_load(demand, rates)
    is_pinned = has_pins(deployment.policy)
    speed = pinned_load(deployment.policy, demand, rates).speed if is_pinned else load.speed
    help_in = fleet.prefill_help(deployment, speed, reading_share(demand, rates)) if rates else {}
    free = {
        site: FULL * count * speed[site[1]] * help_in.get(site[0], _NO_HELP).factor
        for site, count in replicas.items()
    }
    names = list(fleet.distances.index)
    cities = [names[number] for number in demand.cities]
    routed = list(_route(fleet.distances, cities, demand, load.replicas, free, speed))
    taken: dict[_Site, float] = defaultdict(float)
    for part in routed:
        if part.site is not None:
            taken[part.site] += part.load
    busy = {site: load / speed[site[1]] for site, load in taken.items()}
    parts: dict[PopId, list[_Share]] = defaultdict(list)
    for part in routed:
        ttft_ms = inf
        if part.site is not None:
            tokens = demand.prompt_tokens_per_s[part.row] / demand.requests_per_s[part.row]
            prompt_s = float(tokens) / rates[part.site[1]].prefill_tokens_per_s
            wait_s = _queue_wait_s(part.site, prompt_s, busy, replicas, help_in)
            rtt_ms = fleet.distances.between(cities[part.row], part.site[0])
            ttft_ms = rtt_ms + 1000 * (prompt_s + P90_OF_MEAN * wait_s)
        parts[cities[part.row]].append(_Share(part.requests_per_s, ttft_ms))
    for (pop, _), count in busy.items():
        used[pop] += count
    return parts


def _route(
    distances: Distances,
    cities: Sequence[PopId],
    demand: DeploymentDemand,
    city_load: Floats,
    free: dict[_Site, float],
    speed: Mapping[str, float],
) -> Iterator[_RoutedLoad]:
    """Send the load of each city to its nearest sites, as far as they are `free`.

    The busiest city first: its requests find free capacity at the nearest replicas most often.
    """
    for number in np.argsort(-city_load, kind="stable"):
        row = int(number)
        requested = max(float(city_load[row]), LOAD_MIN)
        requests, left = float(demand.requests_per_s[row]), requested
        for site in _nearest(distances, cities[row], free, speed):
            share = min(left, free[site])
            if share > 0:
                free[site] -= share
                left -= share
                yield _RoutedLoad(row, site, share, requests * share / requested)
        if left > LOAD_MIN / 2:
            yield _RoutedLoad(row, None, left, requests * left / requested)


def _queue_wait_s(
    site: _Site,
    prompt_s: float,
    busy: Mapping[_Site, float],
    replicas: Mapping[_Site, int],
    help_in: Mapping[PopId, _PrefillHelp],
) -> float:
    """Return the mean wait of a prompt at a site; `busy` counts the replicas at work."""
    helpers = help_in.get(site[0], _NO_HELP)
    if not helpers.replicas:
        return _wait_s(prompt_s, busy[site], replicas[site])
    in_pop = sum(count for (pop, _), count in busy.items() if pop == site[0])
    return _wait_s(prompt_s, helpers.reading * in_pop, helpers.replicas)


def _prefill_help(
    serving: float, prefill: float, replicas: int, reading_share: float
) -> _PrefillHelp:
    """Return the help of prefill replicas for those that serve; both as capacities.

    They read until nothing is left to read: the rest of the load is for those that generate.
    """
    most = inf if reading_share >= 1 else serving / (1 - reading_share)
    capacity = min(serving + prefill, most)
    taken = capacity - serving
    return _PrefillHelp(capacity / serving, replicas, taken / capacity)


def _nearest(
    distances: Distances, city: PopId, sites: Iterable[_Site], speed: Mapping[str, float]
) -> list[_Site]:
    """Return sites in the order of a router: the nearest first, and there the fastest class."""
    return sorted(sites, key=lambda site: (distances.between(city, site[0]), -speed[site[1]], site))


def _wait_s(service_s: float, load: float, servers: int) -> float:
    """Return the mean wait of a queue by Sakasegawa's formula (Eur. J. Oper. Res. 1977)."""
    busy = min(load / servers, FULL)
    return float(service_s * busy ** (sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)))


def _city(pop: PopId, parts: Iterable[_Share]) -> CityOutcome:
    ranked = sorted(parts, key=lambda part: part.ttft_ms)
    total = sum(part.requests_per_s for part in ranked)
    unserved = sum(part.requests_per_s for part in ranked if part.ttft_ms == inf)
    passed, ttft_ms = 0.0, inf
    for part in ranked:
        passed += part.requests_per_s
        if passed >= 0.9 * total:
            ttft_ms = part.ttft_ms
            break
    return CityOutcome(
        pop=pop,
        requests_per_s=round(total, 6),
        ttft_p90_ms=None if ttft_ms == inf else round(ttft_ms, 3),
        unserved_per_s=round(unserved, 6),
    )


def _pops(
    cluster: ClusterState, pop_of: Mapping[NodeId, PopId], used: Mapping[PopId, float]
) -> tuple[PopOutcome, ...]:
    replicas: dict[PopId, int] = defaultdict(int)
    taken: dict[PopId, int] = defaultdict(int)
    capacity: dict[PopId, int] = defaultdict(int)
    nodes: dict[PopId, int] = defaultdict(int)
    for node in cluster.nodes:
        nodes[node.pop] += 1
        capacity[node.pop] += sum(device.memory_bytes for device in node.devices)
    for placement in cluster.placements:
        pop = pop_of.get(placement.node_id)
        if pop is not None:
            replicas[pop] += placement.state is ReplicaState.WARM
            devices = sum(len(part.device_ids) for part in placement.parts)
            taken[pop] += placement.memory_bytes * devices
    return tuple(
        PopOutcome(
            pop=pop,
            nodes=nodes[pop],
            replicas=replicas[pop],
            load=round(used.get(pop, 0.0) / max(1, replicas[pop]), 4),
            memory=round(taken[pop] / max(1, capacity[pop]), 4),
        )
        for pop in sorted(nodes)
    )


def _devices(cluster: ClusterState, prices: Mapping[str, float]) -> tuple[DevicesUsed, ...]:
    total: dict[str, int] = defaultdict(int)
    used: dict[str, int] = defaultdict(int)
    holding = {
        (part.node_id, device_id)
        for placement in cluster.placements
        for part in placement.parts
        for device_id in part.device_ids
    }
    for node in cluster.nodes:
        for device in node.devices:
            total[device.device_class] += 1
            used[device.device_class] += (node.node_id, device.device_id) in holding
    return tuple(
        DevicesUsed(
            device_class=name,
            devices=total[name],
            used=used[name],
            cost_per_hour=round(used[name] * prices.get(name, 0.0), 4),
        )
        for name in sorted(total)
    )

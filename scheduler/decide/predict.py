"""What a fleet would give its users: TTFT by city, how full each PoP is, and what it costs.

A city's load goes to its nearest warm replicas with room, as routers send it. A request's time to
first token is the round trip, its uncached prompt at the replica's rate, and a wait: that of a
queue with as many servers as the PoP has replicas, by Sakasegawa's formula, whose tenth-longest
part is taken as that of an exponential with this mean.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf, log, sqrt
from typing import Final

import msgspec

from isochrone.wire import geo
from isochrone.wire.ids import DeploymentId, NodeId, PopId
from isochrone.wire.model import Deployment
from isochrone.wire.report import Profile, ReplicaState
from isochrone.wire.routes import Pop
from scheduler.decide.cluster import ClusterState, DemandRate, PopDistance
from scheduler.decide.demand import demand_of, rates_of

FULL: Final = 0.95
"""A replica fuller than this makes its queue grow without end."""

TENTH: Final = log(10.0)

Distances = Mapping[tuple[PopId, PopId], float]


class CityOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one city's users get; `ttft_p90_ms` is None where some find no room at all."""

    pop: PopId
    requests_per_s: float
    ttft_p90_ms: float | None
    unserved_per_s: float


class PopOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How full one PoP is: its replicas by load, its devices by memory."""

    pop: PopId
    nodes: int
    replicas: int
    load: float
    memory: float


class DevicesUsed(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one class: there, holding a replica, and what these cost an hour (0: no price)."""

    device_class: str
    devices: int
    used: int
    cost_per_hour: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet's outcome."""

    cities: tuple[CityOutcome, ...]
    pops: tuple[PopOutcome, ...]
    devices: tuple[DevicesUsed, ...]
    replicas: int
    assumed_rates: tuple[DeploymentId, ...]


class _Part(msgspec.Struct, frozen=True):
    """A part of a city's requests, and the 90th percentile of its TTFT."""

    requests_per_s: float
    ttft_ms: float


def predict(cluster: ClusterState, prices: Mapping[str, float] | None = None) -> Prediction:
    """Return what the warm replicas of a picture give the demand in it."""
    far = distances(cluster.pops, cluster.distances)
    pop_of = {node.node_id: node.pop for node in cluster.nodes}
    parts: dict[PopId, list[_Part]] = defaultdict(list)
    used: dict[PopId, float] = defaultdict(float)
    rows: dict[DeploymentId, list[DemandRate]] = defaultdict(list)
    for row in cluster.demand:
        rows[row.deployment_id].append(row)
    for deployment in cluster.deployments:
        replicas = _replicas(cluster, deployment, pop_of)
        asked = rows[deployment.deployment_id]
        for city, city_parts in _served(cluster, deployment, asked, replicas, far, used).items():
            parts[city] += city_parts
    return Prediction(
        cities=tuple(_city(pop, parts[pop]) for pop in sorted(parts)),
        pops=_pops(cluster, pop_of, used),
        devices=_devices(cluster, prices or {}),
        replicas=sum(p.state is ReplicaState.WARM for p in cluster.placements),
        assumed_rates=tuple(
            deployment.deployment_id
            for deployment in cluster.deployments
            if rows[deployment.deployment_id] and not _is_measured(cluster, deployment)
        ),
    )


def distances(pops: Sequence[Pop], measured: Sequence[PopDistance]) -> Distances:
    """Return the round trip in ms between every two PoPs: measured, else by great circle."""
    table = {
        (one.pop, other.pop): geo.round_trip_ms(
            one.latitude, one.longitude, other.latitude, other.longitude
        )
        for one in pops
        for other in pops
    }
    table.update({(row.from_pop, row.to_pop): row.rtt_ms for row in measured})
    return table


def _replicas(
    cluster: ClusterState, deployment: Deployment, pop_of: Mapping[NodeId, PopId]
) -> Mapping[PopId, int]:
    counted: dict[PopId, int] = defaultdict(int)
    for placement in cluster.placements:
        if (
            placement.deployment_id == deployment.deployment_id
            and placement.state is ReplicaState.WARM
            and not placement.is_ending
            and placement.node_id in pop_of
        ):
            counted[pop_of[placement.node_id]] += 1
    return counted


def _served(
    cluster: ClusterState,
    deployment: Deployment,
    rows: Sequence[DemandRate],
    replicas: Mapping[PopId, int],
    far: Distances,
    used: dict[PopId, float],
) -> Mapping[PopId, list[_Part]]:
    """Send one deployment's demand to its replicas; add to `used` the load of each PoP."""
    rates = rates_of(deployment, cluster.profiles)
    room = {pop: FULL * count for pop, count in replicas.items()}
    taken: dict[PopId, float] = defaultdict(float)
    routed: list[tuple[PopId, PopId | None, float]] = []
    for city in demand_of(deployment, rows, cluster.profiles):
        left = max(city.load, 1e-9)
        for pop in sorted(room, key=lambda pop: (far.get((city.pop, pop), inf), pop)):
            share = min(left, room[pop])
            if share > 0:
                room[pop] -= share
                taken[pop] += share
                left -= share
                routed.append((city.pop, pop, city.requests_per_s * share / max(city.load, 1e-9)))
        if left > 1e-9:
            routed.append((city.pop, None, city.requests_per_s * left / max(city.load, 1e-9)))
    prompt = {row.pop: _prompt_s(row, rates) for row in rows}
    parts: dict[PopId, list[_Part]] = defaultdict(list)
    for asked, answered, requests in routed:
        if answered is None:
            parts[asked].append(_Part(requests, inf))
            continue
        wait_s = _wait_s(prompt[asked], taken[answered], replicas[answered])
        ttft_ms = far.get((asked, answered), inf) + 1000 * (prompt[asked] + TENTH * wait_s)
        parts[asked].append(_Part(requests, ttft_ms))
    for pop, load in taken.items():
        used[pop] += load
    return parts


def _prompt_s(row: DemandRate, rates: Profile) -> float:
    if row.requests_per_s <= 0:
        return 0.0
    return row.uncached_tokens_per_s / row.requests_per_s / rates.prefill_tokens_per_s


def _wait_s(service_s: float, load: float, servers: int) -> float:
    busy = min(load / servers, FULL)
    return float(service_s * busy ** (sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)))


def _city(pop: PopId, parts: Iterable[_Part]) -> CityOutcome:
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
    holds: dict[PopId, int] = defaultdict(int)
    nodes: dict[PopId, int] = defaultdict(int)
    for node in cluster.nodes:
        nodes[node.pop] += 1
        holds[node.pop] += sum(device.memory_bytes for device in node.devices)
    for placement in cluster.placements:
        pop = pop_of.get(placement.node_id)
        if pop is not None:
            replicas[pop] += placement.state is ReplicaState.WARM
            taken[pop] += placement.memory_bytes * len(placement.device_ids)
    return tuple(
        PopOutcome(
            pop=pop,
            nodes=nodes[pop],
            replicas=replicas[pop],
            load=round(used.get(pop, 0.0) / max(1, replicas[pop]), 4),
            memory=round(taken[pop] / max(1, holds[pop]), 4),
        )
        for pop in sorted(nodes)
    )


def _devices(cluster: ClusterState, prices: Mapping[str, float]) -> tuple[DevicesUsed, ...]:
    there: dict[str, int] = defaultdict(int)
    used: dict[str, int] = defaultdict(int)
    seated = {(p.node_id, device_id) for p in cluster.placements for device_id in p.device_ids}
    for node in cluster.nodes:
        for device in node.devices:
            there[device.device_class] += 1
            used[device.device_class] += (node.node_id, device.device_id) in seated
    return tuple(
        DevicesUsed(
            device_class=name,
            devices=there[name],
            used=used[name],
            cost_per_hour=round(used[name] * prices.get(name, 0.0), 4),
        )
        for name in sorted(there)
    )


def _is_measured(cluster: ClusterState, deployment: Deployment) -> bool:
    return any(
        row.model_id == deployment.model_id and row.profile.decode_tokens_per_s > 0
        for row in cluster.profiles
    )

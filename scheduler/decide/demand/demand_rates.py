"""Demand rows as arrays of load, in the unit that replicas are planned in.

Load is measured in replicas of the reference device class, the slowest of the fleet for this
deployment: the share of such a replica's time that a city's tokens take (uncached prompt tokens /
prefill rate + output tokens / decode rate). Refused requests count: demand is what was requested,
not what was served.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, starmap
from typing import Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.arrays import NO_FLOATS, Floats, Ints
from scheduler.decide.cluster import ClusterState, DemandRate
from scheduler.decide.demand.demand_columns import DemandColumns, read_columns

RATE_MIN: Final = 1e-9
RATE_MAX: Final = 1e9
"""Requests/s or tokens/s: below RATE_MIN is noise, above RATE_MAX a counting error."""


class DeploymentDemand(NamedTuple):
    """The demand for one deployment, one row per city. `cities` are indices of PoPs."""

    cities: Ints
    requests_per_s: Floats
    prompt_tokens_per_s: Floats
    output_tokens_per_s: Floats


NO_DEMAND: Final = DeploymentDemand(np.empty(0, dtype=np.int64), NO_FLOATS, NO_FLOATS, NO_FLOATS)


class DemandLoad(NamedTuple):
    """Demand by city in replicas of the reference class, and the speed of other classes.

    `speed` is the capacity of a replica on a class, in replicas of the `reference` class.
    """

    replicas: Floats
    speed: Mapping[str, float]
    reference: str = ""


def demand_load(
    demand: DeploymentDemand, rates: Mapping[str, ReplicaProfile], generating_share: float = 1.0
) -> DemandLoad:
    """Return the load that a demand is for replicas with these rates by device class.

    Where only `generating_share` of the replicas generate, each city needs as many replicas as its
    output takes of that share, even if the others have nothing left to read.
    """
    prompt, output = demand.prompt_tokens_per_s, demand.output_tokens_per_s
    # Without any demand, one token of each kind is enough to compare the classes.
    mix = (float(prompt.sum()), float(output.sum()))
    if sum(mix) < RATE_MIN:
        mix = (1.0, 1.0)
    busy_share = {
        name: mix[0] / rate.prefill_tokens_per_s + mix[1] / rate.decode_tokens_per_s
        for name, rate in rates.items()
    }
    if not busy_share:
        return DemandLoad(prompt * 0.0, {})
    slowest = max(sorted(busy_share), key=lambda name: busy_share[name])
    reference = rates[slowest]
    generating = output / reference.decode_tokens_per_s
    load = prompt / reference.prefill_tokens_per_s + generating
    if generating_share < 1:
        load = np.maximum(load, generating / generating_share)
    return DemandLoad(
        load, {name: busy_share[slowest] / share for name, share in busy_share.items()}, slowest
    )


def reading_share(demand: DeploymentDemand, rates: Mapping[str, ReplicaProfile]) -> float:
    """Return the share of a replica's time that a demand's prompts take, on the slowest class."""
    prompt, output = (
        float(demand.prompt_tokens_per_s.sum()),
        float(demand.output_tokens_per_s.sum()),
    )
    shares = [
        (prompt / rate.prefill_tokens_per_s, output / rate.decode_tokens_per_s)
        for rate in rates.values()
    ]
    reading, generating = max(shares, key=sum, default=(0.0, 0.0))
    total = reading + generating
    return reading / total if total > 0 else 0.0


def raise_to_forecast(
    rows: Sequence[DemandRate], forecast: Sequence[DemandRate]
) -> tuple[DemandRate, ...]:
    """Return for each city and deployment the maximum of current demand and forecast.

    So a flash crowd counts as soon as it is measured, and the morning peak before it comes.
    """
    highest = {
        (row.deployment_id, row.pop): _with_refused(row) if row.refused_per_s > 0 else row
        for row in rows
    }
    for row in forecast:
        key = row.deployment_id, row.pop
        highest[key] = _higher(highest.get(key, row), row)
    return tuple([highest[key] for key in sorted(highest)])


def _higher(now: DemandRate, row: DemandRate) -> DemandRate:
    """Return the higher of the current demand and a forecast in each rate.

    Most rows are higher in all rates or in none, and are not copied.
    """
    higher = (
        (row.requests_per_s > now.requests_per_s)
        + (row.uncached_tokens_per_s > now.uncached_tokens_per_s)
        + (row.output_tokens_per_s > now.output_tokens_per_s)
    )
    if not higher:
        return now
    if higher == 3 and row.refused_per_s == now.refused_per_s:
        return row
    return DemandRate(
        deployment_id=row.deployment_id,
        pop=row.pop,
        requests_per_s=max(now.requests_per_s, row.requests_per_s),
        uncached_tokens_per_s=max(now.uncached_tokens_per_s, row.uncached_tokens_per_s),
        output_tokens_per_s=max(now.output_tokens_per_s, row.output_tokens_per_s),
        refused_per_s=now.refused_per_s,
    )


def with_forecast(cluster: ClusterState, forecast: Sequence[DemandRate]) -> ClusterState:
    """Return the cluster state with its demand raised to the forecast of its deployments."""
    live = {deployment.deployment_id for deployment in cluster.deployments}
    rows = [row for row in forecast if row.deployment_id in live]
    return msgspec.structs.replace(cluster, demand=raise_to_forecast(cluster.demand, rows))


def _with_refused(row: DemandRate) -> DemandRate:
    """Add refused requests to the answered ones, with tokens in proportion."""
    if row.requests_per_s <= 0 or row.refused_per_s <= 0:
        return row
    ratio = 1 + row.refused_per_s / row.requests_per_s
    if not math.isfinite(ratio):
        # Too few answered requests to know the tokens of the refused ones.
        return row
    return msgspec.structs.replace(row.times(ratio), refused_per_s=0.0)


def demand_by_deployment(
    rows: Sequence[DemandRate], index: Mapping[PopId, int]
) -> defaultdict[DeploymentId, DeploymentDemand]:
    """Return the demand for each deployment; `index` numbers the cities.

    Refused requests count. Rows of unknown cities are left out, and rates that are not a number,
    negative or implausibly large. Reads all rows as arrays: a large fleet has tens of thousands.
    """
    columns = read_columns(rows, index)
    names, kept = columns.names, _valid_rows(columns)
    cities = columns.city[kept]
    answered, refused, prompt, output = (rate[kept] for rate in columns.rates)
    requests = answered
    if refused.any():
        requests = answered + refused
        # Too few answered requests say nothing of the refused ones, and must not be divided by.
        ratio = requests / np.where(answered > RATE_MIN, answered, requests)
        prompt, output = prompt * ratio, output * ratio
    by_deployment: defaultdict[DeploymentId, DeploymentDemand] = defaultdict(lambda: NO_DEMAND)
    ends = np.searchsorted(columns.number[kept], np.arange(len(names) + 1)).tolist()
    for name, part in zip(names, starmap(slice, pairwise(ends)), strict=True):
        by_deployment[name] = DeploymentDemand(
            cities[part], requests[part], prompt[part], output[part]
        )
    return by_deployment


def _valid_rows(columns: DemandColumns) -> Ints | slice:
    """Return the rows that count, in the order of their deployments' numbers.

    If that is all rows as they are, as it mostly is, return a slice: it copies nothing.
    """
    number, city, rates = columns.number, columns.city, columns.rates
    # NaN compares as False.
    is_kept = np.logical_and.reduce(
        [
            city >= 0,
            *((rate >= 0) & (rate < RATE_MAX) for rate in rates),
            np.maximum(rates[0], rates[1]) > RATE_MIN,
        ]
    )
    if is_kept.all() and (number[1:] >= number[:-1]).all():
        return slice(None)
    kept = np.flatnonzero(is_kept)
    # Numbers of 16 bits are sorted several times faster.
    narrow = np.uint16 if len(columns.names) < 2**16 else np.int64
    return kept[np.argsort(number[kept].astype(narrow), kind="stable")]

"""What cities ask of a deployment, in units a replica can carry: the one reading of demand.

Load is counted in replicas of the reference class of device (the slowest of the fleet for this
deployment): the share of its time that a city's tokens take, prefill and decode apart (uncached
prompt tokens / prefill rate + output tokens / decode rate). Refused requests count: demand is what
was asked, not what was served.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, repeat, starmap
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import DeploymentId, PopId
from isochrone.wire.report import Profile
from scheduler.decide.cluster import RATES, ClusterState, DemandRate
from scheduler.decide.placement.search.load_assignment import NO_FLOATS, Floats, Ints

RATE_MIN: Final = 1e-9
RATE_MAX: Final = 1e9
"""Less than anyone notices, and more than any city asks: what is beyond is an error in counting."""

NAME: Final = attrgetter("deployment_id")
POP: Final = attrgetter("pop")


class DeploymentDemand(NamedTuple):
    """What each asking city asks of one deployment, a row a city."""

    cities: Ints
    requests_per_s: Floats
    prompt_tokens_per_s: Floats
    output_tokens_per_s: Floats


NO_DEMAND: Final = DeploymentDemand(np.empty(0, dtype=np.int64), NO_FLOATS, NO_FLOATS, NO_FLOATS)


class DemandLoad(NamedTuple):
    """What each asking city asks, in replicas, and how a replica on each class compares.

    `speed` is how many times the reference replica's a class's one carries.
    """

    replicas: Floats
    speed: Mapping[str, float]


def demand_load(asked: DeploymentDemand, rates: Mapping[str, Profile]) -> DemandLoad:
    """Return what is asked of replicas with these rates by class."""
    prompt, output = asked.prompt_tokens_per_s, asked.output_tokens_per_s
    # Where nothing is asked yet, a token of each tells the classes apart.
    mix = (float(prompt.sum()), float(output.sum()))
    if sum(mix) < RATE_MIN:
        mix = (1.0, 1.0)
    busy = {
        name: mix[0] / rate.prefill_tokens_per_s + mix[1] / rate.decode_tokens_per_s
        for name, rate in rates.items()
    }
    if not busy:
        return DemandLoad(prompt * 0.0, {})
    slowest = max(sorted(busy), key=lambda name: busy[name])
    reference = rates[slowest]
    load = prompt / reference.prefill_tokens_per_s + output / reference.decode_tokens_per_s
    return DemandLoad(load, {name: busy[slowest] / took for name, took in busy.items()})


def raise_to_forecast(
    rows: Sequence[DemandRate], foretold: Sequence[DemandRate]
) -> tuple[DemandRate, ...]:
    """Return what is asked now, raised to what is foretold: never below either.

    So a flash crowd is answered by its level as soon as that is counted, and a morning before it
    has come.
    """
    highest = {(row.deployment_id, row.pop): row for row in map(_answered, rows)}
    for row in foretold:
        now = highest.get((row.deployment_id, row.pop), row)
        highest[row.deployment_id, row.pop] = DemandRate(
            deployment_id=row.deployment_id,
            pop=row.pop,
            requests_per_s=max(now.requests_per_s, row.requests_per_s),
            uncached_tokens_per_s=max(now.uncached_tokens_per_s, row.uncached_tokens_per_s),
            output_tokens_per_s=max(now.output_tokens_per_s, row.output_tokens_per_s),
            refused_per_s=now.refused_per_s,
        )
    return tuple(row for _, row in sorted(highest.items()))


def with_forecast(cluster: ClusterState, foretold: Sequence[DemandRate]) -> ClusterState:
    """Return the picture with its demand raised to what is foretold of deployments that it has."""
    live = {deployment.deployment_id for deployment in cluster.deployments}
    rows = [row for row in foretold if row.deployment_id in live]
    return msgspec.structs.replace(cluster, demand=raise_to_forecast(cluster.demand, rows))


def _answered(row: DemandRate) -> DemandRate:
    """Count the refused among the answered, as if they had been answered alike."""
    if row.requests_per_s <= 0 or row.refused_per_s <= 0:
        return row
    ratio = 1 + row.refused_per_s / row.requests_per_s
    if not math.isfinite(ratio):
        # So little answered says nothing of what the refused would take.
        return row
    return msgspec.structs.replace(row.times(ratio), refused_per_s=0.0)


def demand_by_deployment(
    rows: Sequence[DemandRate], index: Mapping[PopId, int]
) -> defaultdict[DeploymentId, DeploymentDemand]:
    """Return what is asked of each deployment; `index` numbers the cities.

    What was refused counts as asked. A rate that is no number, below 0 or beyond belief, or of no
    city of ours, is left out. All rows are read at once: a planet has tens of thousands.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(map(NAME, rows)))}
    number = np.fromiter(map(names.__getitem__, map(NAME, rows)), np.int64, len(rows))
    city = np.fromiter(map(index.get, map(POP, rows), repeat(-1)), np.int64, len(rows))
    rates = [np.fromiter(map(attrgetter(r), rows), np.float64, len(rows)) for r in RATES]
    # What is no number compares as False.
    is_read = np.logical_and.reduce([city >= 0, *((r >= 0) & (r < RATE_MAX) for r in rates)])
    kept = np.flatnonzero(is_read & (np.maximum(rates[0], rates[1]) > RATE_MIN))
    kept = kept[np.argsort(number[kept], kind="stable")]
    cities = city[kept]
    answered, refused, prompt, output = (rate[kept] for rate in rates)
    requests = answered + refused
    # So little answered says nothing of what the refused would take, and must divide nothing.
    more = requests / np.where(answered > RATE_MIN, answered, requests)
    prompt, output = prompt * more, output * more
    asked: defaultdict[DeploymentId, DeploymentDemand] = defaultdict(lambda: NO_DEMAND)
    ends = np.searchsorted(number[kept], np.arange(len(names) + 1)).tolist()
    for name, of in zip(names, starmap(slice, pairwise(ends)), strict=True):
        asked[name] = DeploymentDemand(cities[of], requests[of], prompt[of], output[of])
    return asked

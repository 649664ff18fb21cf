"""What cities ask of a deployment, in units a replica can carry: the one reading of demand.

Load is counted in replicas of the reference class of device (the slowest of the fleet for this
deployment): the share of its time that a city's tokens take, prefill and decode apart (uncached
prompt tokens / prefill rate + output tokens / decode rate). Refused requests count: demand is what
was asked, not what was served.
"""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
import numpy as np

from isochrone.wire.ids import PopId
from isochrone.wire.report import Profile
from scheduler.decide.cluster import ClusterState, DemandRate
from scheduler.decide.flow import Floats, Ints

RATE_MIN: Final = 1e-9
RATE_MAX: Final = 1e9
"""Less than anyone notices, and more than any city asks: what is beyond is an error in counting."""

POP: Final = attrgetter("pop")
RATES: Final = tuple(
    attrgetter(name)
    for name in ("requests_per_s", "refused_per_s", "uncached_tokens_per_s", "output_tokens_per_s")
)


class Load(NamedTuple):
    """What each asking city asks, a row a city, and how a replica on each class compares.

    `replicas` is the load; `speed` is how many times the reference replica's a class's one carries.
    """

    cities: Ints
    requests_per_s: Floats
    prompt_tokens_per_s: Floats
    replicas: Floats
    speed: Mapping[str, float]


def load_of(
    rows: Sequence[DemandRate], index: Mapping[PopId, int], rates: Mapping[str, Profile]
) -> Load:
    """Return what is asked of replicas with these rates by class; `index` numbers the cities."""
    asked = _asked(rows, index)
    cities, requests = asked[:, 0].astype(np.int64), asked[:, 1]
    prompt, output = asked[:, 2], asked[:, 3]
    # Where nothing is asked yet, a token of each tells the classes apart.
    mix = (float(prompt.sum()), float(output.sum()))
    if sum(mix) < RATE_MIN:
        mix = (1.0, 1.0)
    busy = {
        name: mix[0] / rate.prefill_tokens_per_s + mix[1] / rate.decode_tokens_per_s
        for name, rate in rates.items()
    }
    if not busy:
        return Load(cities, requests, prompt, requests * 0.0, {})
    slowest = max(sorted(busy), key=lambda name: busy[name])
    reference = rates[slowest]
    load = prompt / reference.prefill_tokens_per_s + output / reference.decode_tokens_per_s
    return Load(
        cities, requests, prompt, load, {name: busy[slowest] / took for name, took in busy.items()}
    )


def raised(rows: Sequence[DemandRate], foretold: Sequence[DemandRate]) -> tuple[DemandRate, ...]:
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


def foreseeing(cluster: ClusterState, foretold: Sequence[DemandRate]) -> ClusterState:
    """Return the picture with its demand raised to what is foretold of deployments that it has."""
    live = {deployment.deployment_id for deployment in cluster.deployments}
    rows = [row for row in foretold if row.deployment_id in live]
    return msgspec.structs.replace(cluster, demand=raised(cluster.demand, rows))


def _answered(row: DemandRate) -> DemandRate:
    """Count the refused among the answered, as if they had been answered alike."""
    if row.requests_per_s <= 0 or row.refused_per_s <= 0:
        return row
    ratio = 1 + row.refused_per_s / row.requests_per_s
    if not math.isfinite(ratio):
        # So little answered says nothing of what the refused would take.
        return row
    return msgspec.structs.replace(row.times(ratio), refused_per_s=0.0)


def _asked(rows: Sequence[DemandRate], index: Mapping[PopId, int]) -> Floats:
    """Return (city, requests, prompt, output) a row; what was refused counts as asked.

    A rate that is no number, below 0 or beyond belief, or of no city of ours, is left out.
    """
    read = np.empty((len(rows), 1 + len(RATES)))
    read[:, 0] = [index.get(pop, -1) for pop in map(POP, rows)]
    for column, rate in enumerate(RATES, 1):
        read[:, column] = np.fromiter(map(rate, rows), np.float64, len(rows))
    # What is no number compares as False.
    read = read[((read >= 0) & (read < RATE_MAX)).all(axis=1)]
    total = read[:, 1] + read[:, 2]
    read, total = read[total > RATE_MIN], total[total > RATE_MIN]
    # So little answered says nothing of what the refused would take, and must divide nothing.
    served = np.where(read[:, 1] > RATE_MIN, read[:, 1], total)
    more = total / served
    return np.column_stack((read[:, 0], total, read[:, 3] * more, read[:, 4] * more))

"""What cities ask of a deployment, in units a replica can carry.

Load is counted in replicas: the share of one replica's time that a city's tokens take, prefill and
decode apart (uncached prompt tokens / prefill rate + output tokens / decode rate).
"""

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from isochrone.wire.ids import PopId
from isochrone.wire.model import Deployment
from isochrone.wire.report import Profile
from scheduler.decide.cluster import DemandRate, MeasuredProfile

HEADROOM: Final = 0.7
"""The share of a replica that planned load may fill; the rest is for what forecasts miss."""

UNMEASURED: Final = Profile(prefill_tokens_per_s=400.0, decode_tokens_per_s=40.0)
"""Rates assumed until an agent has measured: those of a small model on a few CPU cores, for a guess
too low adds a replica too many, and one too high leaves users waiting."""


class CityDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One city's demand for one deployment: requests for latency, load for capacity."""

    pop: PopId
    requests_per_s: float
    load: float


def rates_of(deployment: Deployment, profiles: Sequence[MeasuredProfile]) -> Profile:
    """Return the slowest measured rates of the deployment's model over device classes."""
    measured = [
        entry.profile
        for entry in profiles
        if entry.model_id == deployment.model_id
        and entry.profile.prefill_tokens_per_s > 0
        and entry.profile.decode_tokens_per_s > 0
    ]
    if not measured:
        return UNMEASURED
    return min(measured, key=lambda profile: profile.decode_tokens_per_s)


def demand_of(
    deployment: Deployment,
    rows: Sequence[DemandRate],
    profiles: Sequence[MeasuredProfile],
) -> tuple[CityDemand, ...]:
    """Return what each city asks of `deployment`, the most first, from its `rows` alone.

    Refused requests count: demand is what was asked, not what was served.
    """
    rates = rates_of(deployment, profiles)
    cities = []
    for row in rows:
        served = row.requests_per_s
        asked = served + row.refused_per_s
        if asked <= 0:
            continue
        load = (
            row.uncached_tokens_per_s / rates.prefill_tokens_per_s
            + row.output_tokens_per_s / rates.decode_tokens_per_s
        )
        if served > 0:
            load *= asked / served
        cities.append(CityDemand(pop=row.pop, requests_per_s=asked, load=load))
    return tuple(sorted(cities, key=lambda city: (-city.load, -city.requests_per_s, city.pop)))


def raised(rows: Sequence[DemandRate], foretold: Sequence[DemandRate]) -> tuple[DemandRate, ...]:
    """Return what is asked now, raised to what is foretold: never below either.

    So a flash crowd is answered by its level as soon as that is counted, and a morning before it
    has come.
    """
    highest = {(row.deployment_id, row.pop): row for row in map(_asked, rows)}
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


def _asked(row: DemandRate) -> DemandRate:
    """Count the refused among the answered, as if they had been answered alike."""
    if row.requests_per_s <= 0 or row.refused_per_s <= 0:
        return row
    ratio = 1 + row.refused_per_s / row.requests_per_s
    if not math.isfinite(ratio):
        # So little answered says nothing of what the refused would take.
        return row
    return msgspec.structs.replace(
        row,
        requests_per_s=row.requests_per_s * ratio,
        uncached_tokens_per_s=row.uncached_tokens_per_s * ratio,
        output_tokens_per_s=row.output_tokens_per_s * ratio,
        refused_per_s=0.0,
    )

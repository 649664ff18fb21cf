"""Decides which PoPs' last known demand counts, because routers of theirs report none. Pure.

A router that is cut off from all schedulers goes on serving by the last route table, and its
clients go on using the replicas in it. Without the demand of these clients the planner would end
the replicas within minutes.

The store has the demand of a PoP, not of each router. So the demand that all routers of a PoP
reported before one of them fell silent is the least that counts. This is also right if the silent
router's clients have gone to the others: their reports are not added to it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import PopId
from scheduler.decide.cluster import RATES, DemandRate

SILENT_AFTER_S: Final = 120.0
"""A router that restarts or changes schedulers is back sooner, and the demand of the last ten
minutes bridges that."""

HELD_FOR_S: Final = 3 * 3600.0
"""For how long the demand of silent routers counts. As long as a network failure may last, but not
for ever: routers that were switched off look the same, and their clients may be counted
elsewhere."""


class RouterSilence(NamedTuple):
    """The PoP of a router, and the seconds since a scheduler last heard the router."""

    pop: PopId
    silent_s: float


def held_silences(silences: Sequence[RouterSilence]) -> tuple[RouterSilence, ...]:
    """Return the silences before which a PoP's demand counts."""
    return tuple([row for row in silences if SILENT_AFTER_S < row.silent_s <= HELD_FOR_S])


def raise_to_last_known(
    rows: Sequence[DemandRate], last_known: Sequence[DemandRate]
) -> tuple[DemandRate, ...]:
    """Return for each city and deployment the highest of its demand and the last known, by rate."""
    if not last_known:
        return tuple(rows)
    highest = {(row.deployment_id, row.pop): row for row in rows}
    for row in last_known:
        now = highest.get((row.deployment_id, row.pop), row)
        rates = {rate: max(getattr(now, rate), getattr(row, rate)) for rate in RATES}
        highest[row.deployment_id, row.pop] = msgspec.structs.replace(row, **rates)
    return tuple([highest[key] for key in sorted(highest)])

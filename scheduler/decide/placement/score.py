"""What a plan is worth: one sum, in ms x requests/s, that every part of the planner lowers.

    waiting       weight x requests/s x ms to the seat that serves them; UNSERVED_MS where none can
  + missing       MISSING x weight for each replica under the minimum and each PoP not kept warm
  + absent        ABSENT x weight for a deployment that is asked for and has no replica anywhere
  + one PoP only  ONE_POP_MS x weight x requests/s (and MISSING_SPREAD where two are asked for):
                  what the loss of a PoP would cost a deployment that lives in no other
  + seats         HOLD + HOLD_PER_GIB x memory for each seat; START + START_PER_S x time to be warm
                  for each that is new

The weight of a deployment is 2 ^ ((priority - 50) / 10): under scarcity, ten points of priority
count a request twice. Everyone's minimum comes first; a first replica counts ABSENT more than what
it saves, so that a few requests do not stay cold for many that are warm already; beyond that,
whatever saves most for its bytes.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Final

import numpy as np

from isochrone.wire import geo
from isochrone.wire.ids import PopId
from isochrone.wire.model import Policy
from isochrone.wire.routes import Pop
from scheduler.decide.capacity.device_classes import GIB
from scheduler.decide.cluster import PopDistance
from scheduler.decide.placement.search.load_assignment import Floats

HEADROOM: Final = 0.7
"""The share of a replica that planned load may fill; the rest is for what forecasts miss."""

UNSERVED_MS: Final = 5_000.0
"""The wait priced for load that finds no room: about what a queue under overload comes to."""

MISSING: Final = 1e6
MISSING_SPREAD: Final = 1e3
ABSENT: Final = 1e3
ONE_POP_MS: Final = 100.0

HOLD: Final = 10.0
HOLD_PER_GIB: Final = 0.5
START: Final = 10.0
START_PER_S: Final = 0.02

FAILED_HERE: Final = 1e4
"""What a node on which the deployment failed is thought to cost: any other is tried before."""


class Distances:
    """Round trips in ms between every two PoPs: measured, else by great circle."""

    def __init__(self, pops: Sequence[Pop], measured: Sequence[PopDistance]) -> None:
        self.index = {pop.pop: number for number, pop in enumerate(pops)}
        self.ms: Floats = _great_circles(tuple(pops)).copy()
        rows, columns = (
            np.fromiter(map(self.index.get, map(end, measured), repeat(-1)), np.int64)
            for end in (attrgetter("from_pop"), attrgetter("to_pop"))
        )
        rtt_ms = np.fromiter(map(attrgetter("rtt_ms"), measured), np.float64)
        known = (rows >= 0) & (columns >= 0) & (rtt_ms >= 0)
        self.ms[rows[known], columns[known]] = rtt_ms[known]

    def between(self, one: PopId, other: PopId) -> float:
        """Return the round trip between two PoPs."""
        return float(self.ms[self.index[one], self.index[other]])


def weight_of(policy: Policy) -> float:
    """Return how much a request of a deployment counts: ten points of priority double it."""
    return float(2.0 ** ((policy.priority - 50) / 10))


def hold_cost(memory_bytes: int) -> float:
    """Return what a seat costs for as long as it is held."""
    return HOLD + HOLD_PER_GIB * memory_bytes / GIB


def start_cost(start_s: float) -> float:
    """Return what it costs to bring up a replica that will be warm in `start_s`."""
    return START + START_PER_S * start_s


@lru_cache(maxsize=1)
def _great_circles(pops: tuple[Pop, ...]) -> Floats:
    """Return what geo.round_trip_ms says of every pair, at once. Cities do not move."""
    lat = np.radians(np.array([pop.latitude for pop in pops], dtype=float))
    lon = np.radians(np.array([pop.longitude for pop in pops], dtype=float))
    half_lat = np.sin((lat[None, :] - lat[:, None]) / 2) ** 2
    half_lon = np.sin((lon[None, :] - lon[:, None]) / 2) ** 2
    a = half_lat + np.cos(lat)[:, None] * np.cos(lat)[None, :] * half_lon
    km = 2 * geo.EARTH_RADIUS_KM * np.arcsin(np.sqrt(np.minimum(1.0, a)))
    return np.asarray(geo.RTT_FLOOR_MS + geo.RTT_MS_PER_100_KM * km / 100, dtype=np.float64)

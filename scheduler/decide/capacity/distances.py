"""Round trips between PoPs: measured where routers have measured, else estimated by distance."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from operator import attrgetter

import numpy as np

from isochrone.wire import geo
from isochrone.wire.ids import PopId
from isochrone.wire.peers.routes import Pop
from scheduler.decide.arrays import Floats
from scheduler.decide.cluster import PopDistance


class Distances:
    """Round trips in ms between every two PoPs.

    `index` numbers the PoPs; `ms[from, to]` is the matrix in that numbering.
    """

    def __init__(self, pops: Sequence[Pop], measured: Sequence[PopDistance]) -> None:
        self.index = {pop.pop: number for number, pop in enumerate(pops)}
        self.ms: Floats = _great_circles(tuple(pops)).copy()
        rows, columns = (
            np.fromiter(map(self.index.get, map(end, measured), repeat(-1)), np.int64)
            for end in (attrgetter("from_pop"), attrgetter("to_pop"))
        )
        rtt_ms = np.fromiter(map(attrgetter("rtt_ms"), measured), np.float64)
        valid = (rows >= 0) & (columns >= 0) & (rtt_ms >= 0)
        self.ms[rows[valid], columns[valid]] = rtt_ms[valid]

    def between(self, from_pop: PopId, to_pop: PopId) -> float:
        """Return the round trip between two PoPs in ms."""
        return float(self.ms[self.index[from_pop], self.index[to_pop]])


@lru_cache(maxsize=1)
def _great_circles(pops: tuple[Pop, ...]) -> Floats:
    """Return `geo.round_trip_ms` of every pair as a matrix. Cached: PoPs rarely change."""
    lat = np.radians(np.array([pop.latitude for pop in pops], dtype=float))
    lon = np.radians(np.array([pop.longitude for pop in pops], dtype=float))
    half_lat = np.sin((lat[None, :] - lat[:, None]) / 2) ** 2
    half_lon = np.sin((lon[None, :] - lon[:, None]) / 2) ** 2
    a = half_lat + np.cos(lat)[:, None] * np.cos(lat)[None, :] * half_lon
    km = 2 * geo.EARTH_RADIUS_KM * np.arcsin(np.sqrt(np.minimum(1.0, a)))
    return np.asarray(geo.RTT_FLOOR_MS + geo.RTT_MS_PER_100_KM * km / 100, dtype=np.float64)

"""The round trips between cities and sites in ms, laid out for both ways in which they are read.

Most of a plan's time goes into reading them: numpy reads values that lie side by side several times
faster than others.
"""

from typing import Final

import numpy as np

from scheduler.decide.arrays import Floats, Ints


class LatencyTable:
    """Round trips: `by_city[city, site]`, and the same numbers as `by_site[site, city]`."""

    def __init__(self, ms: Floats) -> None:
        """Read them from `ms[city, site]`."""
        self.by_city: Final[Floats] = np.ascontiguousarray(ms)
        self.by_site: Final[Floats] = np.ascontiguousarray(ms.T)

    def from_cities(self, cities: Ints, sites: Ints) -> Floats:
        """Return a new array `[place in cities, place in sites]`; for many sites."""
        ms = self.by_city.take(cities, axis=0)
        return ms if len(sites) == ms.shape[1] else ms.take(sites, axis=1)

    def to_sites(self, sites: Ints, cities: Ints) -> Floats:
        """Return a new array `[place in sites, place in cities]`; for few sites."""
        return self.by_site.take(sites, axis=0).take(cities, axis=1)

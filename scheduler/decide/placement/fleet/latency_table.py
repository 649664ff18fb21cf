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

    def to_sites(self, sites: Ints, cities: Ints) -> Floats:
        """Return a new array `[place in sites, place in cities]`."""
        return self.by_site.take(sites, axis=0).take(cities, axis=1)

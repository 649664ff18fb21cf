"""The sites that could take a replica of a deployment if they were empty."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import inf

import numpy as np

from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.cluster import FleetNode
from scheduler.decide.placement.fleet.sites import SiteTable


class EligibleSites:
    """Sites, in order, with the `nodes` of each that could take a replica.

    Shared by all deployments that fit on the same nodes, which are most, so that what follows from
    the sites is computed once. With `keeps_latency` that includes `latency_ms`.
    """

    def __init__(
        self, nodes: Mapping[int, Sequence[FleetNode]], table: SiteTable, *, keeps_latency: bool
    ) -> None:
        self.nodes = nodes
        self.numbers: Ints = np.fromiter(nodes, np.int64, len(nodes))
        self.class_numbers = table.class_numbers[self.numbers]
        self._latency = table.latency
        self._kept_latency_ms = self._read_latency_ms() if keeps_latency else None

    @cached_property
    def nearest_ms(self) -> Floats:
        """The round trip from each city to the nearest of the sites; inf without any."""
        nearest_ms: Floats = self._latency.by_site[self.numbers].min(axis=0, initial=inf)
        return nearest_ms

    @property
    def latency_ms(self) -> Floats:
        """The round trips `[city, place in numbers]`."""
        return self._read_latency_ms() if self._kept_latency_ms is None else self._kept_latency_ms

    def _read_latency_ms(self) -> Floats:
        return self._latency.by_city.take(self.numbers, axis=1)

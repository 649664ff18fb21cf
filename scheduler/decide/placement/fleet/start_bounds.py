"""Computes lower bounds of the time until a replica is warm at each site, for all sites at once.

The fill orders sites by upper bounds of their gains. Without these bounds, sites that differ only
in the time to fetch weights would each need a search for their best slot.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from isochrone.wire.ids import NodeId
from isochrone.wire.models.model import CatalogModel
from scheduler.decide.arrays import Floats, Ints
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.capacity.start_times import (
    DISK_BYTES_PER_S,
    ENGINE_START_S,
    HOST_BYTES_PER_S,
    WAN_BYTES_PER_S,
    WAN_FAR_BYTES_PER_S,
    StartTimes,
    plausible_rate,
)
from scheduler.decide.cluster import FleetNode
from scheduler.decide.placement.fleet.sites import FleetSite

WAN_ROUND_TRIPS_MS: Final = np.array([within_ms for within_ms, _ in WAN_BYTES_PER_S])
WAN_RATES: Final = np.array([*(rate for _, rate in WAN_BYTES_PER_S), WAN_FAR_BYTES_PER_S])


class StartBounds:
    """The fastest disk and the fastest fetch that any node of each site has."""

    def __init__(
        self,
        sites: Sequence[FleetSite],
        nodes: Mapping[NodeId, FleetNode],
        start_times: StartTimes,
        distances: Distances,
    ) -> None:
        self._start_times, self._distances = start_times, distances
        members = [[nodes[node_id] for node_id in site.nodes] for site in sites]
        self._disk: Floats = np.array(
            [
                max(plausible_rate(n.disk_bytes_per_s) or DISK_BYTES_PER_S for n in m)
                for m in members
            ]
        )
        fetch = [[plausible_rate(n.fetch_bytes_per_s) for n in m] for m in members]
        self._measured: Floats = np.array([max(rates) for rates in fetch])
        self._is_unmeasured = np.array([min(rates) == 0 for rates in fetch], bool)
        self._pops: Ints = np.array([distances.index[site.pop] for site in sites], np.int64)

    def start_s(self, model: CatalogModel) -> Floats:
        """Return for each site a lower bound of the seconds until a replica would be warm there."""
        rates = np.maximum(self._measured, np.where(self._is_unmeasured, WAN_FAR_BYTES_PER_S, 0))
        holders = [self._distances.index[p] for p in self._start_times.pops_with(model)]
        if not holders:
            return self._fetched(model, rates)
        round_trips = self._distances.ms[self._pops[:, None], np.array(holders)].min(axis=1)
        assumed = WAN_RATES[np.searchsorted(WAN_ROUND_TRIPS_MS, round_trips)]
        rates = np.where(self._is_unmeasured, np.maximum(rates, assumed), rates)
        is_held = np.zeros(len(self._distances.ms), bool)
        is_held[holders] = True
        loaded = ENGINE_START_S + model.weights_bytes / HOST_BYTES_PER_S
        return np.where(is_held[self._pops], loaded, self._fetched(model, rates))

    def _fetched(self, model: CatalogModel, rates: Floats) -> Floats:
        fetch_s = model.artifact.size_bytes / np.maximum(rates, 1.0)
        return ENGINE_START_S + model.weights_bytes / self._disk + fetch_s

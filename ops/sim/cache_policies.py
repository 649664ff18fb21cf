"""Our own choice with other knowledge of the replicas: of their prefix caches, for
cache_knowledge.py, or of their loads, for hard.md."""

from collections.abc import Callable
from typing import Final

from msgspec import structs

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.peers.routes import RouteTable
from ops.sim.isochrone_policy import IsochronePolicy
from ops.sim.router import SimulatedRouter
from ops.sim.traces import TraceRequest
from router.decide.caches.prefix_index import PrefixKeys, PrefixMatches
from router.fleet_state import NOT_REPORTED

KEY_BYTES: Final = 8
"""A prefix's key in a report."""


class EstimatePolicy(IsochronePolicy):
    """Does not hear how far back caches reach."""

    def believe(self, load: ReportedLoad) -> ReportedLoad:
        """Drop what the report says of the cache."""
        return structs.replace(load, cache_age_ms=NOT_REPORTED)


class PrefixesPolicy(EstimatePolicy):
    """Hears also which prefixes that several prompts have in common a replica has."""

    def __init__(
        self, router: SimulatedRouter, table: RouteTable, clock: Callable[[], float]
    ) -> None:
        super().__init__(router, table, clock)
        self.bytes_heard = 0
        self._clock = clock
        self._heard = [0] * len(router.replicas)
        self._prefixes: list[set[int]] = [set() for _ in router.replicas]

    def matches(self, request: TraceRequest, keys: PrefixKeys) -> PrefixMatches:
        """Return the longer of what this router sent and what the replica reported."""
        self._hear()
        own = super().matches(request, keys)
        shares = {}
        for replica, prefixes in enumerate(self._prefixes):
            blocks = 0
            for block in request.blocks:
                if block not in prefixes:
                    break
                blocks += 1
            shares[replica] = blocks * request.block_tokens / request.prompt_tokens
        return self.longer_matches(own, shares)

    def _hear(self) -> None:
        """Take the events up to the newest report."""
        reported_at_s = self._router.reported_at_s(self._clock())
        for replica, prefixes in enumerate(self._prefixes):
            events = self._router.replicas[replica].shared_prefix_events
            while self._heard[replica] < len(events):
                event = events[self._heard[replica]]
                if event.at_s > reported_at_s:
                    break
                self._heard[replica] += 1
                changed = [
                    block for block in event.blocks if (block in prefixes) != event.is_stored
                ]
                self.bytes_heard += KEY_BYTES * len(changed)
                if event.is_stored:
                    prefixes.update(changed)
                else:
                    prefixes.difference_update(changed)


class ExactPolicy(EstimatePolicy):
    """Sees each cache as it is now, with the prompts that wait there."""

    def matches(self, request: TraceRequest, keys: PrefixKeys) -> PrefixMatches:
        """Return what the replicas have or will have cached when they have read what waits."""
        shares = {}
        for number, replica in enumerate(self._router.replicas):
            jobs = [*replica.queue, *([replica.reading] if replica.reading else [])]
            coming = {block for job in jobs for block in job.request.blocks}
            shares[number] = replica.cached(request, coming) / request.prompt_tokens
        return self.longer_matches(PrefixMatches(0.0, ()), shares)


class LoadsPolicy(IsochronePolicy):
    """Knows the load of each replica as its node could report it now."""

    def _take_reports(self, router: SimulatedRouter, now_s: float) -> None:
        for replica, route in enumerate(self._routes):
            if replica not in router.known_dead:
                load = router.replicas[replica].load_at(now_s, router.pop)
                self.fleet.record_load(route, self.believe(load), now_s)

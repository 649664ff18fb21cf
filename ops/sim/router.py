"""The knowledge of one PoP's router in a simulation: its own requests, and old reports of the rest.

Every policy gets the same information: the load of each replica, sampled every half `age_s` and
delivered as long after, so half to whole of `age_s` old; the load in the head of each answer; and
the requests that this router has sent and that have not ended. Our own policy keeps its own
knowledge: the router's `FleetState`.
"""

from bisect import bisect_right
from typing import Final, NamedTuple

from isochrone.wire.http.headers import ReportedLoad
from ops.sim.replica import SimulatedReplica
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld

OUTPUT_TOKENS_ASSUMED: Final = 512


class BelievedLoad(NamedTuple):
    """A replica's load as a router knows it: its own requests, and the others' by report."""

    requests: int
    prefill_tokens: int
    decode_tokens: int

    @property
    def tokens(self) -> int:
        """All tokens there."""
        return self.prefill_tokens + self.decode_tokens


class SimulatedRouter:
    """One PoP's own counts, and the reports it has received."""

    def __init__(
        self, pop: int, world: RoutingWorld, replicas: list[SimulatedReplica], age_s: float
    ) -> None:
        self.pop = pop
        self.world = world
        self.replicas = replicas
        self.rtt_ms = [world.rtt_to(pop, site.replica) for site in world.sites]
        self.by_distance = sorted(range(len(replicas)), key=lambda r: (self.rtt_ms[r], r))
        self.known_dead: frozenset[int] = frozenset()
        """Replicas that failed a request, or that the route table no longer has."""
        self._report_interval_s = age_s / 2
        self._own = [BelievedLoad(0, 0, 0)] * len(replicas)
        self._answered_at_s = [0.0] * len(replicas)
        self._history_at_s: list[list[float]] = [[-1.0] for _ in replicas]
        self._history: list[list[BelievedLoad]] = [[BelievedLoad(0, 0, 0)] for _ in replicas]

    def reported_at_s(self, now_s: float) -> float:
        """Return the time that the newest periodic report is from."""
        return max(0.0, int(now_s / self._report_interval_s) - 1) * self._report_interval_s

    def record_answer(self, replica: int, at_s: float) -> ReportedLoad:
        """Take an answer whose head was written at `at_s`; return the load in it."""
        self._answered_at_s[replica] = max(self._answered_at_s[replica], at_s)
        return self.replicas[replica].load_at(at_s, self.pop)

    def list_replica(self, replica: int, is_listed: bool) -> None:
        """Take a replica that has died out of the table, or one that is back into it."""
        if is_listed:
            self.known_dead -= {replica}
        else:
            self.known_dead |= {replica}

    def believed(self, replica: int, now_s: float) -> BelievedLoad:
        """Return a replica's load: the newest report less what was ours then, plus what is now."""
        at_s = max(self.reported_at_s(now_s), self._answered_at_s[replica])
        load = self.replicas[replica].load_at(at_s, self.pop)
        # Our requests reach the replica half a round trip after we count them.
        index = bisect_right(self._history_at_s[replica], at_s - self.rtt_ms[replica] / 2000) - 1
        then, now = self._history[replica][max(0, index)], self._own[replica]
        return BelievedLoad(
            now.requests + max(0, load.running - then.requests),
            now.prefill_tokens + max(0, load.prefill_tokens - then.prefill_tokens),
            now.decode_tokens + max(0, load.decode_tokens - then.decode_tokens),
        )

    def own_requests(self, replica: int) -> int:
        """Return how many requests of this router are at a replica."""
        return self._own[replica].requests

    def has_capacity(self, believed: BelievedLoad, replica: int, request: TraceRequest) -> bool:
        """Return whether the request fits there, as far as is known."""
        needed = request.prompt_tokens + OUTPUT_TOKENS_ASSUMED
        limit = self.world.sites[replica].profile.kv_tokens_max
        return not believed.tokens or believed.tokens + needed <= limit

    def count(self, replica: int, requests: int, prefill: int, decode: int, now_s: float) -> None:
        """Add to our own requests and tokens at a replica; negative numbers for what ended."""
        own = self._own[replica]
        own = self._own[replica] = BelievedLoad(
            own.requests + requests, own.prefill_tokens + prefill, own.decode_tokens + decode
        )
        self._history_at_s[replica].append(now_s)
        self._history[replica].append(own)

"""Records each node's round trip, its last answer, and the replicas that it has disowned."""

from collections.abc import Callable, Iterable, Set
from typing import Final

from isochrone.wire.ids import NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import Pop, Route
from isochrone.wire.peers.usage import RoundTrip
from router.decide.replicas.latency import RoundTripFilter, expected_rtt_ms

ANSWERING_S: Final = 15.0
"""A node that answered within this time counts as answering."""

DISOWNING_REFUSALS: Final = frozenset({"unknown_replica", "draining"})
"""Refusals by which a node says that it no longer serves a replica."""


class NodeReachability:
    """The results of requests and probes for the nodes of the route table."""

    def __init__(self, pop: PopId) -> None:
        """Measure from this router's own PoP."""
        self._pop = pop
        self._pops: dict[PopId, Pop] = {}
        self._expected_ms: dict[PopId, float] = {}
        self._round_trips: dict[NodeId, RoundTripFilter] = {}
        self._answered_at_s: dict[NodeId, float] = {}
        self._disowned: set[ReplicaId] = set()

    def adopt(self, pops: Iterable[Pop], removed: Set[ReplicaId]) -> None:
        """Expect round trips by the places of these PoPs; know nothing of `removed` replicas."""
        self._pops = {pop.pop: pop for pop in pops}
        self._expected_ms.clear()
        self._disowned -= removed

    def keep_nodes(self, nodes: Set[NodeId], count_max: int) -> bool:
        """Forget up to `count_max` nodes other than these; return whether more are left."""
        gone = list((self._round_trips.keys() | self._answered_at_s.keys()) - nodes)
        for node_id in gone[:count_max]:
            self._round_trips.pop(node_id, None)
            self._answered_at_s.pop(node_id, None)
        return len(gone) > count_max

    def rtt_ms(self, route: Route) -> float:
        """Return the round trip to a route's node: measured, or expected from the distance."""
        measured = self._round_trips.get(route.node_id)
        if measured is not None and measured.rtt_ms is not None:
            return measured.rtt_ms
        expected = self._expected_ms.get(route.pop)
        if expected is None:
            expected = expected_rtt_ms(self._pops.get(self._pop), self._pops.get(route.pop))
            self._expected_ms[route.pop] = expected
        return expected

    def round_trips(self) -> tuple[RoundTrip, ...]:
        """Return the measured round trips, for the scheduler."""
        return tuple(
            RoundTrip(node_id=node_id, rtt_ms=measured.rtt_ms)
            for node_id, measured in sorted(self._round_trips.items())
            if measured.rtt_ms is not None
        )

    def record_round_trip(self, node_id: NodeId, rtt_ms: float, now_s: float) -> None:
        """Note that a node answered a ping after `rtt_ms`."""
        self._round_trips.setdefault(node_id, RoundTripFilter()).add(rtt_ms)
        self._answered_at_s[node_id] = now_s

    def record_answer(self, node_id: NodeId, now_s: float) -> None:
        """Note that a node answered a request."""
        self._answered_at_s[node_id] = now_s

    def record_timeout(self, node_id: NodeId) -> None:
        """Note that a node did not answer a ping."""
        self._answered_at_s.pop(node_id, None)

    def record_refusal(self, replica_id: ReplicaId, refusal: str) -> None:
        """Note how a node answered for a replica: with a refusal, or "" if it serves it."""
        if refusal in DISOWNING_REFUSALS:
            self._disowned.add(replica_id)
        else:
            self._disowned.discard(replica_id)

    def is_disowned(self, replica_id: ReplicaId) -> bool:
        """Return whether the replica's node has said that it no longer serves it."""
        return replica_id in self._disowned

    def answering_test(
        self, known: Callable[[ReplicaId], Route | None], now_s: float, *, trusts_silence: bool
    ) -> Callable[[Route], bool]:
        """Return a function that says whether a node still serves a replica that is `known`.

        A node serves a replica if it has answered lately and not disowned the replica. Without
        `trusts_silence` its answers do not matter. A replica that is not `known` is not served. A
        scheduler that takes over may drop ten thousand replicas, and each change is checked against
        all of them.
        """
        since_s, answered_at_s, disowned = now_s - ANSWERING_S, self._answered_at_s, self._disowned

        def is_answering(route: Route) -> bool:
            served = known(route.replica_id)
            if served is None or served.replica_id in disowned:
                return False
            return not trusts_silence or answered_at_s.get(served.node_id, -1e18) >= since_s

        return is_answering

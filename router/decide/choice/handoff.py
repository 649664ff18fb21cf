"""Lists the peer replicas to which a node may hand a request off, for the header to that node."""

from collections.abc import Container
from typing import Final

from isochrone.wire.http.headers import PEER_REPLICAS_MAX, PeerReplica
from isochrone.wire.ids import ReplicaId
from router.decide.choice.peer_replicas import peer_of_ranked
from router.decide.choice.ranking import RankedRoutes
from router.decide.replicas.latency import GAIN_MAX, OVERHEAD_MS_MAX
from router.decide.replicas.ranked_route import RankedRoute

HANDOFF_MS_MIN: Final = 5.0
"""A request with less predicted queueing and prefill than this is not worth handing off."""


def is_late_handoff(took_ms: float, expected_ms: float) -> bool:
    """Return whether the first token of a handed-off request came so late that one of the two nodes
    is at fault.

    Its time teaches nothing about either replica, as it is not known which was slow. So it counts
    as a failed handoff if it is more than what such a time could teach.
    """
    return took_ms > GAIN_MAX * expected_ms + OVERHEAD_MS_MAX


def handoff_peers(
    routes: RankedRoutes, first: RankedRoute, failing: Container[ReplicaId] = ()
) -> list[PeerReplica]:
    """Return the first route's replica and the peers of its PoP with capacity; [] if none.

    Their prefill counts with the congestion charge, as in ranking. So the node does not undo what
    this router chose by it, but corrects what it did not know: the queues as they are.
    `failing` are the replicas whose handoffs fail: none is named, and none hands a request off.
    """
    first_id = first.route.replica_id
    if first.queue_ms + first.prefill_ms < HANDOFF_MS_MIN or first_id in failing:
        return []
    peers = [
        peer_of_ranked(ranked, routes.congestion_charge)
        for ranked in routes.peers_of_first(PEER_REPLICAS_MAX)
        if ranked.route.replica_id not in failing
    ]
    return peers if len(peers) > 1 else []

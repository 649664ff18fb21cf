"""Lists the peer replicas to which a node may hand a request off, for the header to that node."""

from typing import Final

from isochrone.wire.http.headers import PEER_REPLICAS_MAX, PeerReplica
from router.decide.choice.ranking import RankedRoutes
from router.decide.replicas.ranked_route import RankedRoute

HANDOFF_MS_MIN: Final = 5.0
"""A request with less predicted queueing and prefill than this is not worth handing off."""


def handoff_peers(routes: RankedRoutes, first: RankedRoute) -> list[PeerReplica]:
    """Return the first route's replica and the peers of its PoP with capacity; [] if none."""
    if first.queue_ms + first.prefill_ms < HANDOFF_MS_MIN:
        return []
    return [_peer(ranked) for ranked in routes.peers_of_first(PEER_REPLICAS_MAX)]


def _peer(ranked: RankedRoute) -> PeerReplica:
    return PeerReplica(
        ranked.route.replica_id,
        ranked.route.node_id,
        ranked.route.address,
        ranked.pending_prefill_tokens,
        round(ranked.prefill_ms),
        round(1000 * ranked.ms_per_token),
    )

"""Names replicas of a PoP to the node that gets a request, with the estimates for this request."""

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.peers.routes import Route
from router.decide.replicas.ranked_route import RankedRoute


def peer_of_ranked(ranked: RankedRoute) -> PeerReplica:
    """Return a replica that ranking has estimated."""
    route = ranked.route
    return PeerReplica(
        route.replica_id,
        route.node_id,
        route.address,
        ranked.pending_prefill_tokens,
        round(ranked.prefill_ms),
        round(1000 * ranked.ms_per_token),
    )


def peer_of_route(route: Route, prefill_tokens: int, token_ms: float) -> PeerReplica:
    """Return a replica that would read `prefill_tokens` of the prompt, each in `token_ms`."""
    return PeerReplica(
        route.replica_id,
        route.node_id,
        route.address,
        prefill_tokens,
        round(prefill_tokens * token_ms),
        max(1, round(1000 * token_ms)),
    )

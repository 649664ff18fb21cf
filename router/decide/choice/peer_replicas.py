"""Names replicas of a PoP to the node that gets a request, with the estimates for this request."""

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.peers.routes import Route
from router.decide.replicas.ranked_route import RankedRoute


def peer_of_ranked(ranked: RankedRoute, congestion_charge: float = 0.0) -> PeerReplica:
    """Return a replica that ranking has estimated; its prefill counts the charge times more."""
    route = ranked.route
    return PeerReplica(
        route.replica_id,
        route.node_id,
        route.address,
        ranked.pending_prefill_tokens,
        rounded((1.0 + congestion_charge) * ranked.prefill_ms),
        _token_us(ranked.ms_per_token),
    )


def peer_of_route(route: Route, prefill_tokens: int, token_ms: float) -> PeerReplica:
    """Return a replica that would read `prefill_tokens` of the prompt, each in `token_ms`."""
    return PeerReplica(
        route.replica_id,
        route.node_id,
        route.address,
        prefill_tokens,
        rounded(prefill_tokens * token_ms),
        _token_us(token_ms),
    )


def _token_us(token_ms: float) -> int:
    """Return a token's time in whole us, at least 1: with 0 no queue and no wake would count."""
    return rounded(1000 * token_ms) or 1


def rounded(value: float) -> int:
    """Return what `round` does for a number that is not negative: compiled, in a tenth of the time
    of that call."""
    whole = int(value)
    rest = value - whole
    return whole + 1 if rest > 0.5 or (rest == 0.5 and whole % 2 == 1) else whole

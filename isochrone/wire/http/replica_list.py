"""Writes the headers that name replicas to a node. Compiled: most requests have one."""

from collections.abc import Sequence

from isochrone.wire.http.headers import PEER_REPLICAS_MAX, PeerReplica


def format_peer_replicas(replicas: Sequence[PeerReplica]) -> str:
    """Format peer replicas as a header value: `r1 n1 10.0.0.1:7000 400 120 62,r2 ...`."""
    return ",".join(
        [
            f"{peer.replica_id} {peer.node_id} {peer.address}"
            f" {peer.pending_prefill_tokens} {peer.prefill_ms} {peer.token_us}"
            for peer in replicas[:PEER_REPLICAS_MAX]
        ]
    )

"""Lists the nodes from which a node should fetch an artifact, the nearest first.

Rule 1: nodes of its own PoP come first, then others by round trip. Equals are shuffled by a hash of
both names, so that a thousand nodes do not all ask the same one.
Rule 2: if several nodes of a PoP want an artifact that none there holds, the first by name fetches
it from another PoP; the others wait for the nodes before them.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import xxhash

from isochrone.wire.ids import NodeId, PopId
from isochrone.wire.peers.assignment import PeerSource

SOURCES_MAX: Final = 8
ROUND_TRIP_STEP_MS: Final = 5.0


class ArtifactHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A node that holds an artifact, or is about to fetch it (`holds` is false)."""

    node_id: NodeId
    pop: PopId
    address: str
    holds: bool = True


def rank_sources(
    node_id: NodeId,
    pop: PopId,
    candidates: Iterable[ArtifactHolder],
    round_trip_ms: Callable[[PopId], float],
) -> tuple[PeerSource, ...]:
    """Return at most SOURCES_MAX nodes to fetch from, in order; () if only the origin has it."""
    usable = [
        candidate
        for candidate in candidates
        if candidate.node_id != node_id
        and (candidate.holds or (candidate.pop == pop and candidate.node_id < node_id))
    ]

    def order(candidate: ArtifactHolder) -> tuple[bool, bool, float, int, str]:
        is_far = candidate.pop != pop
        far_ms = round_trip_ms(candidate.pop) // ROUND_TRIP_STEP_MS if is_far else 0.0
        # All nodes put those that still fetch in one order, so that the first waits for none.
        pair = f"{node_id} {candidate.node_id}".encode()
        shuffle = xxhash.xxh64_intdigest(pair) if candidate.holds else 0
        return (is_far, not candidate.holds, far_ms, shuffle, candidate.node_id)

    same_pop = sorted((c for c in usable if c.pop == pop), key=order)
    other_pops = sorted((c for c in usable if c.pop != pop), key=order)
    # Nodes of the own PoP must not take all places: none there may hold the artifact yet.
    kept = [*same_pop[: SOURCES_MAX - min(len(other_pops), SOURCES_MAX // 2)], *other_pops][
        :SOURCES_MAX
    ]
    return tuple(
        PeerSource(node_id=c.node_id, pop=c.pop, address=c.address, holds=c.holds) for c in kept
    )

"""Whom a node should ask for an artifact, the nearest first.

Rule 1: nodes of its own PoP come first, then the others by round trip; equals are shuffled by name,
so that a thousand nodes do not all ask the same one.
Rule 2: of the nodes of a PoP that want an artifact which none there holds, the first by name asks
far away; the others are told to wait for those before them.
"""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import xxhash

from isochrone.wire.assignment import PeerSource
from isochrone.wire.ids import NodeId, PopId

SOURCES_MAX: Final = 8
ROUND_TRIP_STEP_MS: Final = 5.0


class ArtifactHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A node that holds an artifact, or (`holds` false) is about to fetch it."""

    node_id: NodeId
    pop: PopId
    address: str
    holds: bool = True


def artifact_sources(
    node_id: NodeId,
    pop: PopId,
    candidates: Iterable[ArtifactHolder],
    round_trip_ms: Callable[[PopId], float],
) -> tuple[PeerSource, ...]:
    """Return at most SOURCES_MAX nodes to ask, in order; none where the origin is the only one."""
    asked = [
        candidate
        for candidate in candidates
        if candidate.node_id != node_id
        and (candidate.holds or (candidate.pop == pop and candidate.node_id < node_id))
    ]

    def order(candidate: ArtifactHolder) -> tuple[bool, bool, float, int, str]:
        is_far = candidate.pop != pop
        far_ms = round_trip_ms(candidate.pop) // ROUND_TRIP_STEP_MS if is_far else 0.0
        # Those that fetch are asked in one order by all: whoever is first has nobody to wait for.
        pair = f"{node_id} {candidate.node_id}".encode()
        turn = xxhash.xxh64_intdigest(pair) if candidate.holds else 0
        return (is_far, not candidate.holds, far_ms, turn, candidate.node_id)

    near = sorted((c for c in asked if c.pop == pop), key=order)
    far = sorted((c for c in asked if c.pop != pop), key=order)
    # Near ones must not crowd out every far one: the whole PoP may be new to this artifact.
    kept = [*near[: SOURCES_MAX - min(len(far), SOURCES_MAX // 2)], *far][:SOURCES_MAX]
    return tuple(
        PeerSource(node_id=c.node_id, pop=c.pop, address=c.address, holds=c.holds) for c in kept
    )

"""Whether a request begins sooner at a sibling in the PoP than at the replica it was sent to.

A router knows its own requests and old words of all others'; what was on its way from fifteen other
cities it learns when it is too late. Here, a LAN's round trip from all replicas of the PoP, it is
known: so the last step of the choice is made where the request arrives.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from isochrone.wire.headers import PeerReplica
from isochrone.wire.ids import ReplicaId

MARGIN_MS: Final = 5.0
"""Going on to a sibling must save this much: asking it, the way there, and one relay more."""


class Handoff(NamedTuple):
    """Which sibling a request goes on to; it begins sooner with up to `queue_tokens_max` there."""

    sibling: PeerReplica
    queue_tokens_max: int


def estimated_ttft_ms(sibling: PeerReplica, unread_tokens: int) -> float:
    """Return when its answer begins, with so much to be read there before."""
    return sibling.prefill_ms + unread_tokens * sibling.token_us / 1000


def is_worth_probing(here: PeerReplica, unread_tokens: int) -> bool:
    """Say whether so much waits here that another might be sooner."""
    return unread_tokens * here.token_us / 1000 > MARGIN_MS


def choose_handoff(
    siblings: Sequence[PeerReplica], unread: Mapping[ReplicaId, int], queue_tokens_max: int | None
) -> Handoff | None:
    """Choose among `siblings`, first the one asked, by what is `unread` at those that told.

    None where the first is to take the request, or to turn it away: the router puts up with
    `queue_tokens_max` there, any number where it is None, and elsewhere with as long a time.
    """
    here = siblings[0]
    limit_ms = estimated_ttft_ms(here, unread[here.replica_id]) - MARGIN_MS
    if queue_tokens_max is not None:
        limit_ms = min(limit_ms, estimated_ttft_ms(here, queue_tokens_max))
    told = [one for one in siblings[1:] if one.replica_id in unread]
    if not told:
        return None
    best = min(told, key=lambda one: estimated_ttft_ms(one, unread[one.replica_id]))
    if estimated_ttft_ms(best, unread[best.replica_id]) > limit_ms:
        return None
    return Handoff(best, _tokens_within(best, limit_ms))


def _tokens_within(sibling: PeerReplica, ms: float) -> int:
    """Return how much may wait at a sibling for its answer to begin within `ms`."""
    return max(1, int(1000 * (ms - sibling.prefill_ms) / max(1, sibling.token_us)))

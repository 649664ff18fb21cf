"""Deployments whose replicas use each other's KV within a PoP: balanced by load, not by affinity.

A replica can mostly fetch a prefix that another replica of its PoP has cached, in a fraction of the
time that computing it takes. Ranking therefore credits every replica of the PoP with a share of the
prefix (FetchValue). The share is learned from answers: where fetches fail or take long, requests
are sent as without sharing. The request names the replicas that probably have its prefix, and the
one that keeps a copy. That one wins a hash over the PoP's replicas, so every router, even after a
restart, finds it again when the first holder is gone.
"""

from collections.abc import Set
from typing import Final, NamedTuple

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import PopId, ReplicaId
from router.decide.caches.affinity import hash64, rendezvous_winner
from router.decide.caches.prefix_index import (
    NO_MATCHES,
    PrefixKeys,
    PrefixMatch,
    PrefixMatches,
    slots_of,
)
from router.decide.choice.peer_replicas import peer_of_route
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.replica_table import ReplicaTable

FETCH_VALUE_UNKNOWN: Final = 0.8
FETCH_VALUE_MAX: Final = 0.95
"""The share that is assumed before anything was fetched, and at most: the rest keeps requests from
moving for nothing."""

FETCH_VALUE_MIN: Final = 0.4
"""If less is saved, requests are sent as without sharing, with sessions at their replicas. Fetches
that happen nevertheless still update the share."""

_SMOOTHING: Final = 0.1
_SMOOTHING_WORSE: Final = 0.2

PROMPT_TOKENS_MIN: Final = 128
"""A shorter prompt is computed about as soon as it is fetched."""

HOLDERS_MAX: Final = 3
"""The most replicas from which a prefix may be fetched, besides the one that answers."""

STABLE_KEY: Final = 7
"""The key of a prompt's first kibibyte chooses the replica that keeps a copy: it stays the same as
a conversation grows."""


class SharedKvPeers(NamedTuple):
    """The addressed replica and those that may have a prefix; `keeper` keeps a copy of it.

    `own_share` of the prompt is cached at the addressed replica, as far as is known, and
    `held_share` at another one, if that is more.
    """

    replicas: list[PeerReplica]
    keeper: str
    own_share: float = 0.0
    held_share: float = 0.0


NO_SHARED_KV_PEERS: Final = SharedKvPeers([], "")


class FetchValue:
    """The saving of a prefix that another replica of the PoP has, as a share of its worth there.

    The share is measured: the part of the available prefix that was cached in the end, less the
    time that the request waited for it, in units of the time to compute it.
    """

    __slots__ = ("share",)

    def __init__(self) -> None:
        self.share = FETCH_VALUE_UNKNOWN

    def record(
        self, peers: SharedKvPeers, cached_share: float, waited_ms: float, prompt_ms: float
    ) -> None:
        """Learn from an answer to a prompt that takes `prompt_ms` to compute as a whole."""
        offered = peers.held_share - peers.own_share
        if offered <= 0 or prompt_ms <= 0:
            return
        saved = cached_share - peers.own_share - waited_ms / prompt_ms
        sample = max(0.0, min(1.0, saved / offered))
        weight = _SMOOTHING_WORSE if sample < self.share else _SMOOTHING
        self.share = min(FETCH_VALUE_MAX, self.share + weight * (sample - self.share))

    @property
    def is_worth_pooling(self) -> bool:
        """Return whether requests may leave the replicas that have their prefixes."""
        return self.share >= FETCH_VALUE_MIN


def pool_matches(matches: PrefixMatches, table: ReplicaTable, fetch_value: float) -> PrefixMatches:
    """Return what each replica has cached, or what fetching within its PoP is worth there."""
    if not matches.longer:
        return matches
    best: dict[PopId, float] = {}
    masks: dict[float, int] = {}
    for match in matches.longer:
        share = match.share
        masks[share] = masks.get(share, 0) | match.mask
        for slot in slots_of(match.mask):
            route = table.routes[slot]
            if route is not None and share > best.get(route.pop, 0.0):
                best[route.pop] = share
    for pop, best_share in best.items():
        share = fetch_value * best_share
        for slot in table.slots_by_pop.get(pop, ()):
            own = matches.share_at(slot)
            if share > own:
                bit = 1 << slot
                if own in masks:
                    masks[own] &= ~bit
                masks[share] = masks.get(share, 0) | bit
    longer = [PrefixMatch(mask, share) for share, mask in masks.items() if mask]
    return PrefixMatches(matches.all_share, longer)


def shared_kv_peers(
    table: ReplicaTable,
    target: RankedRoute,
    prompt_tokens: int,
    keys: PrefixKeys,
    matches: PrefixMatches,
    session: str,
    excluded: Set[ReplicaId],
) -> SharedKvPeers:
    """Return the replicas from which `target` may fetch a prompt's prefix; none if it is short.

    `matches` are what each replica itself has. One that has as much as `target` is named as well:
    blocks that moved from `target` to another replica are evicted there, which no router learns.
    """
    here = target.route
    if prompt_tokens < PROMPT_TOKENS_MIN:
        return NO_SHARED_KV_PEERS
    own_slot = table.slots.get(here.replica_id, -1)
    own_share = matches.share_at(own_slot) if matches is not NO_MATCHES else 0.0
    slots: list[int] = []
    for slot in table.slots_by_pop.get(here.pop, ()):
        route = table.routes[slot]
        if route is None or slot == own_slot or route.version != here.version:
            continue
        if route.replica_id not in excluded:
            slots.append(slot)
    if not slots:
        return NO_SHARED_KV_PEERS
    keeper = -1
    subject = 0
    if session:
        subject = hash64(session)
    elif len(keys.keys) > STABLE_KEY:
        # A key that does not change as a conversation grows.
        subject = keys.keys[STABLE_KEY]
    if subject:
        keeper = rendezvous_winner(subject, slots, table.hashes, table.weights)
    shares = [(matches.share_at(slot), slot) for slot in slots]
    holders = [
        (share, slot) for share, slot in shares if share >= own_share and share > matches.all_share
    ]
    holders.sort(reverse=True)
    chosen = [slot for _, slot in holders[:HOLDERS_MAX] if slot != keeper]
    if keeper >= 0:
        chosen = [*chosen[: HOLDERS_MAX - 1], keeper]
    if not chosen:
        return NO_SHARED_KV_PEERS
    peers = [peer_of_route(here, prompt_tokens, target.ms_per_token)]
    for slot in chosen:
        route = table.routes[slot]
        assert route is not None
        peers.append(peer_of_route(route, prompt_tokens, table.estimates[slot].ms_per_token))
    kept = table.routes[keeper] if keeper >= 0 else None
    held_share = holders[0][0] if holders else 0.0
    return SharedKvPeers(peers, kept.replica_id if kept is not None else "", own_share, held_share)

"""This router's knowledge of one deployment."""

from collections.abc import Sequence, Set
from typing import Final

from isochrone.wire.ids import ReplicaId
from isochrone.wire.peers.routes import Route
from router.decide.caches.prefix_index import (
    NO_MATCHES,
    PrefixIndex,
    PrefixKeys,
    PrefixMatches,
    SentPrompt,
)
from router.decide.choice.prefill_replicas import PrefillReplicas
from router.decide.choice.shared_kv import FetchValue, pool_matches
from router.decide.replicas.latency import moving_average
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.replica_table import ReplicaTable
from router.decide.routes.adapters import AdapterPlaces

BYTES_PER_TOKEN_DEFAULT: Final = 3.5
BYTES_PER_TOKEN_MIN: Final = 1.0
BYTES_PER_TOKEN_MAX: Final = 16.0
"""A node that reports fewer tokens than the text can have teaches no more than this."""

REFRESH_ALL_S: Final = 1.0
REFRESHED_MAX: Final = 12
"""Estimates age even if nothing happens, so each snapshot also refreshes some that did not change:
all of them within REFRESH_ALL_S, but at most REFRESHED_MAX in one snapshot."""


class DeploymentRouting:
    """A deployment's replicas by slot, the prompts they have cached, and its bytes per token."""

    def __init__(self) -> None:
        self.replicas = ReplicaTable()
        self.prefill_replicas = PrefillReplicas()
        self.adapters = AdapterPlaces()
        self.fetch_value = FetchValue()
        self.routes: Sequence[Route] = []
        self.changed: set[ReplicaId] = set()
        """Replicas whose estimates are out of date."""
        self._prefixes = PrefixIndex()
        self._bytes_per_token: float | None = None
        self._refreshed_at_s: float | None = None
        self._refresh_next = 0

    def set_routes(self, routes: Sequence[Route]) -> Sequence[ReplicaId]:
        """Hold these replicas and no others; return those that join a deployment in service.

        Prefill replicas are held apart: no request is sent to them.

        The first replicas of a deployment, or of this router, are not returned: all are equally
        new.
        """
        replicas = self.replicas
        routes = self.prefill_replicas.split(routes)
        joined = [route.replica_id for route in routes if route.replica_id not in replicas.slots]
        is_in_service = bool(replicas.slots)
        self.routes = routes
        self._prefixes.remove_slots(replicas.set_routes(routes))
        self.adapters.keep_only(replicas.slots.keys())
        return joined if is_in_service else []

    def expect_depth_cost(self, per_token: float) -> None:
        """Start from the cost of depth that the model's dimensions give."""
        self.replicas.depth_cost.expect(per_token)
        self.prefill_replicas.table.depth_cost.expect(per_token)

    def slot_of(self, replica_id: ReplicaId) -> int:
        """Return a replica's slot, -1 if it has none."""
        return self.replicas.slots.get(replica_id, -1)

    def take_changed(self) -> Sequence[int]:
        """Return the slots of replicas that changed since the last call."""
        if not self.changed:
            return ()
        slots = self.replicas.slots
        changed = [slots[replica_id] for replica_id in self.changed if replica_id in slots]
        self.changed.clear()
        return changed

    def slots_due(self, now_s: float) -> Sequence[int]:
        """Return the slots whose estimates this snapshot refreshes because of their age."""
        count = len(self.replicas)
        if self._refreshed_at_s is None:
            self._refreshed_at_s = now_s
        elapsed = (now_s - self._refreshed_at_s) / REFRESH_ALL_S
        due = min(REFRESHED_MAX, int(elapsed * count))
        if not due:
            return ()
        first = self._refresh_next
        self._refreshed_at_s, self._refresh_next = now_s, (first + due) % count
        return [slot % count for slot in range(first, first + min(due, count))]

    def prefix_matches(self, keys: PrefixKeys) -> PrefixMatches:
        """Return how much of a prompt each replica has cached."""
        if not keys.keys:
            return NO_MATCHES
        return self._prefixes.match(keys, self.replicas.all_slots_mask)

    def pooled_matches(self, matches: PrefixMatches) -> PrefixMatches:
        """Return what each replica has cached of a prompt, or can fetch within its PoP."""
        return pool_matches(matches, self.replicas, self.fetch_value.share)

    def record_sent(
        self,
        slot: int,
        ranked: RankedRoute,
        keys: PrefixKeys,
        now_s: float,
        unhealthy: Set[ReplicaId] = frozenset(),
    ) -> SentPrompt | None:
        """Note that a request goes to a slot, where its prompt will be cached."""
        self.replicas.record_sent(slot, ranked, now_s, unhealthy)
        return self._prefixes.record_sent(slot, keys, now_s) if keys.keys else None

    def record_peer_prompt(self, slot: int, keys: PrefixKeys, now_s: float) -> None:
        """Note that another process of this router sent a prompt to a slot."""
        self._prefixes.record_sent(slot, keys, now_s)

    def undo_sent(self, sent: SentPrompt, keys: PrefixKeys) -> None:
        """Note that a prompt was refused: none of it will be cached."""
        self._prefixes.undo_sent(sent, keys)

    def record_prefill_pace(self, replica_id: ReplicaId, ns_per_token: int) -> None:
        """Take the node's measurement of how long a replica takes to read a token, 0 if unknown."""
        slot = self.slot_of(replica_id)
        if slot >= 0 and self.replicas.record_prefill_pace(slot, ns_per_token):
            self.changed.add(replica_id)

    def record_evicted(self, slot: int, used_before_s: float) -> None:
        """Note that a replica's cache has nothing that was used last before this time."""
        self._prefixes.record_evicted(slot, used_before_s)

    def learn_cached_share(self, sent: SentPrompt, share: float, now_s: float) -> None:
        """Learn from a whole answer which share of its prompt the replica had cached."""
        sent.use.ended_at_s = now_s
        self._prefixes.learn_cached_share(sent, share)

    def estimate_tokens(self, text_bytes: int) -> int:
        """Estimate a prompt's tokens from those of this deployment's earlier prompts."""
        return int(text_bytes / (self._bytes_per_token or BYTES_PER_TOKEN_DEFAULT)) + 1

    def learn_prompt_tokens(self, text_bytes: int, tokens: int) -> None:
        """Learn from an answer how many tokens its prompt had."""
        if tokens > 0 and text_bytes > 0:
            sample = max(BYTES_PER_TOKEN_MIN, min(BYTES_PER_TOKEN_MAX, text_bytes / tokens))
            self._bytes_per_token = moving_average(self._bytes_per_token, sample)

"""The prefill replicas of a deployment: no request is sent to them, but nodes of their PoP may have
prompts read there.

The router names them in the order in which they would have read the prompt, by their queues and
cached prefixes as it knows them. The node that gets the request asks for the current queues and
decides. A prompt for a busy decode replica waits for one of them,
which counts when the replicas are ranked.

They answer requests themselves while no other replica of the deployment can: its node is lost, and
the scheduler has not replaced it yet. Engines that cannot do both (`needs_prefill`) do not.
"""

from collections.abc import Sequence, Set
from typing import Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.http.headers import PEER_REPLICAS_MAX, PeerReplica
from isochrone.wire.ids import PopId, ReplicaId
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import Route
from router.decide.caches.prefix_index import NO_KEYS, PrefixIndex, PrefixKeys, SentPrompt
from router.decide.choice.handoff import HANDOFF_MS_MIN
from router.decide.choice.peer_replicas import peer_of_ranked, peer_of_route, rounded
from router.decide.choice.ranking import RankedRoutes
from router.decide.choice.route_query import RouteQuery
from router.decide.replicas.latency import prompt_token_ms
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.replica_table import ReplicaTable, RoutingSnapshot
from router.decide.replicas.tokens_in_flight import InFlightLedger, Reservation

# Looked up once, because access to an enum member runs interpreted code.
PREFILL: Final = Role.PREFILL


@mypyc_attr(free_list_len=1)
class PrefillReading:
    """A prompt that a prefill replica reads for another one: its tokens and its blocks there."""

    __slots__ = ("prompt", "replica_id", "reservation")

    def __init__(
        self, replica_id: ReplicaId, reservation: Reservation, prompt: SentPrompt | None
    ) -> None:
        self.replica_id = replica_id
        self.reservation = reservation
        self.prompt = prompt


@mypyc_attr(acyclic=True)
class PrefillReplica:
    """A prefill replica: what is the same for each prompt."""

    __slots__ = ("replica_id", "route", "slot", "token_ms", "version")

    def __init__(self, route: Route, slot: int) -> None:
        self.route = route
        self.slot = slot
        self.replica_id = route.replica_id
        self.version = route.version
        self.token_ms = prompt_token_ms(route.prefill_tokens_per_s)


class PrefillReplicas:
    """The prefill replicas of one deployment, by PoP."""

    def __init__(self) -> None:
        self._by_pop: dict[PopId, list[PrefillReplica]] = {}
        self.table = ReplicaTable()
        """The prefill replicas by slot, to rank them."""
        self._prefixes = PrefixIndex()
        """The prompts that they have read, by slot."""

    @property
    def routes(self) -> list[Route]:
        """Return all of them."""
        return [replica.route for of_pop in self._by_pop.values() for replica in of_pop]

    def split(self, routes: Sequence[Route]) -> Sequence[Route]:
        """Hold the prefill replicas among `routes` and no others; return the rest.

        If there are none but prefill replicas, all of them take requests.
        """
        serving = [route for route in routes if route.role is not PREFILL]
        # Without any other, they take requests: their engines can do both.
        apart = [route for route in routes if route.role is PREFILL] if serving else []
        self._prefixes.remove_slots(self.table.set_routes(apart))
        self._by_pop = {}
        for route in apart:
            replica = PrefillReplica(route, self.table.slots[route.replica_id])
            self._by_pop.setdefault(route.pop, []).append(replica)
        return serving if apart else routes

    def __bool__(self) -> bool:
        return bool(self._by_pop)

    def wait_ms(self, route: Route, ledger: InFlightLedger, now_s: float) -> float:
        """Return how long a prompt waits at the first prefill replica to be free for `route`."""
        shortest = 0.0
        is_first = True
        for replica in self._by_pop.get(route.pop, ()):
            if replica.version != route.version:
                continue
            wait = ledger.queued_tokens(replica.replica_id, now_s) * replica.token_ms
            if is_first or wait < shortest:
                shortest, is_first = wait, False
        return shortest

    def record_sent(
        self, replica_id: ReplicaId, keys: PrefixKeys, now_s: float
    ) -> SentPrompt | None:
        """Note that a prefill replica reads a prompt, and caches it; None if there is none."""
        slot = self.table.slots.get(replica_id, -1)
        return self._prefixes.record_sent(slot, keys, now_s) if slot >= 0 and keys.keys else None

    def undo_sent(self, replica_id: ReplicaId, sent: SentPrompt, keys: PrefixKeys) -> None:
        """Note that a prefill replica did not read the prompt after all."""
        if self.table.slots.get(replica_id, -1) == sent.slot:
            self._prefixes.undo_sent(sent, keys)

    def learn_cached_share(
        self, replica_id: ReplicaId, sent: SentPrompt, share: float, now_s: float
    ) -> None:
        """Learn which share of a prompt a prefill replica had cached."""
        if self.table.slots.get(replica_id, -1) == sent.slot:
            sent.use.ended_at_s = now_s
            self._prefixes.learn_cached_share(sent, share)

    def record_evicted(self, replica_id: ReplicaId, used_before_s: float) -> None:
        """Note that a replica's cache has nothing that was used last before this time."""
        slot = self.table.slots.get(replica_id, -1)
        if slot >= 0:
            self._prefixes.record_evicted(slot, used_before_s)

    def candidates(
        self,
        target: RankedRoute,
        prompt_tokens: int,
        ledger: InFlightLedger,
        excluded: Set[ReplicaId],
        now_s: float,
        needs_prefill: bool = False,
        keys: PrefixKeys = NO_KEYS,
    ) -> list[PeerReplica]:
        """Return the target and the prefill replicas that could read its prompt; [] if none.

        The one that would have read it first comes first; a cached prefix need not be read. With
        `needs_prefill` the target cannot read the shortest prompt.
        """
        here = target.route
        if target.prefill_ms < HANDOFF_MS_MIN and not needs_prefill:
            return []
        if here.role is PREFILL:
            # It answers in place of a replica that generates, and reads the prompt, too.
            return []
        matches = self._prefixes.match(keys)
        peers = [peer_of_ranked(target)]
        costs_ms: list[float] = [0.0]
        """Until each of them would have read the prompt, in order; the target stays the first."""
        for replica in self._by_pop.get(here.pop, ()):
            if replica.version != here.version or replica.replica_id in excluded:
                continue
            token_ms = replica.token_ms
            uncached = rounded(prompt_tokens * (1 - matches.share_at(replica.slot))) or 1
            cost_ms = (ledger.queued_tokens(replica.replica_id, now_s) + uncached) * token_ms
            place = len(costs_ms)
            while place > 1 and cost_ms < costs_ms[place - 1]:
                place -= 1
            if place < PEER_REPLICAS_MAX:
                costs_ms.insert(place, cost_ms)
                peers.insert(place, peer_of_route(replica.route, uncached, token_ms))
                del costs_ms[PEER_REPLICAS_MAX:], peers[PEER_REPLICAS_MAX:]
        return peers if len(peers) > 1 else []


def has_lost_all(routes: RankedRoutes, snapshot: RoutingSnapshot) -> bool:
    """Return whether no replica can be expected to answer: none is left, or only ejected ones.

    Replicas without capacity do not count as lost: the request waits for them.
    """
    if not routes:
        return routes.full_count == 0
    if not snapshot.ejected_until_s:
        return False
    until_s = snapshot.ejected_until_s.get(routes[0].route.replica_id, 0.0)
    return 1000 * until_s > snapshot.now_ms


def without_slots(query: RouteQuery) -> RouteQuery:
    """Return the query for other replicas, of whose prefixes and adapters nothing is known."""
    return RouteQuery(
        query.request_id,
        query.prompt_tokens,
        query.output_tokens,
        query.session,
        queue_refusals=query.queue_refusals,
    )

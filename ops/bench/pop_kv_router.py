"""The router of the benchmark of KV shared in a PoP: the product's decisions, for four replicas.

The live benchmark (pop_kv) feeds it with answers of nodes, the model (pop_kv_model) with simulated
ones.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from isochrone.wire.http.headers import ReportedLoad
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.routes import DeploymentEntry, Pop, Route, RouteTable
from ops.bench.pop_kv_requests import SharedRequest
from router.decide.caches.affinity import hash64, rendezvous_winner
from router.decide.caches.prefix_index import NO_MATCHES, SentPrompt
from router.decide.choice.ranking import RouteQuery, rank
from router.decide.choice.shared_kv import NO_SHARED_KV_PEERS, SharedKvPeers, shared_kv_peers
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.tokens_in_flight import Reservation
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState

DEPLOYMENT: Final = DeploymentId("bench")
CONTEXT_TOKENS: Final = 2048
LAN_RTT_MS: Final = 0.6
POLICIES: Final = ("affinity", "ours", "ours, sharing")


class ReplicaAddress(NamedTuple):
    """The name of a replica and its node, and the node's address."""

    name: str
    address: str


class ChosenReplica(NamedTuple):
    """The replica that a request goes to, and the replicas that may have its prefix."""

    ranked: RankedRoute
    peers: SharedKvPeers


class PopAttempt:
    """A request that a replica answers."""

    def __init__(
        self,
        shared: SharedRequest,
        chosen: ChosenReplica,
        reservation: Reservation,
        prompt: SentPrompt | None,
        sent_at_s: float,
    ) -> None:
        self.shared = shared
        self.chosen = chosen
        self.reservation = reservation
        self.prompt = prompt
        self.sent_at_s = sent_at_s

    @property
    def route(self) -> Route:
        """The replica's route."""
        return self.chosen.ranked.route

    @property
    def tokens(self) -> int:
        """The tokens of the prompt."""
        return len(self.shared.request.prompt)


class PopRouter:
    """One router of the PoP: the product's own decisions over the replicas of the benchmark."""

    def __init__(
        self,
        replicas: Sequence[ReplicaAddress],
        policy: str,
        rate: float,
        clock: Callable[[], float],
    ) -> None:
        """Route by `policy`, between replicas of `rate` prompt tokens/s."""
        self._policy = policy
        self._clock = clock
        self.fleet = FleetState(PopId("pop"), clock, "bench")
        self.fleet.adopt(a_table(replicas, rate))
        self._attempts = AttemptFeedback(self.fleet)
        self._probes = ProbeFeedback(self.fleet)
        names = [replica.name for replica in replicas]
        for name in names:
            self._probes.record_round_trip(NodeId(name), LAN_RTT_MS)
        self._in_flight = dict.fromkeys(names, 0)
        self._tokens_seen: dict[str, list[int]] = {name: [] for name in names}

    def choose(self, shared: SharedRequest, refusals: int) -> ChosenReplica | None:
        """Rank the replicas as the router does; None if all are full."""
        request, session, keys = shared
        routing = self.fleet.routing(DEPLOYMENT)
        own = routing.prefix_matches(keys)
        binding = self.fleet.sessions.lookup(session, self._clock())
        matches, is_shared = own, self._policy.endswith("sharing")
        if is_shared and own is not NO_MATCHES and routing.fetch_value.is_worth_pooling:
            matches, session, binding = routing.pooled_matches(own), "", None
        query = RouteQuery(
            "bench", len(request.prompt), request.output_tokens, session, binding, matches, refusals
        )
        ranked = rank(self.fleet.snapshot(DEPLOYMENT, self.fleet.clock()), query, frozenset())
        if not ranked:
            return None
        if self._policy == "affinity":
            table = routing.replicas
            slots = list(table.slots.values())
            slot = rendezvous_winner(hash64(shared.session), slots, table.hashes, table.weights)
            route = table.routes[slot]
            assert route is not None
            found = ranked.route_to(route.replica_id)
            return ChosenReplica(found, NO_SHARED_KV_PEERS) if found is not None else None
        peers = NO_SHARED_KV_PEERS
        if is_shared:
            peers = shared_kv_peers(
                routing.replicas,
                ranked[0],
                len(request.prompt),
                keys,
                own,
                shared.session,
                frozenset(),
            )
        return ChosenReplica(ranked[0], peers)

    def send(self, shared: SharedRequest, chosen: ChosenReplica) -> PopAttempt:
        """Note that a request goes to a replica."""
        request, ranked = shared.request, chosen.ranked
        tokens = len(request.prompt)
        reservation = self._attempts.reserve(
            ranked.route,
            self.fleet.clock(),
            prefill=ranked.uncached_tokens,
            decode=request.output_tokens,
            prompt=tokens,
        )
        prompt = self._attempts.record_sent(ranked, self.fleet.clock(), shared.keys)
        self._in_flight[ranked.route.replica_id] += tokens + request.output_tokens
        return PopAttempt(shared, chosen, reservation, prompt, self._clock())

    def record_refused(self, sent: PopAttempt, load: ReportedLoad | None) -> None:
        """Note that the replica refused the request because of its queue."""
        self._attempts.undo_sent(sent.route, sent.prompt, sent.shared.keys)
        self._attempts.record_answer_head(sent.route, load, "queued", sent.reservation)

    def record_first_token(self, sent: PopAttempt, load: ReportedLoad | None) -> None:
        """Note the first token of an answer, and the load in its head."""
        took_ms = 1000 * (self._clock() - sent.sent_at_s)
        self._attempts.record_first_token(sent.chosen.ranked, took_ms, sent.reservation)
        self._attempts.record_answer_head(sent.route, load)

    def close(self, sent: PopAttempt) -> None:
        """Release what the request reserved, however it ended."""
        tokens = sent.tokens + sent.shared.request.output_tokens
        self._in_flight[sent.route.replica_id] -= tokens
        sent.reservation.release()

    def learn(self, sent: PopAttempt, cached_tokens: int, waited_ms: float) -> None:
        """Learn from a whole answer; its request waited so long for a prefix of others."""
        tokens, route = sent.tokens, sent.route
        prompt_ms = tokens * sent.chosen.ranked.ms_per_token
        fetch_value = self.fleet.routing(DEPLOYMENT).fetch_value
        fetch_value.record(sent.chosen.peers, cached_tokens / tokens, waited_ms, prompt_ms)
        self._attempts.learn_cached_tokens(
            route, sent.prompt, tokens, cached_tokens, sent.shared.keys
        )
        session_tokens = tokens + sent.shared.request.output_tokens
        now_s = self._clock()
        self.fleet.sessions.bind(sent.shared.session, route.replica_id, session_tokens, now_s)

    def record_loads(self, name: str, loads: Mapping[ReplicaId, ReportedLoad]) -> None:
        """Note the loads of a node."""
        self._probes.record_ping(NodeId(name), LAN_RTT_MS, loads)

    def sample(self) -> None:
        """Note how many tokens are in flight at each replica, if any are."""
        if any(self._in_flight.values()):
            for name, tokens in self._in_flight.items():
                self._tokens_seen[name].append(tokens)

    def balance(self) -> float:
        """Return the tokens in flight of the replica that had most, in units of the mean."""
        means = [fmean(seen or [0]) for seen in self._tokens_seen.values()]
        return max(means) / max(1e-9, fmean(means))


def a_table(replicas: Sequence[ReplicaAddress], rate: float) -> RouteTable:
    """Return the route table of the benchmark."""
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        pops=(Pop(pop=PopId("pop"), city="pop", country="", latitude=0, longitude=0),),
        deployments=(
            DeploymentEntry(
                deployment_id=DEPLOYMENT,
                name="bench",
                model_id=ModelId("bench"),
                context_tokens=CONTEXT_TOKENS,
            ),
        ),
        routes=tuple(
            Route(
                replica_id=ReplicaId(replica.name),
                deployment_id=DEPLOYMENT,
                version=1,
                node_id=NodeId(replica.name),
                pop=PopId("pop"),
                address=replica.address,
                tokens_in_flight_max=1_000_000,
                prefill_tokens_per_s=rate,
            )
            for replica in replicas
        ),
    )

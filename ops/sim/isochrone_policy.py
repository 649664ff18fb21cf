"""Our own policy in a simulation: the router's `FleetState` and ranking on a simulated clock."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from msgspec import structs

from isochrone.wire.http.headers import PeerReplica, ReportedLoad
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
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, SimulatedRouter
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld
from router.decide.caches.prefix_index import (
    PrefixKeys,
    PrefixMatch,
    PrefixMatches,
    SentPrompt,
    block_ends,
)
from router.decide.choice.handoff import handoff_peers
from router.decide.choice.ranking import RankedRoutes, RouteQuery, rank
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.tokens_in_flight import Reservation
from router.feedback import AttemptFeedback, ProbeFeedback
from router.fleet_state import FleetState

REFUSALS_MAX: Final = 12
"""A request that was refused this often is sent without a limit on the queue."""

DEPLOYMENT: Final = DeploymentId("d")
RTT_SAMPLES: Final = 3


def route_table(world: RoutingWorld) -> RouteTable:
    """Return the route table that a scheduler would publish for this world."""
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        pops=tuple(
            Pop(pop=PopId(pop), city=pop, country="", latitude=0, longitude=0) for pop in world.pops
        ),
        deployments=(
            DeploymentEntry(
                deployment_id=DEPLOYMENT,
                name="m",
                model_id=ModelId("m"),
                context_tokens=131_072,
                depth_cost_per_token=1 / world.sites[0].profile.attention_tokens,
            ),
        ),
        routes=tuple(
            Route(
                replica_id=ReplicaId(f"r{site.replica:03}"),
                deployment_id=DEPLOYMENT,
                version=1,
                node_id=NodeId(f"n{site.replica:03}"),
                pop=PopId(world.pops[site.pop]),
                address="x:1",
                tokens_in_flight_max=site.profile.kv_tokens_max,
                prefill_tokens_per_s=site.profile.prefill_tokens_per_s,
                role=site.role,
            )
            for site in world.sites
        ),
    )


def router_prefix_keys(request: TraceRequest) -> PrefixKeys:
    """Return a request's prefix keys, cut as a router cuts bytes: wider with depth."""
    ends = block_ends(len(request.blocks) * request.block_tokens, request.block_tokens)
    return PrefixKeys(
        [request.blocks[end // request.block_tokens - 1] for end in ends],
        ends,
        max(1, request.prompt_tokens),
    )


class SentRequest:
    """One request in flight, with what was booked for it."""

    __slots__ = ("ranked", "reservation", "routes", "sent", "sent_at_s")

    def __init__(
        self,
        routes: RankedRoutes,
        ranked: RankedRoute,
        reservation: Reservation,
        sent: SentPrompt | None,
        sent_at_s: float,
    ) -> None:
        self.routes = routes
        self.ranked = ranked
        self.reservation = reservation
        self.sent = sent
        self.sent_at_s = sent_at_s


class PrefillForecast(NamedTuple):
    """A router's prediction of a prompt's prefill, as it tells the node."""

    pending_prefill_tokens: int
    prefill_ms: float


class IsochronePolicy:
    """The router's own code as a policy."""

    def __init__(
        self, router: SimulatedRouter, table: RouteTable, clock: Callable[[], float]
    ) -> None:
        self.fleet = FleetState(PopId(router.world.pops[router.pop]), clock)
        self.fleet.adopt(table)
        self._router = router
        self.errors_ms: list[float] = []
        self._attempts = AttemptFeedback(self.fleet)
        self._replica_of = {route.replica_id: n for n, route in enumerate(table.routes)}
        self._routes = table.routes
        self._table = table
        self._unlisted: frozenset[ReplicaId] = frozenset()
        self._reported_at_s = -1.0
        self._ranked: RankedRoutes | None = None
        self._refusals: dict[int, int] = {}
        self._in_flight: dict[int, SentRequest] = {}
        self._probes = probes = ProbeFeedback(self.fleet)
        for site in router.world.sites:
            for _ in range(RTT_SAMPLES):
                rtt_ms = router.rtt_ms[site.replica]
                probes.record_round_trip(NodeId(f"n{site.replica:03}"), rtt_ms)

    def choose(
        self,
        router: SimulatedRouter,
        request: TraceRequest,
        refused: frozenset[int],
        now_s: float,
    ) -> int | None:
        """Take the reports that have arrived, then rank."""
        self._take_reports(router, now_s)
        keys = router_prefix_keys(request)
        query = RouteQuery(
            request_id=f"q{request.number}",
            prompt_tokens=request.prompt_tokens,
            output_tokens=OUTPUT_TOKENS_ASSUMED,
            session=request.session,
            binding=self.fleet.sessions.lookup(request.session, now_s),
            matches=self.matches(request, keys),
            queue_refusals=self._refusals.get(request.number, 0),
        )
        excluded = frozenset(self._routes[replica].replica_id for replica in refused)
        routes = rank(self.fleet.snapshot(DEPLOYMENT, self.fleet.clock()), query, excluded)
        if not routes:
            return None
        self._ranked = routes
        return self._replica_of[routes[0].route.replica_id]

    def matches(self, request: TraceRequest, keys: PrefixKeys) -> PrefixMatches:
        """Return what the replicas have cached of a prompt, as this router knows it."""
        return self.fleet.routing(DEPLOYMENT).prefix_matches(keys)

    def believe(self, load: ReportedLoad) -> ReportedLoad:
        """Return what this policy takes from a report: all of it."""
        return load

    def longer_matches(self, own: PrefixMatches, shares: Mapping[int, float]) -> PrefixMatches:
        """Return `own` matches, raised to these shares by replica."""
        routing = self.fleet.routing(DEPLOYMENT)
        masks: dict[float, int] = {}
        for replica, share in shares.items():
            slot = routing.slot_of(self._routes[replica].replica_id)
            if slot >= 0 and (longest := max(share, own.share_at(slot))):
                masks[longest] = masks.get(longest, 0) | 1 << slot
        return PrefixMatches(0.0, [PrefixMatch(mask, share) for share, mask in masks.items()])

    def queue_tokens_max(self, request: TraceRequest) -> int:
        """Return how long the replica's queue may be; 0 for no limit."""
        if self._refusals.get(request.number, 0) >= REFUSALS_MAX:
            return 0
        return self._in_flight[request.number].ranked.queue_tokens_max

    def handoff_peers(self, request: TraceRequest) -> list[PeerReplica]:
        """Return the replica and the peers of its PoP that may take the request over."""
        sent = self._in_flight[request.number]
        return handoff_peers(sent.routes, sent.ranked, self.handoffs_fail())

    def handoffs_fail(self) -> Mapping[ReplicaId, float]:
        """Return the replicas that take part in no handoff now, because theirs failed."""
        return self.fleet.handoff_health.ejected_until_s(self.fleet.clock())

    def prefill_forecast(self, request: TraceRequest) -> PrefillForecast:
        """Return the predicted prefill where the request was sent."""
        ranked = self._in_flight[request.number].ranked
        return PrefillForecast(ranked.pending_prefill_tokens, ranked.prefill_ms)

    def record_sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Book a request where `choose` ranked it first."""
        assert self._ranked is not None
        self._book(request, self._ranked, self._ranked[0], now_s)

    def record_handoff(self, request: TraceRequest, replica: int) -> int:
        """Move what was booked to the replica that has the request now; return where it was."""
        sent = self._in_flight[request.number]
        ranked = sent.routes.route_to(self._routes[replica].replica_id)
        assert ranked is not None, f"replica {replica} is in no table"
        if ranked is not sent.routes[0]:
            self._attempts.record_handed_off(sent.routes[0].route, ranked.route)
        sent.reservation.release()
        self._attempts.undo_sent(sent.ranked.route, sent.sent, router_prefix_keys(request))
        self._book(request, sent.routes, ranked, sent.sent_at_s)
        return self._replica_of[sent.ranked.route.replica_id]

    def record_refusal(self, request: TraceRequest, at_s: float) -> None:
        """Release what was booked: the replica refused the request at `at_s`."""
        self._refusals[request.number] = self._refusals.get(request.number, 0) + 1
        sent = self._in_flight.pop(request.number)
        sent.reservation.release(at_s)
        self._attempts.undo_sent(sent.ranked.route, sent.sent, router_prefix_keys(request))

    def record_failure(self, request: TraceRequest) -> None:
        """Note that the connection of a request was reset: its node is lost."""
        sent = self._in_flight.pop(request.number)
        sent.reservation.release()
        route = sent.ranked.route
        self._attempts.undo_sent(route, sent.sent, router_prefix_keys(request))
        self._attempts.record_failure(route)
        self._probes.eject_node(route.node_id)

    def list_replica(self, replica: int, is_listed: bool) -> None:
        """Adopt a table without a replica that died, or with it again."""
        replica_id = self._routes[replica].replica_id
        self._unlisted = (
            self._unlisted - {replica_id} if is_listed else self._unlisted | {replica_id}
        )
        routes = tuple(r for r in self._routes if r.replica_id not in self._unlisted)
        self.fleet.adopt(structs.replace(self._table, routes=routes))
        if is_listed:
            for _ in range(RTT_SAMPLES):
                rtt_ms = self._router.rtt_ms[replica]
                self._probes.record_round_trip(self._routes[replica].node_id, rtt_ms)

    def is_handed_off(self, request: TraceRequest) -> bool:
        """Whether a request is at another replica than it was sent to."""
        sent = self._in_flight.get(request.number)
        return sent is not None and sent.ranked.route is not sent.routes[0].route

    def record_load(
        self, replica: int, load: ReportedLoad, reported_at_s: float, is_handed_off: bool
    ) -> None:
        """Take the load in the head of an answer, which another node may have relayed."""
        route = self._routes[replica]
        if route.replica_id in self._unlisted:
            return
        record = self.fleet.record_peer_load if is_handed_off else self.fleet.record_load
        record(route, self.believe(load), reported_at_s)

    def record_first_token(self, request: TraceRequest, now_s: float) -> None:
        """Learn from a first token, and note the error of its prediction."""
        sent = self._in_flight.get(request.number)
        if sent is None:
            return  # Its connection was reset while this token was on its way.
        took_ms = 1000 * (now_s - sent.sent_at_s)
        self.errors_ms.append(took_ms - sent.ranked.ttft_ms)
        if self.is_handed_off(request):
            self._attempts.record_handoff_answer(sent.routes[0], sent.ranked.route, took_ms)
            took_ms = min(took_ms, sent.routes[0].ttft_ms)
        self._attempts.record_first_token(sent.ranked, took_ms, sent.reservation)

    def record_end(self, request: TraceRequest, cached_tokens: int, now_s: float) -> None:
        """Learn from a whole answer, and bind its session."""
        sent = self._in_flight.pop(request.number)
        sent.reservation.release()
        route = sent.ranked.route
        self._attempts.learn_cached_tokens(
            route, sent.sent, request.prompt_tokens, cached_tokens, router_prefix_keys(request)
        )
        self.bind_session(request, sent, now_s)

    def bind_session(self, request: TraceRequest, sent: SentRequest, now_s: float) -> None:
        """Bind a session to the replica that answered."""
        if request.session:
            self.fleet.sessions.bind(
                request.session,
                sent.ranked.route.replica_id,
                request.prompt_tokens + request.output_tokens,
                now_s,
            )

    def _book(
        self, request: TraceRequest, routes: RankedRoutes, ranked: RankedRoute, sent_at_s: float
    ) -> None:
        reservation = self._attempts.reserve(
            ranked.route,
            self.fleet.clock(),
            prefill=ranked.uncached_tokens,
            decode=OUTPUT_TOKENS_ASSUMED,
            prompt=request.prompt_tokens,
        )
        sent = self._attempts.record_sent(ranked, self.fleet.clock(), router_prefix_keys(request))
        self._in_flight[request.number] = SentRequest(routes, ranked, reservation, sent, sent_at_s)

    def _take_reports(self, router: SimulatedRouter, now_s: float) -> None:
        """Take each replica's newest load report, if new ones have arrived."""
        reported_at_s = router.reported_at_s(now_s)
        if reported_at_s <= self._reported_at_s:
            return
        self._reported_at_s = reported_at_s
        for replica, route in enumerate(self._routes):
            if replica in router.known_dead:
                continue
            load = router.replicas[replica].load_at(reported_at_s, router.pop)
            self.fleet.record_load(route, self.believe(load), reported_at_s)
            self.fleet.record_pace(route, load, reported_at_s)

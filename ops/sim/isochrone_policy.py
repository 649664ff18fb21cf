"""Our own choice in a simulation: `FleetState` itself, with the simulation's clock."""

from collections.abc import Callable

from isochrone.wire.headers import Load, Sibling
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
from isochrone.wire.routes import DeploymentEntry, Pop, Route, RouteTable
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, SimulatedRouter
from ops.sim.traces import TraceRequest
from ops.sim.world import RoutingWorld
from router.decide.prefix_index import PrefixKeys, SentPrompt, block_ends
from router.decide.ranking import RankedRoutes, RouteQuery, rank
from router.decide.replica_table import RankedRoute
from router.decide.tokens_in_flight import Reservation
from router.fleet_state import FleetState

TURNED_AWAY_MAX = 12
DEPLOYMENT = DeploymentId("d")


def route_table(world: RoutingWorld) -> RouteTable:
    """Return the route table that a scheduler would publish of this world."""
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        pops=tuple(
            Pop(pop=PopId(pop), city=pop, country="", latitude=0, longitude=0) for pop in world.pops
        ),
        deployments=(
            DeploymentEntry(
                deployment_id=DEPLOYMENT, name="m", model_id=ModelId("m"), context_tokens=131_072
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
            )
            for site in world.sites
        ),
    )


def router_prefix_keys(request: TraceRequest) -> PrefixKeys:
    """Return a request's prefix keys, cut as wide as a router cuts bytes: wider the deeper."""
    ends = block_ends(len(request.blocks) * request.block_tokens, request.block_tokens)
    return PrefixKeys(
        [request.blocks[end // request.block_tokens - 1] for end in ends],
        ends,
        max(1, request.prompt_tokens),
    )


class SentRequest:
    """One request on its way: what was booked for it."""

    __slots__ = ("picked_at_s", "ranked", "reservation", "routes", "sent")

    def __init__(
        self,
        routes: RankedRoutes,
        ranked: RankedRoute,
        reservation: Reservation,
        sent: SentPrompt | None,
        picked_at_s: float,
    ) -> None:
        self.routes = routes
        self.ranked = ranked
        self.reservation = reservation
        self.sent = sent
        self.picked_at_s = picked_at_s


class IsochronePolicy:
    """The router's own code behind the shape that policies have here."""

    def __init__(
        self, router: SimulatedRouter, table: RouteTable, clock: Callable[[], float]
    ) -> None:
        self.fleet = FleetState(PopId(router.world.pops[router.pop]), clock)
        self.fleet.adopt(table)
        self.errors_ms: list[float] = []
        self._replica_of = {route.replica_id: n for n, route in enumerate(table.routes)}
        self._routes = table.routes
        self._told_at_s = -1.0
        self._chosen: RankedRoutes | None = None
        self._turned: dict[int, int] = {}
        self.turned_away = 0
        self.passed = 0
        self._ways: dict[int, SentRequest] = {}
        for site in router.world.sites:
            for _ in range(3):
                self.fleet.record_round_trip(
                    NodeId(f"n{site.replica:03}"), router.rtt_ms[site.replica]
                )

    def choose(
        self, router: SimulatedRouter, request: TraceRequest, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Hear what is told by now, and rank."""
        self._hear(router, now_s)
        ask = RouteQuery(
            request_id=f"q{request.number}",
            prompt_tokens=request.prompt_tokens,
            output_tokens=OUTPUT_TOKENS_ASSUMED,
            session=request.session,
            binding=self.fleet.session_binding(request.session),
            matches=self.fleet.prefix_matches(DEPLOYMENT, router_prefix_keys(request)),
        )
        excluded = frozenset(self._routes[replica].replica_id for replica in refused)
        routes = rank(self.fleet.snapshot(DEPLOYMENT), ask, excluded)
        if not routes:
            return None
        self._chosen = routes
        return self._replica_of[routes[0].route.replica_id]

    def queue_tokens_max(self, request: TraceRequest) -> int:
        """Return how much may wait there, or 0 for any: a request is turned away only so often."""
        if self._turned.get(request.number, 0) >= TURNED_AWAY_MAX:
            return 0
        return self._ways[request.number].ranked.queue_tokens_max

    def siblings(self, request: TraceRequest) -> list[Sibling]:
        """Return whom of its PoP the request might be passed on to, itself first."""
        way = self._ways[request.number]
        return way.routes.siblings(way.ranked)

    def passed_on(self, request: TraceRequest, replica: int) -> None:
        """A sibling of the replica asked gives the answer."""
        way = self._ways[request.number]
        ranked = way.routes.route_to(self._routes[replica].replica_id)
        assert ranked is not None, f"replica {replica} is in no table"
        self.passed += 1
        way.reservation.release()
        self.fleet.undo_sent(way.ranked.route, way.sent, router_prefix_keys(request))
        self._book(request, way.routes, ranked, way.picked_at_s)

    def told(self, request: TraceRequest) -> tuple[int, float]:
        """Return what of its prompt is to be read where it goes, and how long that takes."""
        ranked = self._ways[request.number].ranked
        return ranked.pending_prefill_tokens, ranked.prefill_ms

    def sent(self, request: TraceRequest, replica: int, now_s: float) -> None:
        """Book it."""
        assert self._chosen is not None
        self._book(request, self._chosen, self._chosen[0], now_s)

    def _book(
        self, request: TraceRequest, routes: RankedRoutes, ranked: RankedRoute, now_s: float
    ) -> None:
        reservation = self.fleet.reserve(
            ranked.route,
            prefill=ranked.uncached_tokens,
            decode=OUTPUT_TOKENS_ASSUMED,
            prompt=request.prompt_tokens,
        )
        sent = self.fleet.record_sent(ranked, router_prefix_keys(request))
        self._ways[request.number] = SentRequest(routes, ranked, reservation, sent, now_s)

    def refused(self, request: TraceRequest, at_s: float) -> None:
        """The replica did not take it when it came there, at `at_s`."""
        self._turned[request.number] = self._turned.get(request.number, 0) + 1
        self.turned_away += 1
        way = self._ways.pop(request.number)
        way.reservation.release(at_s)
        self.fleet.undo_sent(way.ranked.route, way.sent, router_prefix_keys(request))

    def heard(self, replica: int, load: Load, at_s: float) -> None:
        """An answer's head told the load."""
        self.fleet.record_load(self._routes[replica], load, at_s)

    def first_token(self, request: TraceRequest, now_s: float) -> None:
        """Learn from the first token."""
        way = self._ways[request.number]
        took_ms = 1000 * (now_s - way.picked_at_s)
        self.errors_ms.append(took_ms - way.ranked.ttft_ms)
        self.fleet.record_first_token(way.ranked, took_ms, way.reservation)

    def ended(self, request: TraceRequest, cached_tokens: int, now_s: float) -> None:
        """Learn from the whole answer."""
        way = self._ways.pop(request.number)
        way.reservation.release()
        route = way.ranked.route
        told = (way.sent, request.prompt_tokens, cached_tokens)
        self.fleet.learn_cached_tokens(route, *told, router_prefix_keys(request))
        if request.session:
            self.fleet.sessions.bind(
                request.session,
                route.replica_id,
                request.prompt_tokens + request.output_tokens,
                now_s,
            )

    def _hear(self, router: SimulatedRouter, now_s: float) -> None:
        at_s = router.told_at_s(now_s)
        if at_s <= self._told_at_s:
            return
        self._told_at_s = at_s
        for replica, route in enumerate(self._routes):
            load = router.replicas[replica].load_at(at_s, router.pop)
            self.fleet.record_load(route, load, at_s)

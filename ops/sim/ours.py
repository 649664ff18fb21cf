"""Our own choice in a simulation: `router.fleet.Fleet` itself, with the simulation's clock."""

from collections.abc import Callable

from isochrone.wire.headers import PeerReplica, ReportedLoad
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
from ops.sim.router import OUTPUT_TOKENS_ASSUMED, Router
from ops.sim.traces import Request
from ops.sim.world import World
from router.decide.board import Ranked
from router.decide.pick import Ask, Routes, rank
from router.decide.prefixes import PrefixKeys, Sent, ends_of
from router.decide.tokens_in_flight import Reservation
from router.fleet import Fleet

TURNED_AWAY_MAX = 12
DEPLOYMENT = DeploymentId("d")


def table_of(world: World) -> RouteTable:
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


def keys_of(request: Request) -> PrefixKeys:
    """Return a request's prefix keys, cut as wide as a router cuts bytes: wider the deeper."""
    ends = ends_of(len(request.blocks) * request.block_tokens, request.block_tokens)
    return PrefixKeys(
        [request.blocks[end // request.block_tokens - 1] for end in ends],
        ends,
        max(1, request.prompt_tokens),
    )


class Way:
    """One request on its way: what was booked for it."""

    __slots__ = ("picked_at_s", "ranked", "reservation", "routes", "sent")

    def __init__(
        self,
        routes: Routes,
        ranked: Ranked,
        reservation: Reservation,
        sent: Sent | None,
        picked_at_s: float,
    ) -> None:
        self.routes = routes
        self.ranked = ranked
        self.reservation = reservation
        self.sent = sent
        self.picked_at_s = picked_at_s


class Ours:
    """The router's own code behind the shape that policies have here."""

    def __init__(self, router: Router, table: RouteTable, clock: Callable[[], float]) -> None:
        self.fleet = Fleet(PopId(router.world.pops[router.pop]), clock)
        self.fleet.adopt(table)
        self.errors_ms: list[float] = []
        self._replica_of = {route.replica_id: n for n, route in enumerate(table.routes)}
        self._routes = table.routes
        self._told_at_s = -1.0
        self._chosen: Routes | None = None
        self._turned: dict[int, int] = {}
        self.turned_away = 0
        self.passed = 0
        self._ways: dict[int, Way] = {}
        for site in router.world.sites:
            for _ in range(3):
                self.fleet.measured(NodeId(f"n{site.replica:03}"), router.rtt_ms[site.replica])

    def choose(
        self, router: Router, request: Request, refused: frozenset[int], now_s: float
    ) -> int | None:
        """Hear what is told by now, and rank."""
        self._hear(router, now_s)
        ask = Ask(
            request_id=f"q{request.number}",
            prompt_tokens=request.prompt_tokens,
            output_tokens=OUTPUT_TOKENS_ASSUMED,
            session=request.session,
            seat=self.fleet.seat(request.session),
            held=self.fleet.held(DEPLOYMENT, keys_of(request)),
        )
        excluded = frozenset(self._routes[replica].replica_id for replica in refused)
        routes = rank(self.fleet.view(DEPLOYMENT), ask, excluded)
        if not routes:
            return None
        self._chosen = routes
        return self._replica_of[routes[0].route.replica_id]

    def queue_tokens_max(self, request: Request) -> int:
        """Return how much may wait there, or 0 for any: a request is turned away only so often."""
        if self._turned.get(request.number, 0) >= TURNED_AWAY_MAX:
            return 0
        return self._ways[request.number].ranked.queue_tokens_max

    def siblings(self, request: Request) -> list[PeerReplica]:
        """Return whom of its PoP the request might be passed on to, itself first."""
        way = self._ways[request.number]
        return way.routes.siblings(way.ranked)

    def passed_on(self, request: Request, replica: int) -> None:
        """A sibling of the replica asked gives the answer."""
        way = self._ways[request.number]
        ranked = way.routes.of(self._routes[replica].replica_id)
        assert ranked is not None, f"replica {replica} is in no table"
        self.passed += 1
        way.reservation.release()
        self.fleet.unsent(way.ranked.route, way.sent, keys_of(request))
        self._book(request, way.routes, ranked, way.picked_at_s)

    def told(self, request: Request) -> tuple[int, float]:
        """Return what of its prompt is to be read where it goes, and how long that takes."""
        ranked = self._ways[request.number].ranked
        return ranked.unread_tokens, ranked.prefill_ms

    def sent(self, request: Request, replica: int, now_s: float) -> None:
        """Book it."""
        assert self._chosen is not None
        self._book(request, self._chosen, self._chosen[0], now_s)

    def _book(self, request: Request, routes: Routes, ranked: Ranked, now_s: float) -> None:
        reservation = self.fleet.reserve(
            ranked.route,
            prefill=ranked.uncached_tokens,
            decode=OUTPUT_TOKENS_ASSUMED,
            prompt=request.prompt_tokens,
        )
        sent = self.fleet.sent(ranked, keys_of(request))
        self._ways[request.number] = Way(routes, ranked, reservation, sent, now_s)

    def refused(self, request: Request, at_s: float) -> None:
        """The replica did not take it when it came there, at `at_s`."""
        self._turned[request.number] = self._turned.get(request.number, 0) + 1
        self.turned_away += 1
        way = self._ways.pop(request.number)
        way.reservation.release(at_s)
        self.fleet.unsent(way.ranked.route, way.sent, keys_of(request))

    def heard(self, replica: int, load: ReportedLoad, at_s: float) -> None:
        """An answer's head told the load."""
        self.fleet.told(self._routes[replica], load, at_s)

    def first_token(self, request: Request, now_s: float) -> None:
        """Learn from the first token."""
        way = self._ways[request.number]
        took_ms = 1000 * (now_s - way.picked_at_s)
        self.errors_ms.append(took_ms - way.ranked.ttft_ms)
        self.fleet.first_token(way.ranked, took_ms, way.reservation)

    def ended(self, request: Request, cached_tokens: int, now_s: float) -> None:
        """Learn from the whole answer."""
        way = self._ways.pop(request.number)
        way.reservation.release()
        route = way.ranked.route
        told = (way.sent, request.prompt_tokens, cached_tokens)
        self.fleet.learned_cached(route, *told, keys_of(request))
        if request.session:
            self.fleet.sessions.sat(
                request.session,
                route.replica_id,
                request.prompt_tokens + request.output_tokens,
                now_s,
            )

    def _hear(self, router: Router, now_s: float) -> None:
        at_s = router.told_at_s(now_s)
        if at_s <= self._told_at_s:
            return
        self._told_at_s = at_s
        for replica, route in enumerate(self._routes):
            load = router.replicas[replica].load_at(at_s, router.pop)
            self.fleet.told(route, load, at_s)

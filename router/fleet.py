"""What this router believes of the fleet: the only mutable belief in the house.

Everything that learns tells it here; everything that decides gets a frozen picture of one
deployment by `view()`. One event loop owns it: no locks.
"""

from collections.abc import Callable, Mapping, Set
from types import MappingProxyType
from typing import Final

from isochrone.wire.headers import Load
from isochrone.wire.ids import DeploymentId, KeyId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import DeploymentEntry, KeyEntry, Pop, Route, RouteTable
from isochrone.wire.usage import RoundTrip
from router.decide.affinity import Seat, Sessions
from router.decide.health import Health
from router.decide.latency import RoundTripFilter, expected_rtt_ms, smoothed
from router.decide.pick import Candidate, Picture
from router.decide.rollout import Draw, draw
from router.decide.tokens_in_flight import Reservation, TokensInFlight

BYTES_PER_TOKEN_FIRST: Final = 3.5
BYTES_PER_TOKEN_MIN: Final = 1.0
ANSWERING_S: Final = 15.0
DISOWNING: Final = frozenset({"unknown_replica", "draining"})
"""Refusals by which a node says that it no longer serves a replica."""


class Fleet:
    """The table served by, and what was measured since."""

    def __init__(self, pop: PopId, clock: Callable[[], float]) -> None:
        """Believe nothing yet. `clock` gives monotonic seconds."""
        self.pop = pop
        self.table: RouteTable | None = None
        self.keys: Mapping[KeyId, KeyEntry] = MappingProxyType({})
        self.confirmed_at_s: float | None = None
        self.health = Health()
        self.sessions = Sessions()
        self._on_room: Callable[[DeploymentId], None] | None = None
        self.in_flight = TokensInFlight(self._released)
        self._clock = clock
        self._by_name: dict[str, DeploymentEntry] = {}
        self._routes: dict[DeploymentId, list[Route]] = {}
        self._route_by_id: dict[ReplicaId, Route] = {}
        self._pops: dict[PopId, Pop] = {}
        self._round_trips: dict[NodeId, RoundTripFilter] = {}
        self._answered_at_s: dict[NodeId, float] = {}
        self._disowned: set[ReplicaId] = set()
        self._bytes_per_token: dict[DeploymentId, float] = {}

    def on_room(self, tell: Callable[[DeploymentId], None]) -> None:
        """Let `tell` hear of every deployment that may have got room."""
        self._on_room = tell

    def adopt(self, table: RouteTable) -> None:
        """Serve by `table` from now on, and forget what it no longer names."""
        gone = set(self._route_by_id) - {route.replica_id for route in table.routes}
        self.table = table
        self.keys = MappingProxyType({key.key_id: key for key in table.keys})
        self._by_name = {entry.name: entry for entry in table.deployments}
        self._pops = {pop.pop: pop for pop in table.pops}
        self._route_by_id = {route.replica_id: route for route in table.routes}
        self._routes = {entry.deployment_id: [] for entry in table.deployments}
        for route in self._route_by_id.values():
            if route.deployment_id in self._routes:
                self._routes[route.deployment_id].append(route)
        self.health.forget(gone)
        self.in_flight.forget(gone)
        self._disowned -= gone
        nodes = {route.node_id for route in table.routes}
        for belief in (self._round_trips, self._answered_at_s):
            for node_id in [node_id for node_id in belief if node_id not in nodes]:
                belief.pop(node_id, None)
        for deployment_id in [d for d in self._bytes_per_token if d not in self._routes]:
            del self._bytes_per_token[deployment_id]
        if self._on_room is not None:
            for deployment_id in self._routes:
                self._on_room(deployment_id)

    def deployment(self, name: str) -> DeploymentEntry | None:
        """Return the deployment that clients call `name`."""
        return self._by_name.get(name)

    @property
    def deployments(self) -> tuple[DeploymentEntry, ...]:
        """All deployments, as the table orders them."""
        return self.table.deployments if self.table else ()

    def view(self, deployment_id: DeploymentId) -> Picture:
        """Return the frozen picture of one deployment, now."""
        now_s = self._clock()
        return Picture(
            candidates=tuple(
                Candidate(
                    route,
                    self.rtt_ms(route),
                    self.in_flight.at(route.replica_id, now_s),
                )
                for route in self._routes.get(deployment_id, ())
            ),
            ejected_until=self.health.ejected_until(now_s),
        )

    def draw(self, entry: DeploymentEntry, subject: str) -> Draw:
        """Return which replicas a request leaves alone while a new version is on its way."""
        return draw(entry, subject, self.pop, self._routes.get(entry.deployment_id, ()))

    def rtt_ms(self, route: Route) -> float:
        """Return the round trip to a route's node: measured, or by distance until then."""
        measured = self._round_trips.get(route.node_id)
        if measured is not None and measured.rtt_ms is not None:
            return measured.rtt_ms
        return expected_rtt_ms(self._pops.get(self.pop), self._pops.get(route.pop))

    def reserve(self, route: Route, *, prefill: int, decode: int) -> Reservation:
        """Book a request's tokens at a replica, before it is sent."""
        self.health.picked(route.replica_id, self._clock())
        return self.in_flight.reserve(route.replica_id, prefill=prefill, decode=decode)

    def heard(self, route: Route, load: Load | None, refused: str = "") -> None:
        """A replica answered: its node lives, its load is what it says, and it is there or not."""
        now_s = self._clock()
        self._answered_at_s[route.node_id] = now_s
        if refused in DISOWNING:
            self._disowned.add(route.replica_id)
        else:
            self._disowned.discard(route.replica_id)
        if load is not None:
            self.in_flight.hear(route.replica_id, load, now_s)

    def measured(self, node_id: NodeId, rtt_ms: float) -> None:
        """A node answered a ping."""
        self._round_trips.setdefault(node_id, RoundTripFilter()).measured(rtt_ms)
        self._answered_at_s[node_id] = self._clock()

    def silent(self, node_id: NodeId) -> None:
        """A node did not answer a ping."""
        self._answered_at_s.pop(node_id, None)

    def answering(self) -> Set[ReplicaId]:
        """Return the replicas of the table that are there, as far as their nodes tell."""
        since_s = self._clock() - ANSWERING_S
        return {
            route.replica_id
            for route in self._route_by_id.values()
            if self._answered_at_s.get(route.node_id, -1e18) >= since_s
            and route.replica_id not in self._disowned
        }

    def round_trips(self) -> tuple[RoundTrip, ...]:
        """Return what was measured, for the scheduler."""
        return tuple(
            RoundTrip(node_id=node_id, rtt_ms=measured.rtt_ms)
            for node_id, measured in sorted(self._round_trips.items())
            if measured.rtt_ms is not None
        )

    def nodes(self) -> dict[NodeId, str]:
        """Return the address of every node of the table."""
        return {route.node_id: route.address for route in self._route_by_id.values()}

    def seat(self, session: str) -> Seat | None:
        """Return where a session sat last."""
        return self.sessions.find(session, self._clock()) if session else None

    def tokens_of(self, deployment_id: DeploymentId, text_bytes: int) -> int:
        """Estimate a prompt's tokens by what this deployment's prompts took so far."""
        return int(text_bytes / self._bytes_per_token.get(deployment_id, BYTES_PER_TOKEN_FIRST)) + 1

    def learned_tokens(self, deployment_id: DeploymentId, text_bytes: int, tokens: int) -> None:
        """An answer told how many tokens its prompt had."""
        if tokens > 0 and text_bytes > 0:
            old = self._bytes_per_token.get(deployment_id)
            sample = max(BYTES_PER_TOKEN_MIN, text_bytes / tokens)
            self._bytes_per_token[deployment_id] = smoothed(old, sample)

    def _released(self, replica_id: ReplicaId) -> None:
        route = self._route_by_id.get(replica_id)
        if route is not None and self._on_room is not None:
            self._on_room(route.deployment_id)

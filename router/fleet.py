"""What this router believes of the fleet: the only mutable belief in the house.

Everything that learns tells it here; everything that decides gets a frozen picture of one
deployment by `view()`. One event loop owns it: no locks.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from types import MappingProxyType
from typing import Final

from isochrone.wire.headers import ReportedLoad
from isochrone.wire.ids import DeploymentId, KeyId, NodeId, PopId, ReplicaId
from isochrone.wire.routes import DeploymentEntry, KeyEntry, Pop, Route, RouteTable
from isochrone.wire.usage import RoundTrip
from router.decide.affinity import Seat, Sessions
from router.decide.board import Board, Picture, Ranked
from router.decide.health import Health, judge
from router.decide.latency import RoundTripFilter, expected_rtt_ms, smoothed
from router.decide.prefixes import NO_KEYS, NOTHING_HELD, Held, PrefixIndex, PrefixKeys, Sent
from router.decide.rollout import Draw, draw
from router.decide.slow_start import SlowStart
from router.decide.tokens_in_flight import Reservation, TokensInFlight
from router.sharing import Outbox, Prompt

BYTES_PER_TOKEN_FIRST: Final = 3.5
BYTES_PER_TOKEN_MIN: Final = 1.0
ANSWERING_S: Final = 15.0
LOOK_AROUND_S: Final = 1.0
LOOKED_AT_MAX: Final = 12
"""Each picture also renews some replicas that nothing happened to: all within this time, but at
most so many at once."""

DISOWNING: Final = frozenset({"unknown_replica", "draining"})
"""Refusals by which a node says that it no longer serves a replica."""


class _Deployment:
    """What is believed of one: its replicas, who read which prompts, how long its tokens are."""

    def __init__(self) -> None:
        self.board = Board()
        self.prefixes = PrefixIndex()
        self.routes: list[Route] = []
        self.bytes_per_token: float | None = None
        self.looked_at_s: float | None = None
        self.look_at = 0


class Fleet:
    """The table served by, and what was measured since."""

    def __init__(self, pop: PopId, clock: Callable[[], float], name: str = "") -> None:
        """Believe nothing yet. `clock` gives monotonic seconds; nodes know this life by `name`."""
        self.pop = pop
        self.name = name
        self.table: RouteTable | None = None
        self.keys: Mapping[KeyId, KeyEntry] = MappingProxyType({})
        self.health = Health()
        self.sessions = Sessions()
        self.outbox = Outbox()
        self._on_room: Callable[[DeploymentId], None] | None = None
        self._changed: set[ReplicaId] = set()
        self.in_flight = TokensInFlight(self._released, self._changed.add)
        self._clock = clock
        self._by_name: dict[str, DeploymentEntry] = {}
        self._deployments: dict[DeploymentId, _Deployment] = {}
        self._route_by_id: dict[ReplicaId, Route] = {}
        self._replicas_on: dict[NodeId, list[ReplicaId]] = {}
        self._pops: dict[PopId, Pop] = {}
        self._expected_ms: dict[PopId, float] = {}
        self._round_trips: dict[NodeId, RoundTripFilter] = {}
        self._answered_at_s: dict[NodeId, float] = {}
        self._disowned: set[ReplicaId] = set()
        self._slow_start = SlowStart()

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
        self._expected_ms.clear()
        self._route_by_id = {route.replica_id: route for route in table.routes}
        self._replicas_on = {}
        of: dict[DeploymentId, list[Route]] = {}
        for route in self._route_by_id.values():
            self._replicas_on.setdefault(route.node_id, []).append(route.replica_id)
            of.setdefault(route.deployment_id, []).append(route)
        named = [entry.deployment_id for entry in table.deployments]
        self._deployments = {one: self._deployment(one) for one in named}
        self._seat(of)
        self.health.forget(gone)
        self.in_flight.forget(gone)
        self._slow_start.forget(gone)
        self._disowned -= gone
        nodes = {route.node_id for route in table.routes}
        for belief in (self._round_trips, self._answered_at_s):
            for node_id in [node_id for node_id in belief if node_id not in nodes]:
                belief.pop(node_id, None)
        self._changed |= set(self._route_by_id)
        if self._on_room is not None:
            for deployment_id in named:
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
        deployment = self._deployment(deployment_id)
        for replica_id in self._changed:
            self._refresh(replica_id, now_s)
        self._changed.clear()
        self._look_around(deployment, now_s)
        starting = self._slow_start.shares(now_s)
        if starting:
            # Who has just begun takes only a share, once there is something to do.
            busy = [one for one in starting if self.in_flight.at(one, now_s).tokens]
            starting = {one: starting[one] for one in busy}
        return Picture(deployment.board, now_s, self.health.ejected_until(now_s), starting)

    def _deployment(self, deployment_id: DeploymentId) -> _Deployment:
        """Return what is believed of a deployment; of one that no table names, nothing."""
        return self._deployments.get(deployment_id) or _Deployment()

    def _place(self, of: Route | Prompt) -> tuple[_Deployment, int]:
        """Return what is believed of a replica's deployment, and its slot; -1 where it has none."""
        deployment = self._deployment(of.deployment_id)
        return deployment, deployment.board.slots.get(of.replica_id, -1)

    def _look_around(self, deployment: _Deployment, now_s: float) -> None:
        """Refresh some replicas nothing happened to: what is known of them ages too."""
        board, at = deployment.board, deployment.look_at
        if deployment.looked_at_s is None:
            deployment.looked_at_s = now_s
        passed = (now_s - deployment.looked_at_s) / LOOK_AROUND_S
        due = min(LOOKED_AT_MAX, int(passed * len(board)))
        if not due:
            return
        for slot in range(at, at + min(due, len(board))):
            route = board.routes[slot % len(board)]
            if route is not None:
                self._refresh(route.replica_id, now_s)
        deployment.looked_at_s, deployment.look_at = now_s, (at + due) % len(board)

    def _refresh(self, replica_id: ReplicaId, now_s: float) -> None:
        route = self._route_by_id.get(replica_id)
        if route is None:
            return
        deployment, slot = self._place(route)
        if slot >= 0:
            line = self.in_flight.line(replica_id)
            deployment.board.refresh(slot, self.rtt_ms(route), line, now_s)

    def _seat(self, of: Mapping[DeploymentId, list[Route]]) -> None:
        for deployment_id, deployment in self._deployments.items():
            board, routes = deployment.board, of.get(deployment_id, [])
            deployment.routes = routes
            # To a deployment that had nobody, or is new to this router, all are alike.
            if board.slots:
                new = [r.replica_id for r in routes if r.replica_id not in board.slots]
                self._slow_start.began(new, self._clock())
            deployment.prefixes.forget(board.adopt(routes))

    def held(self, deployment_id: DeploymentId, keys: PrefixKeys) -> Held:
        """Return who holds how much of a prompt."""
        if not keys.keys:
            return NOTHING_HELD
        deployment = self._deployment(deployment_id)
        return deployment.prefixes.match(keys, deployment.board.everyone)

    def draw(self, entry: DeploymentEntry, subject: str) -> Draw:
        """Return which replicas a request leaves alone while a new version is on its way."""
        return draw(entry, subject, self.pop, self._deployment(entry.deployment_id).routes)

    def rtt_ms(self, route: Route) -> float:
        """Return the round trip to a route's node: measured, or by distance until then."""
        measured = self._round_trips.get(route.node_id)
        if measured is not None and measured.rtt_ms is not None:
            return measured.rtt_ms
        expected = self._expected_ms.get(route.pop)
        if expected is None:
            expected = expected_rtt_ms(self._pops.get(self.pop), self._pops.get(route.pop))
            self._expected_ms[route.pop] = expected
        return expected

    def reserve(
        self, route: Route, *, prefill: int, decode: int, prompt: int | None = None
    ) -> Reservation:
        """Book a request before it is sent: of its `prompt`, `prefill` tokens are to be read."""
        now_s, replica_id = self._clock(), route.replica_id
        self.health.picked(replica_id, now_s)
        deployment, slot = self._place(route)
        board = deployment.board
        if slot < 0:
            return self.in_flight.reserve(replica_id, prefill=prefill, decode=decode)
        return self.in_flight.reserve(
            replica_id,
            prefill=prefill,
            decode=decode,
            work_ms=board.work_ms(slot, prompt or prefill, (prompt or prefill) - prefill),
            arrives_s=now_s + self.rtt_ms(route) / 2000,
            others_ms=board.others_ms(slot, self.in_flight.line(replica_id), now_s),
        )

    def sent(self, ranked: Ranked, keys: PrefixKeys = NO_KEYS) -> Sent | None:
        """A request goes where it was ranked: note whether that is away, and what it caches."""
        route = ranked.route
        deployment, slot = self._place(route)
        if slot < 0:
            return None
        now_s = self._clock()
        deployment.board.went(slot, ranked, now_s)
        return deployment.prefixes.sent(slot, keys, now_s) if keys.keys else None

    def unsent(self, route: Route, sent: Sent | None, keys: PrefixKeys) -> None:
        """It was turned away there: nothing of it is cached."""
        deployment, slot = self._place(route)
        if sent is not None and slot == sent.slot:
            deployment.prefixes.unsent(sent, keys)

    def first_token(self, ranked: Ranked, took_ms: float, reservation: Reservation) -> None:
        """The first token came `took_ms` after the request went: learn how fast that replica is."""
        now_s = self._clock()
        route = ranked.route
        reservation.first_token(now_s - ranked.rtt_ms / 2000)
        deployment, slot = self._place(route)
        if slot >= 0:
            deployment.board.observed(slot, ranked, took_ms, now_s)
            self._changed.add(route.replica_id)

    def learned_cached(
        self,
        route: Route,
        sent: Sent | None,
        prompt_tokens: int,
        cached_tokens: int,
        keys: PrefixKeys = NO_KEYS,
    ) -> None:
        """An answer told how much of its prompt was cached."""
        if prompt_tokens <= 0:
            return
        deployment, slot = self._place(route)
        share = cached_tokens / prompt_tokens
        deployment.board.learned_uncached(1.0 - share)
        if sent is not None and slot == sent.slot:
            deployment.prefixes.answered(sent, share)
            self.outbox.add(route.deployment_id, route.replica_id, sent, keys)

    def learned_prompts(self, rows: Iterable[Prompt]) -> None:
        """Another process of this router had these prompts answered."""
        now_s = self._clock()
        for row in rows:
            deployment, slot = self._place(row)
            if slot >= 0:
                deployment.prefixes.sent(slot, row.prefix_keys, now_s)

    def heard(
        self,
        route: Route,
        load: ReportedLoad | None,
        refused: str = "",
        reservation: Reservation | None = None,
    ) -> None:
        """A replica answered: its node lives, its load is what it says, and it is there or not.

        Its word counts no prompt of whom it answers: either refused, or read. So do we before it is
        compared with ours, or as much of what others have there would be taken for our own.
        """
        now_s = self._clock()
        at_s = now_s - self.rtt_ms(route) / 2000
        if reservation is not None and refused:
            reservation.release(at_s)
        elif reservation is not None:
            reservation.first_token(at_s)
        self._answered_at_s[route.node_id] = now_s
        replica_id = route.replica_id
        if replica_id not in self._route_by_id:
            # No table names it any more: it was forgotten, and nobody would forget it again.
            return
        if refused in DISOWNING:
            self._disowned.add(replica_id)
        else:
            self._disowned.discard(replica_id)
        if load is not None:
            self.told(route, load, at_s)

    def pinged(
        self, node_id: NodeId, rtt_ms: float, loads: Mapping[ReplicaId, ReportedLoad]
    ) -> None:
        """A node answered a ping, and told the loads of its replicas, asked of late or not."""
        self.measured(node_id, rtt_ms)
        at_s = self._clock() - rtt_ms / 2000
        for replica_id in self._replicas_on.get(node_id, ()):
            load = loads.get(replica_id)
            if load is not None:
                self.told(self._route_by_id[replica_id], load, at_s)

    def told(self, route: Route, load: ReportedLoad, at_s: float) -> None:
        """A replica's load as it was at `at_s` became known."""
        if load.others_pending_prefill_tokens >= 0:
            others = (load.others_pending_prefill_tokens, load.others_decode_tokens)
            self.in_flight.hear_others(route.replica_id, *others, at_s)
            return
        unread = load.pending_prefill_tokens
        if unread < 0:
            board = self._deployment(route.deployment_id).board
            unread = round(load.prefill_tokens * board.uncached_share)
        self.in_flight.hear(route.replica_id, unread, load.decode_tokens, at_s)

    def measured(self, node_id: NodeId, rtt_ms: float) -> None:
        """A node answered a ping."""
        self._round_trips.setdefault(node_id, RoundTripFilter()).measured(rtt_ms)
        self._changed.update(self._replicas_on.get(node_id, ()))
        self._answered_at_s[node_id] = self._clock()

    def silent(self, node_id: NodeId) -> None:
        """A node did not answer a ping."""
        self._answered_at_s.pop(node_id, None)
        for replica_id in self.health.ejected():
            route = self._route_by_id.get(replica_id)
            if route is not None and route.node_id == node_id:
                self.health.unreachable(replica_id, self._clock())

    def gone(self, node_id: NodeId) -> int:
        """A node fell silent, and most others did not; return how many replicas that ejects."""
        now_s = self._clock()
        return sum(self.health.gone(one, now_s) for one in self._replicas_on.get(node_id, ()))

    def answered(self, route: Route) -> None:
        """A replica answered a request well."""
        if self.health.answered(route.replica_id):
            self._slow_start.began((route.replica_id,), self._clock())

    def failed(self, route: Route) -> str:
        """A request failed at a replica; where that ejects it, return why."""
        if route.replica_id not in self._route_by_id:
            return ""
        peers = list(self._deployment(route.deployment_id).board.slots)
        return self.health.failed(route.replica_id, self._clock(), peers)

    def panics(self) -> int:
        """Return in how many deployments more than half of the replicas look ill."""
        if not self.health.ejected():
            return 0
        ejected_until = self.health.ejected_until(self._clock())
        return sum(
            bool(judge(list(deployment.board.slots), ejected_until).last)
            for deployment in self._deployments.values()
        )

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
        learned = self._deployment(deployment_id).bytes_per_token
        return int(text_bytes / (learned or BYTES_PER_TOKEN_FIRST)) + 1

    def learned_tokens(self, deployment_id: DeploymentId, text_bytes: int, tokens: int) -> None:
        """An answer told how many tokens its prompt had."""
        if tokens > 0 and text_bytes > 0:
            deployment = self._deployment(deployment_id)
            sample = max(BYTES_PER_TOKEN_MIN, text_bytes / tokens)
            deployment.bytes_per_token = smoothed(deployment.bytes_per_token, sample)

    def _released(self, replica_id: ReplicaId) -> None:
        route = self._route_by_id.get(replica_id)
        if route is not None and self._on_room is not None:
            self._on_room(route.deployment_id)

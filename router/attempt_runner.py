"""One attempt of a request: rank the replicas, send to the best, read its answer, learn from it.

The pipeline decides when to attempt and what follows. A failed step raises AttemptFailed.
"""

from collections.abc import Callable, Set
from functools import partial
from typing import Final

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_sharing
from isochrone.wire.peers.adapter import AdapterEntry, parse_loaded_adapters
from isochrone.wire.peers.assignment import PeerSource
from isochrone.wire.peers.routes import DeploymentEntry, Route
from router.config import RouterConfig
from router.dataplane.exchange import AttemptFailed, NodeExchange, NodeRequest, ResponseHead
from router.dataplane.media_usage import media_usage
from router.dataplane.response_checks import check_status, read_usage
from router.dataplane.upstream import Upstream
from router.decide.attempt import AttemptEvent, FailureCause, event_of
from router.decide.caches.prefix_index import NO_MATCHES
from router.decide.choice.handoff import handoff_peers
from router.decide.choice.prefill_replicas import has_lost_all, without_slots
from router.decide.choice.ranking import RankedRoutes, RouteQuery, rank
from router.decide.choice.shared_kv import NO_SHARED_KV_PEERS, SharedKvPeers, shared_kv_peers
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.routes.adapters import HOLDERS_MAX
from router.decide.routes.rollout import draw_version
from router.feedback import AttemptFeedback
from router.fleet_state import FleetState
from router.proxy_headers import node_headers
from router.recording.metrics import Metrics
from router.recording.record import Recorder
from router.recording.trace_spans import RequestTracer
from router.request_context import NO_REPLICAS, OUTCOME_COMPLETE, ReplicaAttempt, RequestContext

# Looked up once, because access to an enum member runs interpreted code.
SENT: Final = AttemptEvent.SENT
ANSWERED: Final = AttemptEvent.ANSWERED
ADAPTERS: Final = headers.ADAPTERS.encode()
FETCH_MS: Final = kv_sharing.FETCH_MS.encode()

LEARNED_LOAD_MS_MAX: Final = 5
"""An answer that waited longer for its adapter teaches nothing about its replica's speed."""


class AttemptRunner:
    """Makes attempts, and tells the fleet state and the recorder how they went."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: FleetState,
        upstream: Upstream,
        recorder: Recorder,
        metrics: Metrics,
        clock: Callable[[], float],
        tracer: RequestTracer | None,
    ) -> None:
        """Use the parts that the whole router shares. `clock` returns monotonic seconds."""
        self._tracer = tracer
        self._config = config
        self._fleet = fleet
        self._feedback = AttemptFeedback(fleet)
        self._upstream = upstream
        self._recorder = recorder
        self._metrics = metrics
        self._clock = clock

    def rank(self, context: RequestContext) -> RankedRoutes:
        """Rank the replicas for the next attempt."""
        request, expected, fleet = context.request, context.expected, self._fleet
        now_s = self._clock()
        routing = fleet.routing(request.deployment_id)
        matches = routing.prefix_matches(request.prefix_keys)
        session, binding = request.session, fleet.sessions.lookup(request.session, now_s)
        can_fetch = request.deployment.shares_kv and routing.fetch_value.is_worth_pooling
        if can_fetch and matches is not NO_MATCHES:
            # Any replica of the PoP can get the prefix: what is known of it decides, not affinity.
            matches, session, binding = routing.pooled_matches(matches), "", None
        subject: str = request.request_id
        adapter_ms, adapter_mask = 0.0, 0
        if request.adapter is not None:
            adapter_id = request.adapter.adapter_id
            adapter_ms = routing.adapters.load_ms(request.adapter.size_mib)
            adapter_mask = routing.adapters.mask(adapter_id, routing.replicas.slots)
            if not adapter_mask:
                # No replica has it: among equal replicas, all of its requests choose the same one.
                subject = adapter_id
        query = RouteQuery(
            subject,
            expected.prompt,
            expected.output,
            session,
            binding,
            matches,
            context.excluded.queue_refusals,
            adapter_ms,
            adapter_mask,
        )
        snapshot = fleet.snapshot(request.deployment_id, now_s)
        # The deployment as the table has it now: a rollout may advance while the request waits.
        deployment = fleet.directory.deployment(request.deployment.name) or request.deployment
        excluded, outside = context.excluded.all(), NO_REPLICAS
        if request.regions:
            outside = fleet.directory.replicas_outside(request.regions)
            excluded |= outside
        version = fleet.draw_version(deployment, request.session or request.request_id, outside)
        full = fleet.full_for(context.request_group, now_s) & routing.replicas.slots.keys()
        if context.is_refused_if_busy:
            full |= fleet.in_flight.full_batches(routing.replicas.slots)
        full |= self._upstream.unconnected(routing.routes)
        context.excluded.full = full - excluded
        excluded |= full
        routes = rank(snapshot, query, excluded | version.excluded)
        if not routes and version.may_fall_back:
            routes = rank(snapshot, query, excluded)
        may_prefill = not (deployment.needs_prefill or context.excluded.refused or full)
        if routing.prefill_replicas and may_prefill and has_lost_all(routes, snapshot):
            return self._rank_prefill(context, deployment, query, excluded, outside) or routes
        return routes

    def _rank_prefill(
        self,
        context: RequestContext,
        deployment: DeploymentEntry,
        query: RouteQuery,
        excluded: Set[ReplicaId],
        outside: Set[ReplicaId],
    ) -> RankedRoutes:
        """Rank the prefill replicas, to answer in place of the others."""
        request, fleet = context.request, self._fleet
        routes = fleet.routing(request.deployment_id).prefill_replicas.routes
        routes = [route for route in routes if route.replica_id not in outside]
        version = draw_version(deployment, request.session or request.request_id, fleet.pop, routes)
        unconnected = self._upstream.unconnected(routes)
        context.excluded.full = unconnected | context.excluded.full
        snapshot = fleet.prefill_snapshot(request.deployment_id)
        return rank(snapshot, without_slots(query), excluded | version.excluded | unconnected)

    def send(
        self, context: RequestContext, routes: RankedRoutes
    ) -> tuple[ReplicaAttempt, NodeExchange]:
        """Send the request to the best replica."""
        request, stream, target = context.request, context.stream, routes[0]
        attempt = context.attempt = ReplicaAttempt(target)
        now_s = attempt.sent_at_s = self._clock()
        self._fleet.note_sent(context.request_group, target.route.replica_id, now_s)
        self._reserve(context, attempt, target, now_s)
        if self._tracer is not None:
            self._tracer.begin_attempt(context, attempt)
        timeout_s = self._config.first_byte_timeout_s
        if not request.is_stream:
            timeout_s += context.expected.output * self._config.token_timeout_s
        is_resumption = stream.generated.tokens > 0
        # A suspect must lose one engine at most, so it is not handed off. A request with an adapter
        # stays where that is loaded.
        stays = is_resumption or context.is_suspect or request.adapter is not None
        failing = self._fleet.handoff_health.ejected_until_s(now_s)
        peers = [] if stays else handoff_peers(routes, target, failing)
        reads_alone = stays and not request.deployment.needs_prefill
        readers = [] if reads_alone else self._prefill_peers(context, target)
        has_holders = not is_resumption and request.adapter is None
        holders = self._holders(context, target) if has_holders else NO_SHARED_KV_PEERS
        if request.adapter is not None:
            self._note_adapter(context, target, request.adapter)
        attempt.kv_peers = holders
        header_lines = node_headers(
            context,
            target,
            peers,
            readers,
            holders,
            router=self._fleet.name,
            timeout_s=timeout_s,
            sent_at_s=now_s,
        )
        exchange = attempt.exchange = self._upstream.send(
            target.route.node_id,
            target.route.address,
            NodeRequest("POST", request.path, header_lines, stream.body),
            timeout_s,
            self._config.answer_bytes_max,
            stream.open_relay(request),
            is_resumption=is_resumption,
        )
        if peers:
            attempt.handoff_ids = frozenset([peer.replica_id for peer in peers[1:]])
            exchange.on_handoff = partial(self._move_to, context, attempt, routes)
        if readers:
            exchange.on_prefill = partial(self._record_prefill, context, attempt)
        attempt.take(SENT)
        return attempt, exchange

    def _note_adapter(
        self, context: RequestContext, target: RankedRoute, adapter: AdapterEntry
    ) -> None:
        """Name the nodes that have the adapter, and count on the target to load it."""
        places = self._fleet.routing(context.request.deployment_id).adapters
        directory = self._fleet.directory
        holding = [*places.replicas_with(adapter.adapter_id)]
        known = [directory.route(replica_id) for replica_id in holding[: HOLDERS_MAX + 1]]
        context.adapter_holders = tuple(
            PeerSource(node_id=route.node_id, pop=route.pop, address=route.address)
            for route in known
            if route is not None and route.node_id != target.route.node_id
        )
        places.record_sent(target.route.replica_id, adapter.adapter_id)

    def _learn_adapter(
        self, context: RequestContext, route: Route, adapter: AdapterEntry, head: ResponseHead
    ) -> bool:
        """Learn which adapters a replica has; return whether this answer waited for its own."""
        value = head.fields.get(ADAPTERS)
        loaded = parse_loaded_adapters(value.decode("latin-1")) if value is not None else None
        if loaded is None:
            return False
        places = self._fleet.routing(context.request.deployment_id).adapters
        places.record_loaded(route.replica_id, loaded.adapter_ids, loaded.load_ms, adapter.size_mib)
        return loaded.load_ms >= LEARNED_LOAD_MS_MAX

    def _reserve(
        self, context: RequestContext, attempt: ReplicaAttempt, ranked: RankedRoute, now_s: float
    ) -> None:
        """Count the request at the replica that is to answer it."""
        # Only the uncached part of the prompt must be read; all of it occupies KV blocks.
        attempt.reservation = self._feedback.reserve(
            ranked.route,
            now_s,
            prefill=ranked.uncached_tokens,
            decode=context.expected.output,
            prompt=context.expected.prompt,
            is_batch_item=context.request.preemptions >= 0,
        )
        attempt.ranked = ranked
        attempt.sent_prompt = self._feedback.record_sent(ranked, now_s, context.request.prefix_keys)

    def _prefill_peers(self, context: RequestContext, target: RankedRoute) -> list[PeerReplica]:
        """Return the replicas of the PoP that could read the prompt for `target`; mostly none."""
        replicas = self._fleet.routing(context.request.deployment_id).prefill_replicas
        if not replicas:
            return []
        return replicas.candidates(
            target,
            context.expected.prompt,
            self._fleet.in_flight,
            context.excluded.all(),
            self._clock(),
            context.request.deployment.needs_prefill,
            context.request.prefix_keys,
        )

    def _holders(self, context: RequestContext, target: RankedRoute) -> SharedKvPeers:
        """Return the replicas of the PoP that may have the prompt's prefix; mostly none."""
        request = context.request
        if not request.deployment.shares_kv or context.is_suspect:
            return NO_SHARED_KV_PEERS
        routing = self._fleet.routing(request.deployment_id)
        return shared_kv_peers(
            routing.replicas,
            target,
            context.expected.prompt,
            request.prefix_keys,
            routing.prefix_matches(request.prefix_keys),
            request.session,
            context.excluded.all(),
        )

    def _record_prefill(
        self, context: RequestContext, attempt: ReplicaAttempt, replica_id: ReplicaId
    ) -> None:
        """Move the prompt's tokens to the replica that reads it now."""
        deployment_id, keys = context.request.deployment_id, context.request.prefix_keys
        if attempt.prefill is not None:
            self._feedback.undo_prefill(deployment_id, attempt.prefill, keys)
            attempt.prefill = None
        if replica_id == attempt.ranked.route.replica_id:
            attempt.prefill_id = None
            attempt.release_tokens()
            self.forget_prefix(context, attempt)
            self._reserve(context, attempt, attempt.ranked, self._clock())
            return
        attempt.prefill_id = replica_id
        if attempt.reservation is not None:
            attempt.reservation.finish_prefill()
        attempt.prefill = self._feedback.begin_prefill(
            deployment_id, replica_id, context.expected.prompt, keys
        )

    def take_answer(
        self,
        context: RequestContext,
        attempt: ReplicaAttempt,
        exchange: NodeExchange,
        routes: RankedRoutes,
    ) -> None:
        """Check and learn from a complete response or a first token; AttemptFailed otherwise."""
        head, target = exchange.response_head(), attempt.target
        # A refusal is the target's own: a node takes back what a peer replica refuses.
        peer_id = ReplicaId("") if head.refusal else head.handed_off_to
        self._move_to(context, attempt, routes, peer_id or target.route.replica_id)
        attempt.end_prefill()
        ranked, reservation, adapter = attempt.ranked, attempt.reservation, context.request.adapter
        assert reservation is not None
        route, group = ranked.route, context.request_group
        if attempt.is_handed_off:
            self._feedback.record_handed_off_head(route, head.load, reservation)
        else:
            self._feedback.record_answer_head(route, head.load, head.refusal, reservation, group)
        has_waited = adapter is not None and self._learn_adapter(context, route, adapter, head)
        check_status(route.node_id, head)
        if head.status == 200 and not exchange.is_stream:
            if context.request.is_media:
                estimate = context.prompt_tokens_estimate
                exchange.usage = media_usage(exchange.body, head.content_type, estimate)
            else:
                exchange.usage, exchange.body = read_usage(route.node_id, exchange.body)
        if not attempt.is_handed_off:
            self._feedback.record_success(route)
        attempt.take(ANSWERED)
        if exchange.is_stream:
            context.take_prompt_tokens(head)
            exchange.set_timeout(self._config.stream_idle_timeout_s)
            now_s, times = self._clock(), context.times
            times.attempt_token_at_s = now_s
            took_ms = times.attempt_ttft_ms = 1000 * (now_s - attempt.sent_at_s)
            times.tokens_before = context.stream.generated.tokens
            # A node that hands requests off cannot make others seem slower than its own replica.
            known_ms = min(took_ms, target.ttft_ms) if attempt.is_handed_off else took_ms
            # The time to load an adapter says nothing about the replica's speed.
            if attempt.prefill_id is None and not has_waited:
                self._feedback.record_first_token(ranked, known_ms, reservation)
            if times.first_token_at_s is None:
                times.first_token_at_s = now_s

    def _move_to(
        self,
        context: RequestContext,
        attempt: ReplicaAttempt,
        routes: RankedRoutes,
        replica_id: ReplicaId,
    ) -> None:
        """Move the reservation to the replica that has the request, unless it is there already.

        The node tells it when it hands the request off or takes it back, and again with its answer.
        """
        if replica_id == attempt.ranked.route.replica_id:
            return
        target = attempt.target
        is_back = replica_id == target.route.replica_id
        is_named = is_back or replica_id in attempt.handoff_ids
        ranked = target if is_back else routes.route_to(replica_id)
        if ranked is None or not is_named:
            message = f"{target.route.node_id} handed the request to a replica not named to it"
            raise AttemptFailed(FailureCause.BROKEN, message)
        if not is_back:
            self._feedback.record_handed_off(target.route, ranked.route)
        attempt.take(AttemptEvent.HANDED_OFF)
        self._metrics.handoffs.labels("taken_back" if is_back else "handed_off").inc()
        attempt.release_tokens()
        self.forget_prefix(context, attempt)
        self._reserve(context, attempt, ranked, self._clock())

    def end(self, context: RequestContext, attempt: ReplicaAttempt, error: AttemptFailed) -> bool:
        """End an attempt without an answer; return whether it was only refused."""
        event = event_of(error.cause)
        is_refusal = event is AttemptEvent.REFUSED
        if is_refusal:
            attempt.take(event)
            self._exclude_refusing(context, attempt, error)
        else:
            self.record_failure(context, attempt, error.cause)
        attempt.release()
        self.forget_prefix(context, attempt)
        if (adapter := context.request.adapter) is not None:
            places = self._fleet.routing(context.request.deployment_id).adapters
            places.record_failed(attempt.target.route.replica_id, adapter.adapter_id)
        return is_refusal

    def _exclude_refusing(
        self, context: RequestContext, attempt: ReplicaAttempt, error: AttemptFailed
    ) -> None:
        """Keep the next attempts away from a replica that refused the request."""
        excluded, replica_id = context.excluded, attempt.target.route.replica_id
        if error.cause is FailureCause.CANNOT_RESUME:
            excluded.cannot_resume |= {replica_id}
        elif error.refusal == headers.QUEUED and excluded.may_refuse_for_queue:
            # The refusal carried its load, so it is probably not ranked first again.
            excluded.queue_refusals += 1
        else:
            excluded.refused |= {replica_id}
            context.request.preemptions += error.refusal == headers.PREEMPTED

    def record_failure(
        self, context: RequestContext, attempt: ReplicaAttempt, cause: FailureCause
    ) -> None:
        """Count a broken attempt and keep the next ones away from its replica.

        If it was handed off, it is not known which replica broke: the handoffs of both are counted.
        """
        attempt.take(AttemptEvent.FAILED)
        route, peer, excluded = attempt.target.route, attempt.ranked.route, context.excluded
        self._recorder.trials.record_attempt(context.request.deployment, peer, failed=True)
        excluded.failed |= {route.replica_id}
        if attempt.is_handed_off:
            excluded.handed_off |= {peer.replica_id}
            self._feedback.record_handoff_end(route, peer, cause)
        elif ejection := self._feedback.record_failure(route, cause):
            self._metrics.ejections.labels(ejection).inc()

    def forget_prefix(self, context: RequestContext, attempt: ReplicaAttempt) -> None:
        """Note that the replica did not read the prompt, so it has not cached any of it."""
        route, keys = attempt.ranked.route, context.request.prefix_keys
        self._feedback.undo_sent(route, attempt.sent_prompt, keys)

    def _learn_fetch(self, attempt: ReplicaAttempt, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn how much the prefixes of other replicas help the one that answered."""
        ranked, exchange = attempt.ranked, attempt.exchange
        if not attempt.kv_peers.held_share or ranked is not attempt.target or prompt_tokens <= 0:
            return
        head = exchange.head if exchange is not None else None
        value = head.fields.get(FETCH_MS) if head is not None else None
        waited_ms = int(value) if value is not None and value.isdigit() and len(value) < 9 else 0
        share, prefill_ms = cached_tokens / prompt_tokens, prompt_tokens * ranked.ms_per_token
        fetch_value = self._fleet.routing(ranked.route.deployment_id).fetch_value
        fetch_value.record(attempt.kv_peers, share, waited_ms, prefill_ms)

    def learn(self, context: RequestContext, attempt: ReplicaAttempt) -> None:
        """Learn from an answer: bytes per token, the cached share, and where the session ran."""
        request, route, usage = context.request, attempt.ranked.route, context.usage()
        if attempt.is_handed_off and context.outcome is OUTCOME_COMPLETE:
            took_ms = context.times.attempt_ttft_ms
            self._feedback.record_handoff_answer(attempt.target, route, took_ms)
        if context.engine_usage is not None:
            tokens, cached, keys = usage.prompt_tokens, usage.cached_tokens, request.prefix_keys
            routing = self._fleet.routing(request.deployment_id)
            routing.learn_prompt_tokens(request.text_bytes, tokens)
            if attempt.prefill_id is None:
                self._learn_fetch(attempt, tokens, cached)
                self._feedback.learn_cached_tokens(route, attempt.sent_prompt, tokens, cached, keys)
            elif attempt.prefill is not None:
                self._feedback.learn_prefill(
                    request.deployment_id, attempt.prefill, tokens, cached, keys
                )
        if request.session and context.outcome is OUTCOME_COMPLETE:
            session_tokens, now_s = usage.prompt_tokens + usage.output_tokens, self._clock()
            self._fleet.sessions.bind(request.session, route.replica_id, session_tokens, now_s)

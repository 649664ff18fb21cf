"""The node's data-plane server: admits requests from routers and relays them to the engines.

Bytes are not changed, except where an engine needs it. Every answer carries the replica's load.
"""

from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Middleware

from isochrone.service.network.http_server import error_middleware, json_error, json_response
from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import child_span, current_span
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_transfer
from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.api.inference_paths import INFERENCE_PATHS, body_bytes_max
from nodeagent.api.kv_address import KvAddressRoute
from nodeagent.api.kv_sharing import KvSharingRoutes
from nodeagent.api.metrics_page import add_metrics
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.api.pop_loads import PopLoadReader
from nodeagent.api.request.answer_relay import (
    FROM_ENGINE,
    FROM_PEER,
    count_bytes,
    is_first_token,
    loss_headers,
    refusal,
    refuse_grammar,
    relay_body,
    request_data,
    response_head,
    with_grammar_blamed,
)
from nodeagent.api.request.engine_trials import EngineRequest, engine_request
from nodeagent.api.request.event_tokens import add_prompt_tokens, is_counted, with_event_tokens
from nodeagent.api.request.handoff_notice import announce_prefill, announce_replica
from nodeagent.api.request.model_name import with_deployment_name, with_model_name
from nodeagent.api.request.prefill_legs import (
    PrefillLeg,
    PrefillLegs,
    answer_context,
    apply_leg,
    report_found,
)
from nodeagent.api.request.request_adapter import (
    add_loaded,
    fetched_adapter,
    loaded_adapter,
    with_adapter,
)
from nodeagent.api.request.request_admission import (
    RequestRefused,
    admit,
    check_queue,
    count_objective,
    load_header,
    seat,
    until_preempted,
)
from nodeagent.api.request.request_estimates import (
    PrefillEstimate,
    prefill_estimate,
    queue_tokens_max,
)
from nodeagent.api.request.request_spans import handoff_span, traced_answer
from nodeagent.api.request.unfinished_bodies import UnfinishedBodies
from nodeagent.api.request.window_relay import relayed_answer, window_headers
from nodeagent.decide.requests.admission import TokenReservation
from nodeagent.decide.requests.handoff import (
    Handoff,
    PeerReplicaLost,
    choose_handoff,
    is_worth_probing,
    named_replicas,
    queued_before,
)
from nodeagent.decide.requests.kv_quota import NO_KV_LIMITS, KvQuota, KvRateLimits
from nodeagent.disaggregation.handshake_leg import AnswerContext, NoPrefillReplica
from nodeagent.disaggregation.kv_windows import WindowLeases
from nodeagent.drivers.driver import TOKENIZE_PATH
from nodeagent.host.awake_memory import CannotWake
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.engines.engine_adapters import AdapterUnavailable, FetchedAdapter
from nodeagent.managed_replica import ManagedReplica
from nodeagent.supervisor import Supervisor

BODY_TIMEOUT_S: Final = 30.0
TO_ENGINE_OR_PEER: Final = (
    "content-type",
    headers.TRACEPARENT,
    headers.REQUEST_ID,
    headers.CACHE_SALT,
    headers.SESSION_AFFINITY,
    headers.PRIORITY,
    headers.DEADLINE_MS,
    headers.TTFT_MS,
    headers.PREFILL_MS,
    headers.GENERATED_TOKENS,
)
TO_ENGINE: Final = (
    *TO_ENGINE_OR_PEER,
    kv_transfer.LEG,
    kv_transfer.TRANSFER,
    kv_transfer.FIRST_BLOCK,
    kv_transfer.KV_FORMAT,
)
"""Request headers that are relayed to the engine."""

TO_PEER: Final = (*TO_ENGINE_OR_PEER, headers.TOKENS, headers.ROUTER, headers.PREEMPTIONS)
"""Request headers that are relayed to a peer replica's node. The list of peer replicas is not
among them, so a request is handed off at most once."""


class DataPlaneServer:
    """Serves inference requests, pings, health checks and metrics to routers and other nodes."""

    def __init__(
        self,
        supervisor: Supervisor,
        peer_replicas: PeerReplicaClient,
        cache_salts: CacheSalts,
        *,
        kv_limits: KvRateLimits = NO_KV_LIMITS,
        spans: Middleware | None = None,
    ) -> None:
        """`kv_limits` are for the KV that is shared with other nodes; `spans` records requests."""
        self._spans = () if spans is None else (spans,)
        self._supervisor = supervisor
        self._peer_replicas = peer_replicas
        self._cache_salts = cache_salts
        self._pop_loads = PopLoadReader(peer_replicas.read_loads, monotonic)
        quota = KvQuota(kv_limits)
        self._windows = WindowLeases(supervisor.replicas.get, monotonic, supervisor.state_folder)
        self._prefill_legs = PrefillLegs(peer_replicas, quota, self._windows)
        self._bodies = UnfinishedBodies()
        self._kv_sharing = KvSharingRoutes(
            supervisor.replicas, peer_replicas, quota, self._windows, monotonic, self._bodies
        )
        self.is_draining = False

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(middlewares=[*self._spans, error_middleware(json_error)])
        for path in INFERENCE_PATHS:
            app.router.add_post(path, self._serve)
        app.router.add_get("/ping", self._ping)
        app.router.add_post("/loads", self._pop_loads.handle)
        app.router.add_get("/healthz", self._health)
        self._kv_sharing.attach(app)
        self._windows.attach(app)
        KvAddressRoute(self._supervisor).attach(app)
        add_metrics(app, self._supervisor)
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, app: web.Application) -> None:
        await self._prefill_legs.close()
        await self._peer_replicas.close()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Main path of a request: find its replica, hand it off or admit it, relay the answer."""
        try:
            replica = self._find_replica(request)
            bytes_max = body_bytes_max(request.path)
            body = await self._bodies.read(request, bytes_max=bytes_max, timeout_s=BODY_TIMEOUT_S)
            answer = await self._try_handoff(request, replica, body)
            if answer is not None:
                return answer
            replica = self._find_replica(request)  # it may have begun to drain in the meantime
            check_queue(request, replica)
            return await self._serve_here(request, replica, body, prefill_estimate(request))
        except RequestRefused as refused:
            metrics.REQUESTS.labels(refused.word).inc()
            return refusal(refused.word, refused.status, refused.load)

    async def _serve_here(
        self,
        request: web.Request,
        replica: ManagedReplica,
        body: bytes,
        estimate: PrefillEstimate,
    ) -> web.StreamResponse:
        """Serve the request by a replica of this node, with the adapter that it names."""
        if not replica.is_serving:
            raise RequestRefused("loading", 503)
        try:
            async with fetched_adapter(request, replica, self._supervisor) as adapter:
                return await self._serve_admitted(request, replica, body, estimate, adapter)
        except AdapterUnavailable as error:
            raise RequestRefused("adapter_unavailable", 503) from error
        except CannotWake as error:
            raise RequestRefused("loading", 503) from error

    async def _serve_admitted(
        self,
        request: web.Request,
        replica: ManagedReplica,
        body: bytes,
        estimate: PrefillEstimate,
        fetched: FetchedAdapter | None,
    ) -> web.StreamResponse:
        """Admit the request, relay it to the engine, and release its tokens."""
        reservation = admit(request, replica, body, estimate)
        try:
            is_suspect = headers.SUSPECT in request.headers
            is_leg = kv_transfer.LEG in request.headers
            with child_span("admission") as waiting:
                async with (
                    until_preempted(request, replica, reservation),
                    seat(request, replica, estimate, reservation),
                    self._supervisor.awake.use(replica.spec.replica_id, is_leg=is_leg),
                    loaded_adapter(fetched, replica) as adapter,
                    engine_request(replica, is_suspect=is_suspect) as running,
                ):
                    if running is None:  # a suspect may have waited
                        raise RequestRefused("loading", 503)
                    waiting.end()
                    running.adapter = adapter
                    return await self._relay_to_engine(request, replica, body, reservation, running)
        finally:
            reservation.release(monotonic())

    async def _try_handoff(
        self, request: web.Request, replica: ManagedReplica, body: bytes
    ) -> web.StreamResponse | None:
        """Hand the request off if a peer replica can start it sooner.

        Return None if none can, or if the chosen one refuses or does not answer.
        """
        replicas = headers.parse_peer_replicas(request.headers.get(headers.PEER_REPLICAS, ""))
        if not replicas or not is_worth_probing(replicas[0], self._queued(replicas[0], replica)):
            return None
        local = {
            name: managed
            for name, managed in self._supervisor.replicas.items()
            if managed.is_serving
        }
        remote = [peer for peer in replicas[1:] if peer.replica_id not in local]
        queues = await self._peer_replicas.queued_tokens(remote) if remote else {}
        queues |= {
            peer.replica_id: self._queued(peer, local[peer.replica_id])
            for peer in replicas
            if peer.replica_id in local
        }
        handoff = choose_handoff(replicas, queues, queue_tokens_max(request))
        if handoff is None:
            return None
        target = handoff.target
        await announce_replica(request, target.replica_id)
        current_span().set(names.HANDED_OFF_TO, target.replica_id)
        try:
            if target.replica_id in local:
                estimate = PrefillEstimate(
                    target.pending_prefill_tokens, target.expected_prefill_ms
                )
                return await self._serve_here(request, local[target.replica_id], body, estimate)
            return await self._relay_to_peer(request, body, handoff)
        except (RequestRefused, PeerReplicaLost):
            await announce_replica(request, replica.spec.replica_id)
            return None

    def _queued(self, as_routed: headers.PeerReplica, replica: ManagedReplica) -> int:
        """Return the tokens queued before a request at a replica of this node, and other waits."""
        load = replica.admission
        queued_tokens = load.pending_prefill_tokens(monotonic())
        return queued_before(as_routed, queued_tokens, load.wake_ms(), load.sequence_wait_ms())

    async def _relay_to_peer(
        self, request: web.Request, body: bytes, handoff: Handoff
    ) -> web.StreamResponse:
        """Relay the request to a replica on another node, and its answer back.

        Raises PeerReplicaLost before anything is sent to the router.
        """
        target = handoff.target
        sent = {name: request.headers[name] for name in TO_PEER if name in request.headers}
        sent |= named_replicas(request.headers, target.replica_id)
        sent |= target.estimate_headers
        sent[headers.QUEUE_TOKENS_MAX] = str(handoff.queue_tokens_max)
        self._supervisor.handoffs_in_progress += 1
        try:
            async with (
                handoff_span(target, sent),
                self._peer_replicas.relay(target, request.path, body, sent) as answer,
            ):
                if read_at := answer.headers.get(headers.READ_AT):
                    await announce_prefill(request, ReplicaId(read_at))
                response = response_head(answer, FROM_PEER)
                response.headers[headers.HANDOFF_REPLICA] = target.replica_id
                await relay_body(request, response, answer.content.iter_any(), "handed_off")
                return response
        finally:
            self._supervisor.handoffs_in_progress -= 1

    def _find_replica(self, request: web.Request) -> ManagedReplica:
        """Return the replica that the request names, or raise RequestRefused."""
        name = ReplicaId(request.headers.get(headers.REPLICA, ""))
        replica = self._supervisor.replicas.get(name)
        if replica is None or not replica.spec.leads:
            raise RequestRefused("unknown_replica", 404)
        if self.is_draining or replica.state is ReplicaState.DRAINING:
            raise RequestRefused("draining")
        if replica.state is not ReplicaState.WARM or replica.engine is None:
            raise RequestRefused("loading", 503)
        if headers.GENERATED_TOKENS in request.headers and not replica.engine.driver.resumes:
            raise RequestRefused(headers.CANNOT_RESUME, 501)
        return replica

    async def _relay_to_engine(
        self,
        request: web.Request,
        replica: ManagedReplica,
        body: bytes,
        reservation: TokenReservation,
        running: EngineRequest,
    ) -> web.StreamResponse:
        """Relay the request to the replica's engine, and its answer back."""
        engine = replica.engine
        assert engine is not None
        if not running.is_sent_to(engine):
            raise RequestRefused("loading", 503)
        if request.path == TOKENIZE_PATH and not engine.driver.tokenize_path:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot count tokens: this engine offers no count; see `usage` of an answer",
            )
        sent = self._headers_to_engine(request, replica)
        salt, priority = sent[headers.CACHE_SALT], sent.get(headers.PRIORITY, "")
        body = with_adapter(body, running.adapter)
        running.is_counted = is_counted(engine, body)
        if name := engine.record.command.model_name:
            content_type = request.headers.get("content-type", "")
            body = with_model_name(body, content_type, name)

        def post(body: bytes, sent: Mapping[str, str]) -> AnswerContext:
            data = request_data(engine.salted(request.path, body, salt, priority))
            return traced_answer(partial(engine.http.post, request.path, data=data), sent)

        leg = self._prefill_legs.open(request, replica, engine, body, reservation, TO_PEER)
        if leg is None and headers.GENERATED_TOKENS not in request.headers:
            reservation.begin_prefill(monotonic())
        try:
            async with answer_context(leg, post, body, sent) as answer:
                response = await self._relay_answer(
                    request, replica, answer, reservation, running, leg
                )
            if response.status == 200:
                self._prefill_legs.offer_copy(request, replica, engine, leg)
            return response
        except NoPrefillReplica as error:
            raise RequestRefused("loading", 503) from error
        except (aiohttp.ClientError, OSError) as error:
            # Nothing was sent to the router yet, so that it may use another replica.
            metrics.REQUESTS.labels("engine_failed").inc()
            raise ApiError(
                ErrorCode.UPSTREAM,
                f"cannot answer: the engine failed ({type(error).__name__})",
                headers=await loss_headers(running, error),
            ) from error
        finally:
            if leg is not None:
                await leg.close()

    def _headers_to_engine(self, request: web.Request, replica: ManagedReplica) -> dict[str, str]:
        sent = {name: request.headers[name] for name in TO_ENGINE if name in request.headers}
        sent |= window_headers(request, self._windows, replica.spec.replica_id)
        # A router sends the tenant's id. The engine gets a salt that no tenant can guess.
        sent[headers.CACHE_SALT] = self._cache_salts.salt_of(sent.get(headers.CACHE_SALT, ""))
        return sent

    async def _relay_answer(
        self,
        request: web.Request,
        replica: ManagedReplica,
        answer: aiohttp.ClientResponse,
        reservation: TokenReservation,
        running: EngineRequest,
        leg: PrefillLeg | None,
    ) -> web.StreamResponse:
        """Relay the engine's answer, with the replica's load as of the first token."""
        response, chunks = await relayed_answer(request, answer, FROM_ENGINE)
        if answer.status == 429:
            response.headers[headers.REFUSED] = headers.BUSY
        if replica.spec.replica_id != request.headers.get(headers.REPLICA):
            response.headers[headers.HANDOFF_REPLICA] = replica.spec.replica_id
        if headers.GENERATED_TOKENS in request.headers and replica.engine is not None:
            response.headers[headers.RESUMED] = replica.engine.driver.resumes
        grammar_error = replica.engine.record.command.grammar_error if replica.engine else b""
        first_chunk = await anext(chunks, b"")
        refuse_grammar(answer.status, first_chunk, grammar_error)
        current_span().set_elapsed(names.FIRST_CHUNK_S)
        if kv_transfer.LEG not in request.headers:
            # The KV of a prompt begins to arrive before all of it is read.
            is_timely = is_first_token(answer, reservation.output_tokens)
            reservation.first_token(monotonic(), is_timely=is_timely)
        if reservation.item is not None:
            reservation.item.keep()
        running.record_token()
        count_objective(request, reservation.admitted_s, monotonic())
        response.headers[headers.LOAD] = load_header(request, replica)
        add_loaded(response, running.adapter)
        report_found(leg, response)
        add_prompt_tokens(response, first_chunk, is_counted=running.is_counted)
        counted = count_bytes(first_chunk, chunks, replica)
        counted = with_grammar_blamed(counted, grammar_error)
        counted = with_event_tokens(response, counted, is_counted=running.is_counted)
        counted = apply_leg(leg, response, counted)
        if replica.engine is not None and (name := replica.engine.record.command.model_name):
            counted = with_deployment_name(response, counted, name, replica.spec.name)
        with child_span("relay"):
            await relay_body(request, response, counted, "answered", running)
        return response

    async def _ping(self, request: web.Request) -> web.Response:
        """Answer at once with the loads of all warm replicas. Routers measure round trips by it.

        A ping that names a replica is refused if that replica is unknown or draining: a router
        that doubts its route table asks in this way.
        """
        if headers.REPLICA in request.headers:
            try:
                self._find_replica(request)
            except RequestRefused as refused:
                if refused.word in ("unknown_replica", "draining"):
                    return refusal(refused.word, refused.status)
        now_s = monotonic()
        loads = {
            replica_id: replica.admission.load(
                headers.router_name(request.headers), now_s, is_ping=True
            )
            for replica_id, replica in self._supervisor.replicas.items()
            if replica.state is ReplicaState.WARM
        }
        return web.Response(status=204, headers={headers.LOADS: headers.format_loads(loads)})

    async def _health(self, request: web.Request) -> web.Response:
        states = [replica.state.value for replica in self._supervisor.replicas.values()]
        status = "draining" if self.is_draining else "ok"
        counts = {state: states.count(state) for state in set(states)}
        return json_response({"status": status, "replicas": counts})

"""The applications of the two listeners: the admin API, and the control API of peers."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from isochrone import __version__
from isochrone.service.clock import utc_now
from isochrone.service.loop import Loop
from isochrone.service.metrics import metrics_handler
from isochrone.service.network.http_server import (
    Handler,
    HttpServerLimits,
    error_middleware,
    json_error,
    json_response,
    serve_http,
)
from isochrone.service.trust.allowed_hosts import HostAllowList, refuse_unknown_hosts
from isochrone.service.trust.identity import Authority
from isochrone.service.trust.tls import control_server_context
from isochrone.wire.peers.control import PeerRole
from scheduler import metrics
from scheduler.api.admin.access import OPEN_PATHS, check_token
from scheduler.api.admin.endpoint import AdminContext, endpoint_handler
from scheduler.api.admin.endpoint_table import ENDPOINTS
from scheduler.api.admin.openapi import document
from scheduler.api.client_objects.adapter_intake import AdapterIntake
from scheduler.api.client_objects.batch_service import BatchService, BatchStorage
from scheduler.api.client_objects.finetune_service import FinetuneTokens, add_finetune_routes
from scheduler.api.client_objects.relayed import ClientTurns
from scheduler.api.client_objects.response_service import add_response_routes
from scheduler.api.control.agents import AgentEndpoint
from scheduler.api.control.certificates import CertificateIssuer
from scheduler.api.control.join import JoinEndpoint
from scheduler.api.control.peers import PeerServer
from scheduler.api.control.routers import RouterEndpoint
from scheduler.config import SchedulerConfig
from scheduler.database import Database
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.decide.response_limits import ResponseLimits
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.state.scheduler_state import SchedulerState


def admin_app(
    context: AdminContext,
    token_sha256: str,
    loops: tuple[Loop, ...],
    hosts: HostAllowList,
    spans: Sequence[Middleware],
) -> web.Application:
    """Return the application of the admin listener, which is reached by the names in `hosts`.

    `spans` records the spans of requests that have the token.
    """

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            check_token(request, token_sha256)
        return await handler(request)

    async def health(request: web.Request) -> web.Response:
        is_acting = context.lease.is_acting
        body = {"status": "ok", "acting": is_acting, "scheduler": context.scheduler_name}
        return json_response(body)

    show = metrics_handler(metrics.REGISTRY)

    async def show_metrics(request: web.Request) -> web.Response:
        # Trust in the lease runs out by time alone, which sets no gauge.
        metrics.ACTING.set(context.lease.is_acting)
        metrics.FROZEN.set(bool(context.placement.frozen))
        metrics.UNMET.set(len(context.placement.unmet))
        metrics.PLAN_AGE_S.set(context.placement.plan_age_s)
        for role, count in context.peers.wrong_clocks().items():
            metrics.WRONG_CLOCKS.labels(role.value).set(count)
        for loop in loops:
            metrics.JOB_TURNS.labels(loop.name, "ended").set(loop.turns)
            metrics.JOB_TURNS.labels(loop.name, "failed").set(loop.failures)
            metrics.JOB_SECONDS.labels(loop.name, "all").set(loop.turns_s)
            metrics.JOB_SECONDS.labels(loop.name, "last").set(loop.last_turn_s)
        return await show(request)

    openapi = msgspec.json.encode(document(ENDPOINTS, __version__))

    async def describe(request: web.Request) -> web.Response:
        return web.Response(body=openapi, content_type="application/json")

    check_host = refuse_unknown_hosts(hosts, "admin_hosts")
    checks = (error_middleware(json_error), check_host, authenticate)
    app = web.Application(middlewares=[*checks, *spans])
    app.router.add_get("/healthz", health)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/openapi.json", describe)
    for endpoint in ENDPOINTS:
        app.router.add_route(endpoint.method, endpoint.path, endpoint_handler(endpoint, context))
    return app


@asynccontextmanager
async def serve_control(
    config: SchedulerConfig,
    database: Database,
    state: SchedulerState,
    authority: Authority,
    nudge_place: Callable[[], None],
    batches: BatchStorage | None,
) -> AsyncIterator[int]:
    """Serve agents and routers; yield the bound port."""
    issuer = CertificateIssuer(authority, lifetime_s=config.certificate_lifetime_s)
    limits = HttpServerLimits(
        connections_per_address_max=config.control_connections_per_address_max
    )
    async with serve_http(
        control_app(
            database, state, issuer, nudge_place, batches, config.responses, config.adapters
        ),
        config.control_host,
        config.control_port,
        limits=limits,
        ssl_context=control_server_context(authority, utc_now()) if config.control_tls else None,
    ) as port:
        yield port


def control_app(
    database: Database,
    state: SchedulerState,
    issuer: CertificateIssuer,
    nudge_place: Callable[[], None],
    batches: BatchStorage | None = None,
    response_limits: ResponseLimits | None = None,
    adapter_limits: AdapterLimits | None = None,
) -> web.Application:
    """Return the control listener's application; a storage adds batches, limits add responses."""
    relay_tokens, agent_tokens = RelayTokens(), RelayTokens()
    server = PeerServer(
        intake=database.intake,
        reserved=database.reserved,
        cluster_id=database.cluster_id,
        issuer=issuer,
        lease=state.lease,
        leadership=state.leadership,
        peers=state.peers,
        admission=state.admission,
        unregistered=state.unregistered,
        relay_tokens={PeerRole.ROUTER: relay_tokens, PeerRole.AGENT: agent_tokens},
        has_batches=batches is not None,
    )
    agents = AgentEndpoint(
        server=server,
        pool=database.pool,
        intake=database.intake,
        authority=issuer.authority,
        lease=state.lease,
        heartbeats=state.heartbeats,
        pulses=state.pulses,
        admission=state.admission,
        assignments=state.assignments,
        routes=state.routes,
        nudge_place=nudge_place,
    )
    routers = RouterEndpoint(
        server=server,
        intake=database.intake,
        routes=state.routes,
        nudge_place=nudge_place,
        key_use=state.key_use,
        clock=state.lease.clock,
    )
    join = JoinEndpoint(
        pool=database.pool,
        issuer=issuer,
        cluster_id=database.cluster_id,
        clock=state.lease.clock,
    )

    app = web.Application(middlewares=[error_middleware(json_error)])
    _add_open_routes(app, state, issuer.authority)
    app.router.add_get("/v1/agent", agents.handle)
    app.router.add_get("/v1/router", routers.handle)
    app.router.add_post("/v1/join", join.handle)
    turns = ClientTurns()
    if batches is not None:
        BatchService(database.clients, batches, relay_tokens, turns).add_routes(app)
        intake = AdapterIntake(batches.folder, adapter_limits or AdapterLimits())
        tokens, on_change = FinetuneTokens(relay_tokens, agent_tokens), state.routes.mark_changed
        add_finetune_routes(app, database.clients, batches.folder, intake, tokens, turns, on_change)
    if response_limits is not None:
        add_response_routes(app, database.clients, response_limits, relay_tokens, turns)
    return app


def _add_open_routes(app: web.Application, state: SchedulerState, authority: Authority) -> None:
    """Add the routes that need no identity."""

    async def health(request: web.Request) -> web.Response:
        return json_response({"status": "ok", "acting": state.lease.is_acting})

    async def authority_certificate(request: web.Request) -> web.Response:
        return web.Response(text=authority.ca_pem)

    app.router.add_get("/healthz", health)
    app.router.add_get("/v1/ca", authority_certificate)

"""The scheduler's only place of composition: pools, doors and duties in one TaskGroup."""

import asyncio
import gc
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from hashlib import sha256
from time import monotonic
from typing import Final

import msgspec
from aiohttp import web

from isochrone import __version__
from isochrone.service.config import ConfigError, read_secret
from isochrone.service.event_loop_lag import LagMonitor, LoopStall
from isochrone.service.http_server import HttpServerLimits, error_middleware, json_error, serve_http
from isochrone.service.identity import Authority, IdentityError
from isochrone.service.loop import Loop
from isochrone.service.metrics import metrics_handler
from isochrone.service.systemd import notify
from isochrone.service.tls import CERTIFICATE_CHECK_S, control_server_context, load_tls_certificate
from isochrone.wire.ids import ClusterId
from scheduler import metrics
from scheduler.acting import Acting, now
from scheduler.api.access import OPEN_PATHS, check_token
from scheduler.api.admin import ENDPOINTS
from scheduler.api.agents import AgentEndpoint
from scheduler.api.endpoint import endpoint_handler
from scheduler.api.join import JoinEndpoint
from scheduler.api.openapi import document
from scheduler.api.routers import RouterEndpoint
from scheduler.config import SchedulerConfig
from scheduler.loops.advance_rollouts import AdvanceRollouts
from scheduler.loops.collect_garbage import CollectGarbage
from scheduler.loops.delete_expired_rows import DeleteExpiredRows
from scheduler.loops.disconnect_revoked import DisconnectRevoked
from scheduler.loops.flush_pulses import FlushPulses
from scheduler.loops.hold_lease import HoldLease
from scheduler.loops.learn_demand import LearnDemand
from scheduler.loops.place_replicas import PlaceReplicas
from scheduler.loops.prefetch_weights import PrefetchWeights
from scheduler.loops.publish_routes import PublishRoutes
from scheduler.loops.record_node_loss import RecordNodeLoss
from scheduler.loops.renew_lease import LeaseRenewalThread
from scheduler.loops.rotate_partitions import RotatePartitions
from scheduler.loops.sum_quotas import SumQuotas
from scheduler.planner.process import Planner
from scheduler.planner.questions import Settings
from scheduler.store.lease import claim_authority, ensure_cluster, release_lease
from scheduler.store.migrate import MigrationError, migrate
from scheduler.store.pool import CONNECT_ERRORS, UNAVAILABLE, open_pool, transaction, using

log = logging.getLogger(__name__)

INTAKE_CONNECTIONS: Final = 10
ADMIN_TOKEN_LETTERS_MIN: Final = 16
HELD_LOGGED_S: Final = 0.25
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(config: SchedulerConfig, stopping: asyncio.Event) -> int:
    """Run one scheduler until `stopping`; return its exit code."""
    # Garbage is collected by a duty, `tidy`: by itself Python would choose the worst times.
    gc.disable()
    token = await asyncio.to_thread(
        read_secret, config.admin_token_file, "the admin token", ADMIN_TOKEN_LETTERS_MIN
    )
    token_sha256 = sha256(token.encode()).hexdigest()
    authority = await asyncio.to_thread(_load_authority, config)
    tls = await asyncio.to_thread(load_tls_certificate, config.tls_certificate, config.tls_key)
    async with _open_acting(config, authority) as acting, AsyncExitStack() as doors:
        lease = Loop("hold_lease", HoldLease(acting).run_once, config.lease_renew_s)
        place = Loop(
            "place", PlaceReplicas(acting).run_once, config.place_interval_s, share_max=0.25
        )
        routes_s = config.publish_interval_s
        publish = Loop("publish", PublishRoutes(acting).run_once, routes_s, share_max=0.5)
        flush = Loop("flush_pulses", FlushPulses(acting).run_once, 2.0)
        prune = Loop("prune", DeleteExpiredRows(acting).run_once, 600.0)
        tally = Loop("tally", SumQuotas(acting).run_once, config.publish_interval_s)
        days = Loop("keep_days", RotatePartitions(acting).run_once, 30.0)
        forecast = Loop("forecast", LearnDemand(acting).run_once, 15.0)
        prefetch = Loop("prefetch", PrefetchWeights(acting).run_once, 120.0, share_max=0.1)
        roll = Loop("roll", AdvanceRollouts(acting).run_once, config.roll_interval_s)
        tidy = Loop("tidy", CollectGarbage(acting).run_once, 5.0)
        turn_away = Loop("turn_away", DisconnectRevoked(acting).run_once, 2.0)
        losses = Loop("note_losses", RecordNodeLoss(acting).run_once, 5.0)
        loops = (
            *(() if tls is None else (Loop("certificate", tls.run_once, CERTIFICATE_CHECK_S),)),
            *(lease, place, publish, flush, prune, tally),
            *(days, forecast, prefetch, roll, turn_away, losses, tidy),
        )
        acting.nudge_place, acting.nudge_publish = place.nudge, publish.nudge
        acting.nudge_prefetch, acting.nudge_turn_away = prefetch.nudge, turn_away.nudge
        await doors.enter_async_context(
            serve_http(
                admin_app(acting, token_sha256, loops),
                config.admin_host,
                config.admin_port,
                ssl_context=None if tls is None else tls.context,
            )
        )
        await doors.enter_async_context(
            serve_http(
                control_app(acting),
                config.control_host,
                config.control_port,
                limits=HttpServerLimits(
                    connections_per_address_max=config.control_connections_per_address_max
                ),
                ssl_context=control_server_context(authority, now())
                if config.control_tls
                else None,
            )
        )
        keeper = LeaseRenewalThread(acting)
        doors.push_async_callback(keeper.stop)
        keeper.start()
        async with asyncio.TaskGroup() as tasks:
            duties = [tasks.create_task(loop.run(), name=loop.name) for loop in loops]
            lag = LagMonitor(metrics.LAG.observe, _note_held)
            duties.append(tasks.create_task(lag.run(), name="lag"))
            notify("READY=1")
            log.info("serving", extra={"fields": {"admin_port": config.admin_port}})
            await stopping.wait()
            for duty in duties:
                duty.cancel()
        await keeper.stop()
        await _leave(acting)
    return 0


def admin_app(acting: Acting, token_sha256: str, loops: tuple[Loop, ...]) -> web.Application:
    """Return what the admin listener serves."""

    @web.middleware
    async def access(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            check_token(request, token_sha256)
        return await handler(request)

    async def health(request: web.Request) -> web.Response:
        body = {"status": "ok", "acting": acting.is_acting, "scheduler": acting.config.name}
        return web.json_response(body)

    show = metrics_handler(metrics.REGISTRY)

    async def show_metrics(request: web.Request) -> web.Response:
        # Trust runs out by the clock alone, with nobody there to say so.
        metrics.ACTING.set(acting.is_acting)
        for loop in loops:
            metrics.TURNS.labels(loop.name, "ended").set(loop.turns)
            metrics.TURNS.labels(loop.name, "failed").set(loop.failures)
            metrics.DUTY_SECONDS.labels(loop.name, "all").set(loop.turns_s)
            metrics.DUTY_SECONDS.labels(loop.name, "last").set(loop.last_turn_s)
        return await show(request)

    described = msgspec.json.encode(document(ENDPOINTS, __version__))

    async def describe(request: web.Request) -> web.Response:
        return web.Response(body=described, content_type="application/json")

    app = web.Application(middlewares=[error_middleware(json_error), access])
    app.router.add_get("/healthz", health)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/openapi.json", describe)
    for endpoint in ENDPOINTS:
        app.router.add_route(endpoint.method, endpoint.path, endpoint_handler(endpoint, acting))
    return app


def control_app(acting: Acting) -> web.Application:
    """Return what the control listener serves."""

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "acting": acting.is_acting})

    async def authority(request: web.Request) -> web.Response:
        return web.Response(text=acting.authority.ca_pem)

    app = web.Application(middlewares=[error_middleware(json_error)])
    app.router.add_get("/healthz", health)
    app.router.add_get("/v1/ca", authority)
    app.router.add_get("/v1/agent", AgentEndpoint(acting).handle)
    app.router.add_get("/v1/router", RouterEndpoint(acting).handle)
    app.router.add_post("/v1/join", JoinEndpoint(acting).handle)
    return app


def _note_held(held: LoopStall) -> None:
    metrics.HELD.labels(held.by).inc(held.late_s)
    if held.late_s >= HELD_LOGGED_S:
        fields = {
            "ms": round(1000 * held.late_s),
            "cpu_ms": round(1000 * held.cpu_s),
            "garbage_ms": round(1000 * held.garbage_s),
            "by": held.by,
            "where": held.at,
        }
        log.warning("event loop held up", extra={"fields": fields})


@asynccontextmanager
async def _open_acting(config: SchedulerConfig, authority: Authority) -> AsyncIterator[Acting]:
    async with AsyncExitStack() as pools:
        with _in_words():
            pool = await open_pool(config.database_url)
            # Not closed: that waits for a database that may be away; nothing is under way by then.
            pools.callback(pool.terminate)
            # Their own connections: leadership and signs of life never queue behind other work, and
            # duties and operators not behind a fleet that reports all at once.
            reserved = await open_pool(config.database_url, size_max=2)
            pools.callback(reserved.terminate)
            intake = await open_pool(config.database_url, size_max=INTAKE_CONNECTIONS)
            pools.callback(intake.terminate)
            await migrate(pool)
            async with transaction(pool) as connection:
                cluster = await ensure_cluster(connection, ClusterId(f"c{secrets.token_hex(8)}"))
                held = await claim_authority(connection, authority.fingerprint)
        if held != authority.fingerprint:
            raise ConfigError(
                f"cannot start: {config.authority} holds the authority {authority.fingerprint[:16]}"
                f", the cluster's is {held[:16]}; copy the folder of a scheduler that has it (where"
                " none has, empty cluster.authority, and have every server join again)"
            )
        planner = Planner(
            Settings(
                database_url=config.database_url,
                liveness=config.liveness,
                log_level=config.log_level,
            )
        )
        pools.push_async_callback(planner.stop)
        yield Acting(
            config=config,
            pool=pool,
            reserved=reserved,
            intake=intake,
            planner=planner,
            authority=authority,
            cluster_id=cluster.cluster_id,
            clock=monotonic,
        )


@contextmanager
def _in_words() -> Iterator[None]:
    """Say why the database that was named cannot be used."""
    try:
        yield
    except MigrationError as error:
        raise ConfigError(str(error)) from error
    except CONNECT_ERRORS as error:
        raise ConfigError(
            f"cannot use the database: {error or type(error).__name__}; check database_url"
        ) from error


async def _leave(acting: Acting) -> None:
    """Let a standby act at once."""
    try:
        async with using(acting.reserved) as connection:
            await release_lease(connection, acting.holder)
    except UNAVAILABLE as error:
        log.warning("lease not given up", extra={"fields": {"reason": str(error)[:200]}})
    await acting.step_down()


def _load_authority(config: SchedulerConfig) -> Authority:
    try:
        if not (config.authority / "ca.key").exists():
            return Authority.create(config.authority, "isochrone", now())
        return Authority.load(config.authority)
    except IdentityError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot use the authority in {config.authority}: {why}") from error

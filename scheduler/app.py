"""Composes and runs the scheduler: database, state, listeners and periodic jobs."""

import asyncio
import gc
import logging
import secrets
from contextlib import AsyncExitStack
from hashlib import sha256
from time import monotonic, time
from typing import Final, NamedTuple

from aiohttp.typedefs import Middleware

from isochrone.service.clock import JumpFreeClock, utc_now
from isochrone.service.config import ConfigError, read_secret
from isochrone.service.event_loop_lag import LagMonitor, LoopStall
from isochrone.service.loop import Loop
from isochrone.service.network.connection_count import ConnectionCount
from isochrone.service.network.http_server import serve_http
from isochrone.service.systemd import notify
from isochrone.service.tracing.exporter import ServiceName, SpanCounts, open_exporter
from isochrone.service.tracing.recorder import SpanRecorder
from isochrone.service.trust.allowed_hosts import HostAllowList, own_names
from isochrone.service.trust.identity import Authority, IdentityError
from isochrone.service.trust.model_signature import load_signers
from isochrone.service.trust.tls import (
    CERTIFICATE_CHECK_S,
    ReloadingCertificate,
    load_tls_certificate,
)
from scheduler import metrics
from scheduler.api.admin.admin_spans import trace_admin_requests
from scheduler.api.admin.endpoint import AdminContext
from scheduler.api.client_objects.adapter_intake import AdapterIntake
from scheduler.api.client_objects.batch_service import BatchStorage
from scheduler.batch_storage import open_batch_storage
from scheduler.config import SchedulerConfig
from scheduler.database import Database, open_database
from scheduler.listeners import admin_app, serve_control
from scheduler.loops.advance_batches import AdvanceBatches
from scheduler.loops.advance_history import AdvanceHistory
from scheduler.loops.advance_rollouts import AdvanceRollouts
from scheduler.loops.collect_garbage import CollectGarbage
from scheduler.loops.delete_expired_rows import DeleteExpiredRows
from scheduler.loops.disconnect_revoked import DisconnectRevoked
from scheduler.loops.end_responses import EndResponses
from scheduler.loops.flush_pulses import FlushPulses
from scheduler.loops.hold_lease import HoldLease
from scheduler.loops.learn_demand import LEARN_SHARE, LearnDemand
from scheduler.loops.place_replicas import PlaceReplicas
from scheduler.loops.place_store_masters import PlaceStoreMasters
from scheduler.loops.prefetch_weights import PrefetchWeights
from scheduler.loops.publish_routes import PublishRoutes
from scheduler.loops.record_node_loss import RecordNodeLoss
from scheduler.loops.renew_lease import LeaseRenewalThread
from scheduler.loops.rotate_partitions import RotatePartitions
from scheduler.loops.share_key_use import SHARE_KEY_USE_S, ShareKeyUse
from scheduler.loops.sum_quotas import SumQuotas
from scheduler.loops.sweep_contents import SweepContents
from scheduler.planner.client import PlannerClient
from scheduler.planner.messages import PlannerSettings
from scheduler.state.scheduler_state import SchedulerState
from scheduler.store.fleet.node_reports import NodeReportCache
from scheduler.store.lease import release_lease
from scheduler.store.pool import UNAVAILABLE, Pool, using
from scheduler.store.retention import retention_rules

log = logging.getLogger(__name__)

ADMIN_TOKEN_LENGTH_MIN: Final = 16
STALL_LOGGED_S: Final = 0.25
ADVANCE_BATCHES_S: Final = 1.0
SWEEP_CONTENTS_S: Final = 3600.0
END_RESPONSES_S: Final = 5.0


class JobNudges(NamedTuple):
    """Made before the jobs: setting one asks its job for a turn soon."""

    place: asyncio.Event
    publish: asyncio.Event
    prefetch: asyncio.Event
    learn: asyncio.Event
    disconnect: asyncio.Event
    batches: asyncio.Event


class Composition(NamedTuple):
    """The dependencies of the periodic jobs."""

    config: SchedulerConfig
    database: Database
    state: SchedulerState
    planner: PlannerClient
    authority: Authority
    nudges: JobNudges
    reports: NodeReportCache
    batches: BatchStorage | None
    running: AsyncExitStack
    """Closed when the scheduler stops."""


async def serve(config: SchedulerConfig, stopping: asyncio.Event) -> int:
    """Run one scheduler until `stopping`; return its exit code."""
    # The job `collect_garbage` collects instead: Python would collect in the busiest moments.
    gc.disable()
    token = await asyncio.to_thread(
        read_secret, config.admin_token_file, "the admin token", ADMIN_TOKEN_LENGTH_MIN
    )
    token_sha256 = sha256(token.encode()).hexdigest()
    authority = await asyncio.to_thread(_load_authority, config)
    signers = await asyncio.to_thread(load_signers, config.model_signers)
    certificate = await asyncio.to_thread(_load_certificate, config)
    nudges = JobNudges(*(asyncio.Event() for _ in JobNudges._fields))
    async with open_database(config, authority) as database, AsyncExitStack() as running:
        planner = PlannerClient(
            PlannerSettings(
                database_url=config.database_url,
                liveness=config.liveness,
                log_level=config.log_level,
            )
        )
        running.push_async_callback(planner.stop)
        state = _make_state(config, database, nudges)
        batches = await open_batch_storage(config, nudges.batches.set)
        parts = Composition(
            *(config, database, state, planner, authority, nudges, NodeReportCache()),
            batches=batches,
            running=running,
        )
        tracing = _admin_tracing(config, running)
        loops = (*_periodic_loops(parts, certificate), *tracing.loops)
        context = AdminContext(
            scheduler_name=config.name,
            liveness=config.liveness,
            pool=database.pool,
            authority=authority,
            planner=planner,
            lease=state.lease,
            heartbeats=state.heartbeats,
            placement=state.placement,
            routes=state.routes,
            peers=state.peers,
            nudge_place=nudges.place.set,
            nudge_disconnect=nudges.disconnect.set,
            adapters=AdapterIntake(batches.folder, config.adapters) if batches else None,
            signers=signers,
        )
        hosts = HostAllowList((*config.admin_hosts, *await asyncio.to_thread(own_names)))
        await running.enter_async_context(
            serve_http(
                admin_app(context, token_sha256, loops, hosts, tracing.spans),
                config.admin_host,
                config.admin_port,
                ssl_context=None if certificate is None else certificate.context,
            )
        )
        await running.enter_async_context(
            serve_control(config, database, state, authority, nudges.place.set, batches)
        )
        renewal = LeaseRenewalThread(
            database_url=config.database_url, interval_s=config.lease_renew_s, lease=state.lease
        )
        running.push_async_callback(renewal.stop)
        renewal.start()
        await _run_until_stopped(loops, stopping, config)
        await renewal.stop()
        await _give_up_lease(database.reserved, state)
    return 0


class AdminTracing(NamedTuple):
    """The recorder of spans of admin requests, and the loop that sends them; empty without a
    collector."""

    spans: tuple[Middleware, ...] = ()
    loops: tuple[Loop, ...] = ()


def _admin_tracing(config: SchedulerConfig, running: AsyncExitStack) -> AdminTracing:
    """Compose the traces of admin requests; their exporter is closed with `running`."""
    exporter = open_exporter(
        config.traces_endpoint,
        config.traces_authorization_file,
        ServiceName("scheduler", config.name),
        lambda: SpanCounts(metrics.REGISTRY, "isochrone_scheduler_"),
        monotonic,
    )
    if exporter is None:
        return AdminTracing()
    running.push_async_callback(exporter.close)
    recorder = SpanRecorder(exporter.add, monotonic, time, secrets.token_hex)
    return AdminTracing((trace_admin_requests(recorder, config.name),), (exporter.loop,))


async def _run_until_stopped(
    loops: tuple[Loop, ...], stopping: asyncio.Event, config: SchedulerConfig
) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(loop.run(), name=loop.name) for loop in loops]
        monitor = LagMonitor(metrics.LAG.observe, _note_stall)
        running.append(tasks.create_task(monitor.run(), name="lag"))
        notify("READY=1")
        log.info("serving", extra={"fields": {"admin_port": config.admin_port}})
        await stopping.wait()
        for task in running:
            task.cancel()


def _make_state(config: SchedulerConfig, database: Database, nudges: JobNudges) -> SchedulerState:
    return SchedulerState(
        # Names this process: two of one name, or one that restarts, must not share an epoch.
        holder=f"{config.name}/{secrets.token_hex(4)}",
        lease_ttl_s=config.lease_ttl_s,
        admissions_per_s=config.admissions_per_s,
        lost_after_s=config.liveness.lost_after_s,
        hear_first_s=config.hear_first_s,
        unregistered=ConnectionCount(
            config.unregistered_peers_max, config.unregistered_peers_per_network_max
        ),
        intake=database.intake,
        cluster_id=database.cluster_id,
        clock=monotonic,
        nudge_publish=nudges.publish.set,
    )


def _periodic_loops(
    parts: Composition, certificate: ReloadingCertificate | None
) -> tuple[Loop, ...]:
    """Return every periodic job with its interval. The job that takes the lease runs first."""
    reload_certificate = (
        ()
        if certificate is None
        else (Loop("reload_certificate", certificate.run_once, CERTIFICATE_CHECK_S),)
    )
    jobs = (*_peer_loops(parts), *_placement_loops(parts), *_upkeep_loops(parts))
    return (*jobs, *reload_certificate)


def _peer_loops(parts: Composition) -> tuple[Loop, ...]:
    """Return the jobs of the lease and of the peers that are connected."""
    config, state, database = parts.config, parts.state, parts.database
    hold_lease = HoldLease(
        reserved=database.reserved,
        cluster_id=database.cluster_id,
        renew_s=config.lease_renew_s,
        lease=state.lease,
        leadership=state.leadership,
        admission=state.admission,
        routes=state.routes,
        assignments=state.assignments,
        nudge_place=parts.nudges.place.set,
    )
    flush = FlushPulses(
        reserved=database.reserved, lease=state.lease, peers=state.peers, pulses=state.pulses
    )
    disconnect = DisconnectRevoked(
        pool=database.pool, lease=state.lease, peers=state.peers, assignments=state.assignments
    )
    losses = RecordNodeLoss(
        pool=database.pool,
        lease=state.lease,
        heartbeats=state.heartbeats,
        reports=parts.reports,
        limits=config.liveness,
    )
    share = ShareKeyUse(state.key_use, state.peers)
    return (
        Loop("hold_lease", hold_lease.run_once, config.lease_renew_s),
        Loop("flush_pulses", flush.run_once, 2.0),
        Loop("disconnect_revoked", disconnect.run_once, 2.0, nudged=parts.nudges.disconnect),
        Loop("record_node_loss", losses.run_once, 5.0),
        Loop("share_key_use", share.run_once, SHARE_KEY_USE_S),
    )


def _placement_loops(parts: Composition) -> tuple[Loop, ...]:
    """Return the jobs that place replicas, and inform nodes and routers."""
    config, state, pool, nudges = (
        parts.config,
        parts.state,
        parts.database.pool,
        parts.nudges,
    )
    place = PlaceReplicas(
        pool=pool,
        planner=parts.planner,
        authority=parts.authority,
        lease=state.lease,
        heartbeats=state.heartbeats,
        assignments=state.assignments,
        routes=state.routes,
        first_reports=state.first_reports,
        status=state.placement,
        nudge_place=nudges.place.set,
    )
    publish = PublishRoutes(
        pool=pool,
        interval_s=config.publish_interval_s,
        limits=config.liveness,
        lease=state.lease,
        peers=state.peers,
        heartbeats=state.heartbeats,
        routes=state.routes,
        reports=parts.reports,
        first_reports=state.first_reports,
    )
    learn = LearnDemand(
        planner=parts.planner,
        lease=state.lease,
        nudge_place=nudges.place.set,
        nudge_prefetch=nudges.prefetch.set,
        nudge_learn=nudges.learn.set,
    )
    prefetch = PrefetchWeights(
        pool=pool,
        planner=parts.planner,
        lease=state.lease,
        heartbeats=state.heartbeats,
        assignments=state.assignments,
    )
    rollouts = AdvanceRollouts(
        pool=pool, lease=state.lease, routes=state.routes, nudge_place=nudges.place.set
    )
    stores = PlaceStoreMasters(pool=pool, lease=state.lease, assignments=state.assignments)
    place_s, publish_s = config.place_interval_s, config.publish_interval_s
    return (
        Loop("place_replicas", place.run_once, place_s, share_max=0.25, nudged=nudges.place),
        Loop("publish_routes", publish.run_once, publish_s, share_max=0.5, nudged=nudges.publish),
        Loop("learn_demand", learn.run_once, 15.0, share_max=LEARN_SHARE, nudged=nudges.learn),
        Loop("prefetch_weights", prefetch.run_once, 120.0, share_max=0.1, nudged=nudges.prefetch),
        Loop("advance_rollouts", rollouts.run_once, config.roll_interval_s),
        Loop("place_store_masters", stores.run_once, 2.0),
    )


def _upkeep_loops(parts: Composition) -> tuple[Loop, ...]:
    """Return the jobs that keep the database and this process small."""
    config, pool, lease = parts.config, parts.database.pool, parts.state.lease
    rules = retention_rules(
        event_days=config.event_retention_days,
        certificate_lifetime_s=config.certificate_lifetime_s,
    )
    clock = JumpFreeClock()
    delete = DeleteExpiredRows(pool=pool, lease=lease, rules=rules, clock=clock)
    routes = parts.state.routes
    quotas = SumQuotas(pool=pool, lease=lease, routes=routes, unix_clock=time)
    partitions = RotatePartitions(pool=pool, lease=lease, clock=clock)
    history = AdvanceHistory(pool=pool, lease=lease, unix_clock=time)
    garbage = CollectGarbage(parts.state.peers)
    responses = EndResponses(pool=pool, lease=lease, limits=config.responses)
    batches: tuple[Loop, ...] = ()
    if parts.batches is not None:
        folder, limits, _ = parts.batches
        advance = AdvanceBatches(
            pool=pool,
            lease=lease,
            folder=folder,
            limits=limits,
            nudge=parts.nudges.batches.set,
        )
        parts.running.push_async_callback(advance.close)
        sweep = SweepContents(
            pool=pool, lease=lease, folder=folder, cluster_id=parts.database.cluster_id
        )
        batches = (
            Loop(
                *("advance_batches", advance.run_once, ADVANCE_BATCHES_S),
                share_max=0.5,
                nudged=parts.nudges.batches,
            ),
            Loop("sweep_contents", sweep.run_once, SWEEP_CONTENTS_S),
        )
    return (
        *batches,
        Loop("end_responses", responses.run_once, END_RESPONSES_S),
        Loop("delete_expired_rows", delete.run_once, 600.0),
        Loop("sum_quotas", quotas.run_once, config.publish_interval_s),
        Loop("rotate_partitions", partitions.run_once, 30.0),
        Loop("advance_history", history.run_once, 60.0),
        Loop("collect_garbage", garbage.run_once, 5.0),
    )


def _note_stall(stall: LoopStall) -> None:
    metrics.STALL_SECONDS.labels(stall.task).inc(stall.late_s)
    if stall.late_s >= STALL_LOGGED_S:
        fields = {
            "ms": round(1000 * stall.late_s),
            "cpu_ms": round(1000 * stall.cpu_s),
            "garbage_ms": round(1000 * stall.garbage_s),
            "task": stall.task,
            "where": stall.location,
        }
        log.warning("event loop blocked", extra={"fields": fields})


async def _give_up_lease(reserved: Pool, state: SchedulerState) -> None:
    """Let a standby act at once."""
    try:
        async with using(reserved) as connection:
            await release_lease(connection, state.lease.holder)
    except UNAVAILABLE as error:
        log.warning("lease not given up", extra={"fields": {"reason": str(error)[:200]}})
    await state.leadership.step_down()


def _load_certificate(config: SchedulerConfig) -> ReloadingCertificate | None:
    show_expiry = metrics.TLS_CERTIFICATE_EXPIRES_AT_S.set
    return load_tls_certificate(config.tls_certificate, config.tls_key, show_expiry)


def _load_authority(config: SchedulerConfig) -> Authority:
    """Load the cluster's authority, or create one in an empty folder; raises ConfigError."""
    try:
        if not (config.authority / "ca.key").exists():
            return Authority.create(config.authority, "isochrone", utc_now())
        authority = Authority.load(config.authority)
        if authority.expires_at < utc_now():
            fields = {
                "authority": str(config.authority),
                "reason": f"it expired at {authority.expires_at}: over TLS no peer trusts its"
                " certificates; replace it (docs/operations.md), or copy the newer folder",
            }
            log.error("the cluster's authority has expired", extra={"fields": fields})
        return authority
    except IdentityError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot use the authority in {config.authority}: {reason}") from error

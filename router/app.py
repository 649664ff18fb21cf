"""Compose the router: create every part, connect them, and run their tasks."""

import asyncio
import hashlib
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from isochrone.service.config import ConfigError
from isochrone.service.loop import Loop
from isochrone.service.network.control_link import ControlLink
from isochrone.service.systemd import feed_watchdog
from isochrone.service.trust.identity import Identity
from isochrone.service.trust.tls import CERTIFICATE_CHECK_S, client_context, load_tls_certificate
from isochrone.wire.client_keys.key_use import KEY_USE, FleetKeyUse, KeyUse
from isochrone.wire.ids import BootId, RouterId
from isochrone.wire.peers.control import KEYS_FIRST, TABLE_PARTS, ToRouter, Welcome
from isochrone.wire.peers.routes import RouteDelta, RouteTable, RouteTablePart
from isochrone.wire.peers.suspicions import SUSPICIONS, FleetSuspicions
from isochrone.wire.peers.usage import UsageAck
from router import build
from router.apis.batches.answer import ItemAnswerer
from router.apis.dispatch import ApiDispatcher
from router.apis.linked_images.fetcher import image_fetcher
from router.apis.media.routes import MediaRoutes
from router.apis.openai.auxiliary import auxiliary_app
from router.apis.openai.surface import OpenAiSurface
from router.apis.request_ids import RequestIds
from router.apis.workers_ai.auxiliary import EnvelopeRoutes, add_catalog_routes
from router.apis.workers_ai.markdown import add_markdown_routes
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.server import PublicServer
from router.dataplane.upstream import Upstream
from router.decide.admission.limits import KeyLimiter
from router.decide.admission.suspicion import SuspectTable
from router.fleet_state import FleetState
from router.freed_memory import keep_freed_memory
from router.listeners import open_listeners
from router.loops.answer_batches import AnswerBatches
from router.loops.answer_responses import LEASE_INTERVAL_S
from router.loops.collect_garbage import COLLECT_INTERVAL_S, CollectInTurns
from router.loops.follow_routes import TableFollower
from router.loops.probe_nodes import NodeProber
from router.loops.read_pop_loads import PopLoadPoller
from router.loops.set_gauges import GaugeSetter
from router.loops.share_outboxes import OutboxSharer
from router.loops.ship_reports import ReportShipper
from router.pipeline import RequestPipeline
from router.poison_guard import PoisonGuard
from router.processes import ParentLink, Shared, WorkerIdentity, WorkerPool
from router.recording.former_workers import adopt_usage
from router.recording.metrics import Metrics
from router.recording.record import Recorder
from router.recording.tracing import request_tracer, router_exporter
from router.recording.usage_journal import UsageJournal
from router.recording.usage_spool import UsageSpool
from router.scheduler_client import SchedulerAccess, SchedulerClient
from router.sharing.key_use_sharing import KeyUseOutbox, OwnKeyUse, draw_in_slices
from router.sharing.prompt_sharing import SharedPrompts
from router.sharing.suspicion_sharing import SuspicionOutbox, from_fleet
from router.stored_answers import compose_stored_answers

log = logging.getLogger(__name__)

ROUND_TRIPS_INTERVAL_S: Final = 10.0
GAUGES_INTERVAL_S: Final = 1.0
SHARE_INTERVAL_S: Final = 1.0
SEND_TABLE_INTERVAL_S: Final = 1.0
BATCHES_INTERVAL_S: Final = 0.5
RECHECK_INTERVAL_S: Final = 1.0
WORKER_ENDS_S: Final = 10.0
"""Time for a worker to close connections and save usage, after its open requests have ended."""

FIRST_TABLE_S: Final = 5.0
"""How long a worker waits for its first route table before it listens. Without a table it would
refuse requests that the other processes can serve."""


class RouterApp:
    """The parts of a router. `open_router` runs them."""

    def __init__(
        self, config: RouterConfig, identity: Identity, worker: WorkerIdentity | None = None
    ) -> None:
        """Create and connect the parts. A `worker` gets its route table from the main process."""
        self.config = config
        self.identity = identity
        self.boot_id = BootId(uuid.uuid4().hex)
        self.port = self.private_port = 0
        self.stopping = asyncio.Event()
        self.metrics = Metrics()
        show_expiry = self.metrics.tls_certificate_expires_at.set
        self.tls = load_tls_certificate(config.tls_certificate, config.tls_key, show_expiry)
        self.metrics.build_info.labels(**build.facts()).set(1)
        self.limiter = KeyLimiter(config.processes or 1)
        self.fleet = FleetState(identity.pop, time.monotonic, self.boot_id)
        self._create_control_link(worker)
        self._create_request_path()
        self._create_reports()
        self.server = self._create_server()
        self.auxiliary_app = auxiliary_app(self.surface, self.fleet, self.metrics, self.request_ids)
        routes = EnvelopeRoutes(self.auxiliary_app, self.surface, self.metrics, time.monotonic)
        add_catalog_routes(routes, self.surface, self.fleet)
        add_markdown_routes(routes, self.limiter, self.fleet)
        self.loops = {loop.name: loop for loop in self._create_loops()}
        self.follower.on_change = self.on_table_change
        self.follower.on_withdrawn = self.loops["probe"].nudge

    def _create_control_link(self, worker: WorkerIdentity | None) -> None:
        """Create the source of route tables: the scheduler, or for a worker the main process."""
        self.node_tls = client_context(self.identity) if self.config.node_tls else None
        self.follower = TableFollower(
            fleet=self.fleet,
            limiter=self.limiter,
            metrics=self.metrics,
            cluster_id=self.identity.cluster_id,
            snapshot=self.config.state_folder / "table.snapshot",
            clock=time.monotonic,
        )
        self.parent: ParentLink | None = None
        if worker is not None:
            self.parent = ParentLink(worker.end, self.on_main_process_message, self.stopping)
        self.link = self.parent or ControlLink(
            urls=self.config.schedulers,
            identity=self.identity,
            boot_id=self.boot_id,
            incoming=ToRouter,
            progress=self.follower.registering,
            on_welcome=self.on_welcome,
            on_message=self.on_message,
            rng=random.Random(),  # noqa: S311 - jitter, not a secret
            folder=self.config.state_folder,
            contexts=() if self.node_tls is None else (self.node_tls,),
            capabilities=(TABLE_PARTS, KEYS_FIRST, SUSPICIONS, KEY_USE),
            on_too_large=self.metrics.messages_refused.inc,
        )
        count = max(0, (self.config.processes or 1) - 1) if worker is None else 0
        self.workers = WorkerPool(
            count,
            self.link.send,
            table=lambda: self.fleet.directory.table,
            learn=self.learn_shared,
            end_timeout_s=self.config.drain_timeout_s + WORKER_ENDS_S,
        )
        self.fleet.prompt_outbox.is_open = worker is not None or count > 0

    def _create_request_path(self) -> None:
        """Create the parts that a request passes through, from the API to the nodes."""
        self.journal = UsageJournal(self.config.state_folder / "journal", time.monotonic)
        self.recorder = Recorder(self.identity.pop, self.metrics, self.journal)
        self.deadlines = Deadlines(time.monotonic)
        self.upstream = Upstream(self.config, self.deadlines, time.monotonic, self.node_tls)
        # All processes of all routers use the same key, so that they can share suspicions. The key
        # is not secret: it keeps the suspicions of one cluster apart from another's.
        digest_key = hashlib.sha256(b"isochrone-suspects-1\0" + self.identity.ca_pem.encode())
        suspects = SuspectTable(digest_key.digest(), self.config.suspect_refusal_s)
        self.poison_guard = PoisonGuard(suspects, self.metrics, time.monotonic)
        self.fleet_suspicions = SuspicionOutbox()
        self.key_use = KeyUseOutbox()
        self.exporter = router_exporter(self.config, self.identity, self.metrics)
        self.pipeline = RequestPipeline(
            config=self.config,
            fleet=self.fleet,
            limiter=self.limiter,
            upstream=self.upstream,
            recorder=self.recorder,
            metrics=self.metrics,
            poison_guard=self.poison_guard,
            clock=time.monotonic,
            tracer=request_tracer(self.config, self.identity, self.exporter),
        )
        images = image_fetcher(self.config, lambda: self.server.bodies, self.metrics)
        self.surface = OpenAiSurface(self.config, self.fleet, time.time, images)
        uses_tls = any(url.startswith("https:") for url in self.config.schedulers)
        self.scheduler_client = SchedulerClient(client_context(self.identity) if uses_tls else None)
        self.request_ids = RequestIds(self.boot_id)

    def _create_reports(self) -> None:
        """Create the jobs that probe nodes, report to the scheduler, and set gauges."""
        self.pop_loads = PopLoadPoller(
            fleet=self.fleet,
            upstream=self.upstream,
            metrics=self.metrics,
            timeout_s=self.config.probe_timeout_s,
            interval_s=self.config.probe_interval_s,
        )
        self.prober = NodeProber(
            fleet=self.fleet,
            upstream=self.upstream,
            metrics=self.metrics,
            dropped=self.follower.dropped,
            on_dropped_answer=self.follower.record_answer,
            on_node_lost=self.pipeline.fail_node,
            timeout_s=self.config.probe_timeout_s,
            interval_s=self.config.probe_interval_s,
            unanswered=lambda: self.pop_loads.unanswered,
        )
        self.spool = UsageSpool(self.config.state_folder / "usage", self.config.spool_bytes_max)
        self.shipper = ReportShipper(
            router_id=RouterId(self.identity.name),
            boot_id=self.boot_id,
            fleet=self.fleet,
            table_refusal=self.follower.refusal,
            recorder=self.recorder,
            metrics=self.metrics,
            spool=self.spool,
            send=self.link.send,
            clock=time.monotonic,
            unix_clock=time.time,
            resend_s=self.config.usage_resend_s,
        )
        self.sharer = OutboxSharer(
            prompts=self.fleet.prompt_outbox,
            suspicions=self.poison_guard.outbox,
            parent=self.parent,
            workers=self.workers,
            fleet_suspicions=self.fleet_suspicions,
            send=self.link.send,
            clock=time.monotonic,
            take_key_use=self.limiter.take_unshared,
            key_use=self.key_use,
        )
        self.garbage = CollectInTurns()
        self.gauges = GaugeSetter(
            fleet=self.fleet,
            follower=self.follower,
            waiting=self.pipeline.queue,
            metrics=self.metrics,
            is_connected=lambda: self.link.connected,
        )

    def _create_server(self) -> PublicServer:
        """Return the server of the public port, and create the jobs that answer batches."""
        self.stored = compose_stored_answers(
            *(self.config, self.scheduler_client, self.surface, self.pipeline.serve, self.metrics),
            charge=lambda key, size_bytes: self.server.bodies.charge_stored(key, size_bytes),
            keys=lambda: self.fleet.directory.keys,
            may_lease=lambda: (
                self.fleet.directory.table is not None and not self.server.is_draining
            ),
            request_ids=self.request_ids,
            is_main_process=self.parent is None,
        )
        dispatcher = ApiDispatcher(
            *(self.surface, self.pipeline, self.upstream, self.request_ids, self.metrics),
            self.scheduler_client,
            self.stored.routes,
            MediaRoutes(self.surface, self.pipeline, self.config.audio_relayed_bytes_max),
        )
        answerer = ItemAnswerer(
            keys=lambda: self.fleet.directory.keys,
            read=dispatcher.read_inference,
            serve=self.pipeline.serve,
            request_ids=self.request_ids,
            clock=time.monotonic,
            unix_clock=time.time,
        )
        self.answer_batches = AnswerBatches(
            client=self.scheduler_client,
            fleet=self.fleet,
            answer=answerer.answer,
            is_busy=lambda: self.pipeline.queue.depth > 0,
            is_draining=lambda: self.server.is_draining,
            per_replica_max=0 if self.parent is not None else self.config.batch_requests_max,
        )
        return PublicServer(
            config=self.config,
            authorize=dispatcher.authorize,
            handler=dispatcher.dispatch,
            encode_error=dispatcher.encode_error,
            deadlines=self.deadlines,
            clock=time.monotonic,
            unix_clock=time.time,
        )

    def _create_loops(self) -> tuple[Loop, ...]:
        config, jitter = self.config, random.Random()  # noqa: S311 - jitter, not a secret
        tls = (
            ()
            if self.tls is None
            else (Loop("certificate", self.tls.run_once, CERTIFICATE_CHECK_S),)
        )
        demand = Loop("demand", self.shipper.ship_demand, config.demand_interval_s, jitter=jitter)
        # A deployment without replicas starts its first one by demand: report that at once.
        self.recorder.on_unserved = demand.nudge
        traces = () if self.exporter is None else (self.exporter.loop,)
        return (
            *tls,
            *traces,
            Loop("persist", self.follower.persist, 30.0),
            Loop("recheck", self.follower.recheck, RECHECK_INTERVAL_S),
            # A turn takes as long again: loads are read twice as often as nodes are pinged, because
            # what others answer is a little older than a pong.
            Loop("pop_loads", self.pop_loads.run_once, config.probe_interval_s / 4, jitter=jitter),
            Loop("probe", self.prober.run_once, config.probe_interval_s, jitter=jitter),
            demand,
            Loop("usage", self.shipper.ship_usage, config.usage_interval_s, jitter=jitter),
            Loop("round_trips", self.shipper.ship_round_trips, ROUND_TRIPS_INTERVAL_S),
            Loop("garbage", self.garbage.run_once, COLLECT_INTERVAL_S),
            Loop("gauges", self.gauges.run_once, GAUGES_INTERVAL_S),
            Loop("share", self.sharer.run_once, SHARE_INTERVAL_S),
            Loop("send_table", self.send_table, SEND_TABLE_INTERVAL_S),
            Loop("responses", self.stored.job.run_once, LEASE_INTERVAL_S, jitter=jitter),
            Loop("batches", self.answer_batches.run_once, BATCHES_INTERVAL_S, jitter=jitter),
        )

    async def send_table(self) -> int:
        """Send workers the route table that they lack, and the access to the scheduler.

        The access ends with the control connection, so that no request waits for a scheduler that
        is gone.
        """
        if not self.link.connected:
            self.scheduler_client.access = SchedulerAccess()
        self.workers.broadcast(self.scheduler_client.access)
        return await self.workers.send_table()

    async def on_welcome(self, welcome: Welcome) -> None:
        """Note that a scheduler has accepted this router."""
        log.info("following", extra={"fields": {"epoch": welcome.epoch}})
        self.shipper.on_welcome()
        assert isinstance(self.link, ControlLink)
        self.scheduler_client.access = SchedulerAccess(
            *(self.link.url, welcome.relay_token, welcome.has_batches)
        )

    async def on_message(self, message: Any) -> None:
        """Pass a message of the scheduler to the part that handles it."""
        if isinstance(message, RouteTable | RouteTablePart | RouteDelta):
            await self.follower.on_table(message, self.link.send)
        elif isinstance(message, UsageAck):
            await self.shipper.on_ack(message)
            self.workers.broadcast(message)
        elif isinstance(message, FleetSuspicions):
            suspicions = from_fleet(message, time.monotonic())
            self.poison_guard.learn(suspicions)
            self.workers.broadcast(suspicions)
        elif isinstance(message, FleetKeyUse):
            await draw_in_slices(message.rows, self.draw_elsewhere)
            self.workers.broadcast(message)

    async def on_main_process_message(self, message: Any) -> None:
        """Pass a message of the main process to the part that handles it."""
        if isinstance(message, RouteTablePart):
            table = await self.follower.assemble(message)
            if table is not None:
                self.follower.accept(table, await self.follower.prepare(table))
            await asyncio.sleep(0)
        elif isinstance(message, RouteDelta):
            await self.follower.accept_change(message)
        elif isinstance(message, Shared):
            self.learn_shared(message)
        elif isinstance(message, SchedulerAccess):
            self.scheduler_client.access = message
        elif isinstance(message, FleetKeyUse):
            await draw_in_slices(message.rows, self.draw_elsewhere)
        else:
            await self.shipper.on_ack(message)

    def draw_elsewhere(self, use: KeyUse) -> None:
        """Draw a key's use at other routers from its limits."""
        key = self.fleet.directory.keys.get(use.key_id)
        if key is not None:
            self.limiter.draw_elsewhere(key, use, time.monotonic(), time.time())

    def learn_shared(self, message: Shared | OwnKeyUse) -> None:
        """Take a message that another process of this router shares."""
        if isinstance(message, OwnKeyUse):
            self.key_use.add(message.rows)
        elif isinstance(message, SharedPrompts):
            self.fleet.learn_prompts(message.rows)
        else:
            self.poison_guard.learn(message)
            if self.parent is None:
                self.fleet_suspicions.add(message)

    def on_table_change(self) -> None:
        """Write the new table to disk and send it to the workers soon."""
        self.loops["persist"].nudge()
        self.loops["send_table"].nudge()


@asynccontextmanager
async def open_router(
    config: RouterConfig, identity: Identity, worker: WorkerIdentity | None = None
) -> AsyncIterator[RouterApp]:
    """Run a router. On exit, stop accepting, finish open requests, and write usage to disk."""
    keep_freed_memory()
    async with AsyncExitStack() as stack:
        try:
            if worker is None:
                await asyncio.to_thread(adopt_usage, config.state_folder, config.processes or 1)
            app = RouterApp(config, identity, worker)
            stack.callback(app.journal.close)
            await asyncio.to_thread(config.state_folder.mkdir, 0o700, parents=True, exist_ok=True)
            await asyncio.to_thread(app.spool.open)
        except OSError as error:
            raise ConfigError(
                f"cannot use the state folder {config.state_folder}: {error.strerror or error}"
            ) from error
        await app.follower.load(time.time())
        stack.enter_context(app.garbage.in_turns())
        app.deadlines.start()
        stack.callback(app.deadlines.stop)
        stack.push_async_callback(app.upstream.close)
        stack.callback(app.pop_loads.close)
        stack.push_async_callback(app.scheduler_client.close)
        if app.exporter is not None:
            stack.push_async_callback(app.exporter.close)
        stack.push_async_callback(_save_to_disk, app)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(app.answer_batches.close)
        stack.callback(app.stored.job.close)
        for loop in app.loops.values():
            stack.callback(tasks.create_task(loop.run(), name=loop.name).cancel)
        stack.callback(tasks.create_task(feed_watchdog(), name="watchdog").cancel)
        if config.schedulers or worker is not None:
            stack.callback(tasks.create_task(app.link.run(), name="link").cancel)
        if app.parent is not None and app.fleet.directory.table is None:
            await app.parent.wait_for_message(FIRST_TABLE_S)
        app.port, app.private_port = await stack.enter_async_context(
            open_listeners(
                config,
                server=app.server,
                auxiliary_app=app.auxiliary_app,
                upstream=app.upstream,
                registry=app.metrics.registry,
                context=None if app.tls is None else app.tls.context,
            )
        )
        workers = tasks.create_task(app.workers.run(app.port), name="workers")
        stack.callback(workers.cancel)
        yield app


async def _save_to_disk(app: RouterApp) -> None:
    """Write to disk what is only in memory: usage and the route table."""
    for save in (app.shipper.spool_usage, app.follower.persist_now):
        try:
            await save()
        except OSError as error:
            log.error("cannot save state to disk", extra={"fields": {"reason": str(error)}})

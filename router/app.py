"""The only place of composition: makes every part, ties them, and owns their tasks."""

import asyncio
import logging
import os
import random
import socket
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from isochrone.service.config import ConfigError
from isochrone.service.control_link import ControlLink
from isochrone.service.identity import Identity
from isochrone.service.joining import load_or_join
from isochrone.service.loop import Loop
from isochrone.service.systemd import feed_watchdog, notify
from isochrone.service.tls import CERTIFICATE_CHECK_S, client_context, load_tls_certificate
from isochrone.wire.control import PeerRole, ToRouter, Welcome
from isochrone.wire.ids import BootId, RouterId
from isochrone.wire.routes import RouteDelta, RouteTable
from isochrone.wire.usage import UsageAck
from router import build
from router.apis.doors import Doors
from router.apis.openai.cold import cold_app
from router.apis.openai.hot import OpenAiSurface
from router.apis.request_ids import RequestIds
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.server import Server
from router.dataplane.upstream import Upstream
from router.decide.limits import Gate
from router.fleet import Fleet
from router.journal import Journal
from router.listeners import open_listeners
from router.loops.follow import Follower
from router.loops.gauges import Gauges
from router.loops.probe import Prober
from router.loops.share import Sharer
from router.loops.ship import Shipper
from router.loops.spool import UsageSpool
from router.metrics import Metrics
from router.processes import WORKER_ENV, ParentLink, Worker, Workers, config_of, worker_of
from router.record import Recorder
from router.serve import Corridor
from router.sharing import Prompts

log = logging.getLogger(__name__)

ROUND_TRIPS_INTERVAL_S: Final = 10.0
GAUGES_INTERVAL_S: Final = 1.0
SHARE_INTERVAL_S: Final = 1.0
LEAD_INTERVAL_S: Final = 1.0
RECONSIDER_INTERVAL_S: Final = 1.0
WORKER_ENDS_S: Final = 10.0
"""What a worker is given beyond its requests to end: to close connections, to put usage away."""

FIRST_TABLE_S: Final = 5.0
"""How long a worker waits for its first table: without one it refuses what others can serve."""


async def run(config: RouterConfig, stopping: asyncio.Event) -> int:
    """Serve until `stopping`, then drain. Returns the exit code."""
    identity = await load_or_join(
        urls=config.schedulers,
        token_file=config.join_token_file,
        role=PeerRole.ROUTER,
        name=config.name or socket.gethostname().lower(),
        folder=config.state_folder,
    )
    worker = worker_of(os.environ.pop(WORKER_ENV, ""))
    if worker is not None:
        config = config_of(worker, config)
    try:
        async with open_house(config, identity, worker) as house:
            told = {"port": house.port, "pop": identity.pop, "router": identity.name}
            log.info("serving", extra={"fields": told | build.facts()})
            notify("READY=1")
            await _either(stopping, house.stopping)
            notify("STOPPING=1")
    except BaseExceptionGroup as group:
        wrong = group.subgroup(ConfigError)
        if wrong is None:
            raise
        raise ConfigError(str(wrong.exceptions[0])) from group
    return 0


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class House:
    """Everything a router is made of. `open_house` runs it."""

    def __init__(
        self, config: RouterConfig, identity: Identity, worker: Worker | None = None
    ) -> None:
        """Make the parts and tie them; those of a `worker` are led by the main process."""
        self.config = config
        self.identity = identity
        self.boot_id = BootId(uuid.uuid4().hex)
        self.port = self.private_port = 0
        self.stopping = asyncio.Event()
        self.metrics = Metrics()
        self.tls = load_tls_certificate(config.tls_certificate, config.tls_key)
        self.metrics.build_info.labels(**build.facts()).set(1)
        self.gate = Gate(config.processes or 1)
        self.fleet = Fleet(identity.pop, time.monotonic, self.boot_id)
        self._make_what_leads(worker)
        self._make_what_serves()
        self._make_what_reports()
        self.server = self._server()
        self.cold = cold_app(self.surface, self.fleet, self.metrics, self.request_ids)
        self.loops = {loop.name: loop for loop in self._loops()}
        self.follower.on_change(self.table_changed)

    def _make_what_leads(self, worker: Worker | None) -> None:
        """Make what brings tables: from the scheduler, or from the main process to a worker."""
        self.node_tls = client_context(self.identity) if self.config.node_tls else None
        self.follower = Follower(
            fleet=self.fleet,
            gate=self.gate,
            metrics=self.metrics,
            cluster_id=self.identity.cluster_id,
            snapshot=self.config.state_folder / "table.snapshot",
            clock=time.monotonic,
        )
        self.parent: ParentLink | None = None
        if worker is not None:
            self.parent = ParentLink(worker.end, self.on_passed_down, self.stopping)
        self.link = self.parent or ControlLink(
            urls=self.config.schedulers,
            identity=self.identity,
            boot_id=self.boot_id,
            incoming=ToRouter,
            progress=self.follower.progress,
            on_welcome=self.on_welcome,
            on_message=self.on_message,
            rng=random.Random(),  # noqa: S311 - jitter, not a secret
            folder=self.config.state_folder,
            contexts=() if self.node_tls is None else (self.node_tls,),
        )
        count = max(0, (self.config.processes or 1) - 1) if worker is None else 0
        self.workers = Workers(
            count,
            self.link.send,
            table=lambda: self.fleet.table,
            learn=self.fleet.learned_prompts,
            end_timeout_s=self.config.drain_timeout_s + WORKER_ENDS_S,
        )
        self.fleet.outbox.is_open = worker is not None or count > 0

    def _make_what_serves(self) -> None:
        """Make what a request passes through, from the nodes to the client's surface."""
        self.journal = Journal(self.config.state_folder / "journal")
        self.recorder = Recorder(self.identity.pop, self.metrics, self.journal)
        self.deadlines = Deadlines(time.monotonic)
        self.upstream = Upstream(self.config, self.deadlines, time.monotonic, self.node_tls)
        self.corridor = Corridor(
            config=self.config,
            fleet=self.fleet,
            gate=self.gate,
            upstream=self.upstream,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=time.monotonic,
        )
        self.surface = OpenAiSurface(self.config, self.fleet, time.time)
        self.request_ids = RequestIds(self.boot_id)

    def _make_what_reports(self) -> None:
        """Make what measures the nodes, tells the scheduler, and shows how things stand."""
        self.prober = Prober(
            fleet=self.fleet,
            upstream=self.upstream,
            metrics=self.metrics,
            dropped=self.follower.dropped,
            let_go=self.corridor.let_go,
            timeout_s=self.config.probe_timeout_s,
        )
        self.spool = UsageSpool(self.config.state_folder / "usage", self.config.spool_bytes_max)
        self.shipper = Shipper(
            router_id=RouterId(self.identity.name),
            boot_id=self.boot_id,
            fleet=self.fleet,
            recorder=self.recorder,
            metrics=self.metrics,
            spool=self.spool,
            send=self.link.send,
            clock=time.monotonic,
            unix_clock=time.time,
            resend_s=self.config.usage_resend_s,
        )
        self.sharer = Sharer(self.fleet.outbox, self.parent, self.workers)
        self.gauges = Gauges(
            fleet=self.fleet,
            follower=self.follower,
            waiting=self.corridor.waiting,
            metrics=self.metrics,
            is_led=lambda: self.link.connected,
        )

    def _server(self) -> Server:
        """Return what clients meet."""
        doors = Doors(self.surface, self.corridor, self.upstream, self.request_ids, self.metrics)
        return Server(
            config=self.config,
            let_in=doors.let_in,
            handler=doors.answer,
            encode_error=doors.encode_error,
            deadlines=self.deadlines,
            clock=time.monotonic,
            unix_clock=time.time,
        )

    def _loops(self) -> tuple[Loop, ...]:
        config, jitter = self.config, random.Random()  # noqa: S311 - jitter, not a secret
        tls = (
            ()
            if self.tls is None
            else (Loop("certificate", self.tls.run_once, CERTIFICATE_CHECK_S),)
        )
        demand = Loop("demand", self.shipper.ship_demand, config.demand_interval_s, jitter=jitter)
        # Who waits for a first replica is not to wait for the window's end as well.
        self.recorder.on_unserved = demand.nudge
        return (
            *tls,
            Loop("persist", self.follower.persist, 30.0),
            Loop("reconsider", self.follower.reconsider, RECONSIDER_INTERVAL_S),
            Loop("probe", self.prober.run_once, config.probe_interval_s, jitter=jitter),
            demand,
            Loop("usage", self.shipper.ship_usage, config.usage_interval_s, jitter=jitter),
            Loop("round_trips", self.shipper.ship_round_trips, ROUND_TRIPS_INTERVAL_S),
            Loop("gauges", self.gauges.run_once, GAUGES_INTERVAL_S),
            Loop("share", self.sharer.run_once, SHARE_INTERVAL_S),
            Loop("lead", self.workers.lead, LEAD_INTERVAL_S),
        )

    async def on_welcome(self, welcome: Welcome) -> None:
        """The scheduler took us."""
        log.info("following", extra={"fields": {"epoch": welcome.epoch}})
        self.shipper.on_welcome()

    async def on_message(self, message: Any) -> None:
        """Give what came down to whom it concerns."""
        if isinstance(message, RouteTable | RouteDelta):
            await self.follower.on_table(message, self.link.send)
        elif isinstance(message, UsageAck):
            await self.shipper.on_ack(message)
            self.workers.tell(message)

    async def on_passed_down(self, message: Any) -> None:
        """Give what the main process passes down to whom it concerns."""
        if isinstance(message, RouteTable):
            self.follower.take(message)
        elif isinstance(message, Prompts):
            self.fleet.learned_prompts(message.rows)
        else:
            await self.shipper.on_ack(message)

    def table_changed(self) -> None:
        """Keep the table on disk, and pass it to the workers."""
        self.loops["persist"].nudge()
        self.loops["lead"].nudge()


@asynccontextmanager
async def open_house(
    config: RouterConfig, identity: Identity, worker: Worker | None = None
) -> AsyncIterator[House]:
    """Run a router. On exit: stop accepting, finish what streams, put the ledger on disk."""
    async with AsyncExitStack() as stack:
        try:
            house = House(config, identity, worker)
            stack.callback(house.journal.close)
            await asyncio.to_thread(config.state_folder.mkdir, 0o700, parents=True, exist_ok=True)
            await asyncio.to_thread(house.spool.open)
        except OSError as error:
            raise ConfigError(
                f"cannot use the state folder {config.state_folder}: {error.strerror or error}"
            ) from error
        await house.follower.load(time.time())
        house.deadlines.start()
        stack.callback(house.deadlines.stop)
        stack.push_async_callback(house.upstream.close)
        stack.push_async_callback(_put_away, house)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for loop in house.loops.values():
            stack.callback(tasks.create_task(loop.run(), name=loop.name).cancel)
        stack.callback(tasks.create_task(feed_watchdog(), name="watchdog").cancel)
        if config.schedulers or worker is not None:
            stack.callback(tasks.create_task(house.link.run(), name="link").cancel)
        if house.parent is not None and house.fleet.table is None:
            await house.parent.until_told(FIRST_TABLE_S)
        house.port, house.private_port = await stack.enter_async_context(
            open_listeners(
                config,
                server=house.server,
                cold=house.cold,
                upstream=house.upstream,
                registry=house.metrics.registry,
                context=None if house.tls is None else house.tls.context,
            )
        )
        workers = tasks.create_task(house.workers.run(house.port), name="workers")
        stack.callback(workers.cancel)
        yield house


async def _put_away(house: House) -> None:
    """Keep on disk what only memory holds: the usage and the table."""
    for keep in (house.shipper.spool_usage, house.follower.persist):
        try:
            await keep()
        except OSError as error:
            log.error("cannot put away what memory holds", extra={"fields": {"reason": str(error)}})

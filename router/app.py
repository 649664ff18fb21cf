"""The only place of composition: makes every part, ties them, and owns their tasks."""

import asyncio
import logging
import os
import random
import socket
import ssl
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web

from isochrone.service import tls
from isochrone.service.config import ConfigError
from isochrone.service.control import ControlLink, join
from isochrone.service.door import DoorLimits, open_door
from isochrone.service.identity import Identity, IdentityError, load_identity
from isochrone.service.loop import Loop
from isochrone.service.metrics import exposition
from isochrone.service.notify import notify, watchdog_interval_s
from isochrone.wire.control import PeerRole, ToRouter, Welcome
from isochrone.wire.ids import BootId, RouterId
from isochrone.wire.routes import RouteDelta, RouteTable
from isochrone.wire.usage import UsageAck
from router import build
from router.apis.doors import Doors, open_cold
from router.apis.openai.cold import cold_app
from router.apis.openai.hot import OpenAiSurface
from router.apis.workers_ai.hot import WorkersAiSurface
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.server import Server
from router.dataplane.upstream import Upstream
from router.decide.limits import Gate
from router.fleet import Fleet
from router.journal import Journal
from router.loops.follow import Follower
from router.loops.probe import Prober
from router.loops.ship import Shipper, UsageSpool
from router.metrics import Metrics
from router.processes import WORKER_ENV, ParentLink, Workers
from router.record import Recorder
from router.serve import Corridor
from router.sharing import Prompts

log = logging.getLogger(__name__)

ROUND_TRIPS_INTERVAL_S: Final = 10.0
GAUGES_INTERVAL_S: Final = 1.0
SHARE_INTERVAL_S: Final = 1.0
RECONSIDER_INTERVAL_S: Final = 1.0


class Worker(NamedTuple):
    """What makes this process one of several: its number, its end of the pipe, the port."""

    number: int
    end: socket.socket
    port: int


class House(NamedTuple):
    """A running router, as the tests and `run` see it."""

    port: int
    private_port: int
    fleet: Fleet
    follower: Follower
    recorder: Recorder
    metrics: Metrics
    loops: dict[str, Loop]
    upstream: Upstream
    stopping: asyncio.Event


async def run(config: RouterConfig, stopping: asyncio.Event) -> int:
    """Serve until `stopping`, then drain. Returns the exit code."""
    identity = await papers_of(config)
    worker = worker_of(os.environ.pop(WORKER_ENV, ""))
    if worker is not None:
        config = msgspec.structs.replace(
            config,
            state_folder=config.state_folder / f"worker-{worker.number}",
            schedulers=(),
            port=worker.port,
            private_host="",
        )
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


def worker_of(text: str) -> Worker | None:
    """Read what the main process says to a worker; None in the main process itself."""
    if not text:
        return None
    number, descriptor, port = (int(part) for part in text.split(":"))
    return Worker(number, socket.socket(fileno=descriptor), port)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def papers_of(config: RouterConfig) -> Identity:
    """Return this router's identity, joining the cluster where it has none yet."""
    try:
        identity = await asyncio.to_thread(load_identity, config.state_folder)
        if identity is not None:
            return identity
        if not config.join_token or not config.schedulers:
            raise ConfigError(
                f"cannot start: {config.state_folder} holds no identity; give --join TOKEN "
                "(made by the scheduler's admin API) and the schedulers' URLs"
            )
        return await join(
            urls=config.schedulers,
            token=config.join_token,
            role=PeerRole.ROUTER,
            name=config.name or socket.gethostname().lower(),
            folder=config.state_folder,
        )
    except IdentityError as error:
        raise ConfigError(str(error)) from error


class RequestIds:
    """Makes request ids: this life of the router, and a number."""

    def __init__(self, boot_id: BootId) -> None:
        """Begin at one."""
        self._prefix = f"req-{boot_id}-"
        self._count = 0

    def __call__(self) -> str:
        """Return the next."""
        self._count += 1
        return f"{self._prefix}{self._count:x}"


class Parts:
    """Everything a router is made of, not yet running."""

    def __init__(
        self, config: RouterConfig, identity: Identity, worker: "Worker | None" = None
    ) -> None:
        """Make the parts and tie them; those of a `worker` are led by the main process."""
        clock = time.monotonic
        boot_id = BootId(uuid.uuid4().hex)
        state = config.state_folder
        self.config = config
        self.metrics = Metrics()
        self.metrics.build_info.labels(**build.facts()).set(1)
        self.gate = Gate(config.processes or 1)
        self.stopping = asyncio.Event()
        self.fleet = Fleet(identity.pop, clock, boot_id)
        self.recorder = Recorder(identity.pop, self.metrics, clock, Journal(state / "journal"))
        context = tls.client_context(identity) if config.node_tls else None
        self.deadlines = Deadlines(clock)
        self.upstream = Upstream(config, self.deadlines, clock, context)
        self.follower = Follower(
            fleet=self.fleet,
            gate=self.gate,
            metrics=self.metrics,
            cluster_id=identity.cluster_id,
            snapshot=state / "table.snapshot",
            clock=clock,
        )
        self.link: ControlLink | ParentLink = (
            self._dial(identity, boot_id, context)
            if worker is None
            else ParentLink(worker.end, self.on_passed_down, self.stopping)
        )
        count = max(0, (config.processes or 1) - 1) if worker is None else 0
        self.workers = Workers(
            count, self.send, lambda: self.fleet.table, self.fleet.learned_prompts
        )
        self.fleet.outbox.is_open = worker is not None or count > 0
        self.spool = UsageSpool(state / "usage", config.spool_bytes_max)
        self.shipper = Shipper(
            router_id=RouterId(identity.name),
            boot_id=boot_id,
            pop=identity.pop,
            fleet=self.fleet,
            recorder=self.recorder,
            metrics=self.metrics,
            spool=self.spool,
            send=self.send,
            clock=clock,
            unix_clock=time.time,
            resend_s=config.usage_resend_s,
        )
        self.corridor = Corridor(
            config=config,
            fleet=self.fleet,
            gate=self.gate,
            upstream=self.upstream,
            recorder=self.recorder,
            metrics=self.metrics,
            clock=clock,
        )
        self.prober = Prober(
            fleet=self.fleet,
            upstream=self.upstream,
            metrics=self.metrics,
            dropped=self.follower.dropped,
            let_go=self.corridor.let_go,
            timeout_s=config.probe_timeout_s,
        )
        self.surface, self.server = self._front(boot_id)
        self.loops = self._loops()
        self.follower.on_change(self.table_changed)

    def _front(self, boot_id: BootId) -> tuple[OpenAiSurface, Server]:
        """Make what clients meet."""
        surface = OpenAiSurface(
            config=self.config,
            fleet=self.fleet,
            corridor=self.corridor,
            metrics=self.metrics,
            unix_clock=time.time,
            new_id=RequestIds(boot_id),
        )
        doors = Doors(surface, WorkersAiSurface(surface, self.corridor), self.upstream)
        server = Server(
            limits=limits_of(self.config),
            write_timeout_s=self.config.write_timeout_s,
            gate=doors.gate,
            handler=doors.answer,
            encode_error=doors.encode_error,
            deadlines=self.deadlines,
            clock=time.monotonic,
            unix_clock=time.time,
        )
        return surface, server

    def _dial(
        self, identity: Identity, boot_id: BootId, node_tls: ssl.SSLContext | None
    ) -> ControlLink:
        return ControlLink(
            urls=self.config.schedulers,
            identity=identity,
            boot_id=boot_id,
            incoming=ToRouter,
            progress=self.follower.progress,
            on_welcome=self.on_welcome,
            on_message=self.on_message,
            chance=random.Random(),  # noqa: S311 - jitter, not a secret
            folder=self.config.state_folder,
            contexts=() if node_tls is None else (node_tls,),
        )

    async def send(self, message: msgspec.Struct) -> bool:
        """Send one message up; False where nobody listens."""
        return await self.link.send(message)

    async def on_welcome(self, welcome: Welcome) -> None:
        """The scheduler took us."""
        await self.follower.on_welcome(welcome)
        self.shipper.on_welcome()

    async def on_message(self, message: Any) -> None:
        """Give what came down to whom it concerns."""
        if isinstance(message, RouteTable | RouteDelta):
            await self.follower.on_table(message, self.send)
        elif isinstance(message, UsageAck):
            await self.shipper.on_ack(message)
            self.workers.tell(message)

    async def share_prompts(self) -> None:
        """Tell the other processes which prompts were read where since the last turn."""
        rows = self.fleet.outbox.take()
        if rows and isinstance(self.link, ParentLink):
            await self.link.send(Prompts(rows))
        elif rows:
            self.workers.tell(Prompts(rows))

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
        if self.fleet.table is not None:
            self.workers.tell(self.fleet.table)

    async def set_gauges(self) -> None:
        """Say how things stand, for whoever reads the metrics."""
        metrics, fleet = self.metrics, self.fleet
        now_s = time.monotonic()
        if self.link.connected and self.follower.held is None and fleet.table is not None:
            fleet.confirmed_at_s = now_s
        metrics.connected.set(self.link.connected)
        metrics.table_age.set(now_s - fleet.confirmed_at_s if fleet.confirmed_at_s else 0)
        totals = fleet.in_flight.totals()
        metrics.in_flight.labels("prefill").set(totals.prefill_tokens)
        metrics.in_flight.labels("decode").set(totals.decode_tokens)
        metrics.open_requests.set(totals.requests)
        metrics.waiting.set(self.corridor.waiting.depth)
        metrics.waiting_bytes.set(self.corridor.waiting.bytes)
        metrics.ejected.set(len(fleet.health.ejected()))
        metrics.panics.set(fleet.panics())

    def _loops(self) -> dict[str, Loop]:
        config, jitter = self.config, random.Random()  # noqa: S311 - jitter, not a secret
        loops = [
            Loop("persist", self.follower.persist, 30.0),
            Loop("reconsider", self.follower.reconsider, RECONSIDER_INTERVAL_S),
            Loop("probe", self.prober.run_once, config.probe_interval_s, jitter=jitter),
            Loop("demand", self.shipper.ship_demand, config.demand_interval_s, jitter=jitter),
            Loop("usage", self.shipper.ship_usage, config.usage_interval_s, jitter=jitter),
            Loop("round_trips", self.shipper.ship_round_trips, ROUND_TRIPS_INTERVAL_S),
            Loop("gauges", self.set_gauges, GAUGES_INTERVAL_S),
            Loop("share", self.share_prompts, SHARE_INTERVAL_S),
        ]
        watchdog_s = watchdog_interval_s()
        if watchdog_s is not None:
            loops.append(Loop("watchdog", _alive, watchdog_s))
        return {loop.name: loop for loop in loops}


@asynccontextmanager
async def open_house(
    config: RouterConfig, identity: Identity, worker: Worker | None = None
) -> AsyncIterator[House]:
    """Run a router. On exit: stop accepting, finish what streams, put the ledger on disk."""
    try:
        parts = Parts(config, identity, worker)
        await asyncio.to_thread(config.state_folder.mkdir, 0o700, parents=True, exist_ok=True)
        await asyncio.to_thread(parts.spool.open)
    except OSError as error:
        raise ConfigError(
            f"cannot use the state folder {config.state_folder}: {error.strerror or error}"
        ) from error
    await parts.follower.load(time.time())
    async with AsyncExitStack() as stack:
        parts.deadlines.start()
        stack.callback(parts.deadlines.stop)
        stack.push_async_callback(parts.upstream.close)
        stack.push_async_callback(_put_away, parts)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        owned: list[asyncio.Task[Any]] = [
            tasks.create_task(loop.run(), name=name) for name, loop in parts.loops.items()
        ]
        if config.schedulers or worker is not None:
            owned.append(tasks.create_task(parts.link.run(), name="link"))
        for task in owned:
            stack.callback(task.cancel)
        try:
            port, private_port = await _open_doors(parts, stack)
        except OSError as error:
            raise ConfigError(f"cannot listen: {error.strerror or error}") from error
        owned.append(tasks.create_task(parts.workers.run(port), name="workers"))
        stack.callback(owned[-1].cancel)
        yield House(
            port,
            private_port,
            parts.fleet,
            parts.follower,
            parts.recorder,
            parts.metrics,
            parts.loops,
            parts.upstream,
            parts.stopping,
        )


async def _open_doors(parts: Parts, stack: AsyncExitStack) -> tuple[int, int]:
    config = parts.config
    app = cold_app(parts.surface, parts.fleet, parts.metrics, time.time)
    show_metrics = exposition(parts.metrics.registry)
    private_port = 0
    if config.private_host:
        private = web.Application()
        private.router.add_get("/metrics", show_metrics)
        private_port = await stack.enter_async_context(
            open_door(private, config.private_host, config.private_port)
        )
    else:
        app.router.add_get("/metrics", show_metrics)
    context = None
    if config.tls_certificate is not None and config.tls_key is not None:
        context = tls.server_context(config.tls_certificate, config.tls_key)
    await stack.enter_async_context(open_cold(app, parts.upstream))
    listener = await asyncio.get_running_loop().create_server(
        parts.server.connection,
        config.host,
        config.port,
        ssl=context,
        backlog=1024,
        reuse_port=config.processes > 1 or None,
    )
    stack.push_async_callback(parts.server.drain, config.drain_timeout_s)
    stack.callback(listener.close)
    return listener.sockets[0].getsockname()[1], private_port


def limits_of(config: RouterConfig) -> DoorLimits:
    """Return what the public listener lets in."""
    return DoorLimits(
        head_timeout_s=config.head_timeout_s,
        body_timeout_s=config.body_timeout_s,
        body_bytes_max=config.body_bytes_max,
        connections_max=config.connections_max,
        connections_per_address_max=config.connections_per_address_max,
        shutdown_timeout_s=config.drain_timeout_s,
    )


async def _put_away(parts: Parts) -> None:
    """Keep on disk what only memory holds: the usage and the table."""
    for keep in (parts.shipper.spool_usage, parts.follower.persist):
        try:
            await keep()
        except OSError as error:
            log.error("cannot put away what memory holds", extra={"fields": {"reason": str(error)}})


async def _alive() -> None:
    notify("WATCHDOG=1")

"""The request path without sockets: a loop with manual time, and transports held in memory."""

import asyncio
import time
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from isochrone.wire.ids import BootId, PopId
from isochrone.wire.peers.routes import RouteTable
from router.apis.dispatch import ApiDispatcher
from router.apis.media.routes import MediaRoutes
from router.apis.openai.surface import OpenAiSurface
from router.apis.request_ids import RequestIds
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.server import PublicServer
from router.dataplane.upstream import Upstream
from router.decide.admission.limits import KeyLimiter
from router.decide.admission.suspicion import SuspectTable
from router.fleet_state import FleetState
from router.pipeline import RequestPipeline
from router.poison_guard import PoisonGuard
from router.recording.metrics import Metrics
from router.recording.record import Recorder
from router.recording.usage_journal import UsageJournal
from router.scheduler_client import SchedulerClient
from router.stored_answers import compose_stored_answers

BUFFER_BYTES = 2_000


@types.coroutine
def one_iteration() -> Generator[None, None, None]:
    """Let one iteration of the loop pass."""
    yield


class FakeTransport(asyncio.Transport):
    """The router's end of one connection, in memory.

    `inbox` holds bytes of the other side that are not delivered yet, `outbox` what was written.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any) -> None:
        super().__init__()
        self.inbox = b""
        self.outbox = b""
        self.reads = True
        self.is_paused = False
        self.is_lost = False
        self._is_closing = False
        self._loop = loop
        self._protocol = protocol
        protocol.connection_made(self)

    def deliver(self, size: int) -> None:
        """Deliver up to `size` bytes of the inbox to the protocol."""
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            buffer = memoryview(self._protocol.get_buffer(size))
            size = min(size, len(buffer))
            data, self.inbox = self.inbox[:size], self.inbox[size:]
            buffer[: len(data)] = data
            if data:
                self._protocol.buffer_updated(len(data))
            return
        data, self.inbox = self.inbox[:size], self.inbox[size:]
        if data:
            self._protocol.data_received(data)

    @property
    def can_deliver(self) -> bool:
        return bool(self.inbox) and self.reads and not self._is_closing

    def read(self) -> None:
        """Let the other side read everything that was written."""
        self.outbox = b""
        if self.is_paused:
            self.is_paused = False
            self._protocol.resume_writing()
        if self._is_closing:
            self.abort()

    def leave(self, *, half_closes: bool) -> None:
        """Close the other side: half-close it if `half_closes`, else abort."""
        if not half_closes:
            self.abort()
        elif self.reads and not self._is_closing and not self._protocol.eof_received():
            self.close()

    # Called by the protocol.

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("10.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high

    def get_write_buffer_size(self) -> int:
        return len(self.outbox)

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: Any) -> None:
        if self._is_closing:
            return
        self.outbox += data
        if len(self.outbox) > BUFFER_BYTES and not self.is_paused:
            self.is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self._is_closing = True
        if not self.outbox:
            self.abort()

    def abort(self) -> None:
        self._is_closing = True
        if not self.is_lost:
            self.is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, None)


class ManualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time and whose dials the test controls.

    As in uvloop, a cancelled dial does not report a lost connection to a protocol that it opened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.dials: list[asyncio.Future[None]] = []
        self.errors: list[dict[str, Any]] = []
        self.nodes: list[FakeTransport] = []
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def time(self) -> float:
        return self.now_s

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        dial: asyncio.Future[None] = self.create_future()
        self.dials.append(dial)
        await dial
        transport = FakeTransport(self, factory())
        try:
            # The window in which the connection is open and `connect` has not returned.
            await self._iterate(4)
        except asyncio.CancelledError:
            transport.is_lost = True
            raise
        self.nodes.append(transport)
        return transport, None

    def settle(self, action: Callable[[], None] | None = None, iterations: int = 8) -> None:
        """Run `action` in a callback, and let some iterations of the loop pass."""
        if action is not None:
            self.call_soon(action)
        self.run_until_complete(self._iterate(iterations))

    async def _iterate(self, iterations: int) -> None:
        for _ in range(iterations):
            await one_iteration()


class RequestPath:
    """The router from its HTTP server to its connections to nodes, composed as in `app.py`."""

    def __init__(self, loop: ManualLoop, table: RouteTable, folder: Path) -> None:
        self.loop = loop
        config = RouterConfig(state_folder=folder)
        clock, metrics = loop.time, Metrics()
        self.fleet = FleetState(PopId("ams"), clock, "router-1")
        self.fleet.adopt(table)
        self.deadlines = Deadlines(clock)
        self.upstream = Upstream(config, self.deadlines, clock)
        self.limiter = KeyLimiter()
        self.journal = UsageJournal(folder, time.monotonic)
        self.recorder = Recorder(PopId("ams"), metrics, self.journal)
        self.pipeline = RequestPipeline(
            config=config,
            fleet=self.fleet,
            limiter=self.limiter,
            upstream=self.upstream,
            recorder=self.recorder,
            metrics=metrics,
            poison_guard=PoisonGuard(SuspectTable(b"key", 600.0), metrics, clock),
            clock=clock,
        )
        surface = OpenAiSurface(config, self.fleet, clock)
        ids = RequestIds(BootId("0"))
        parts = (surface, self.pipeline, self.upstream, ids, metrics)
        client = SchedulerClient(None)
        stored = compose_stored_answers(
            *(config, client, surface, self.pipeline.serve, metrics),
            charge=lambda key, size_bytes: self.server.bodies.charge_stored(key, size_bytes),
            keys=lambda: self.fleet.directory.keys,
            may_lease=lambda: True,
            request_ids=ids,
            is_main_process=True,
        )
        media = MediaRoutes(surface, self.pipeline, config.audio_relayed_bytes_max)
        dispatcher = ApiDispatcher(*parts, client, stored.routes, media)
        self.server = PublicServer(
            config=config,
            authorize=dispatcher.authorize,
            handler=dispatcher.dispatch,
            encode_error=dispatcher.encode_error,
            deadlines=self.deadlines,
            clock=clock,
            unix_clock=clock,
        )
        loop.settle(self.deadlines.start)

    def connect_client(self) -> FakeTransport:
        """Open a connection of a client."""
        return FakeTransport(self.loop, self.server.make_connection())

"""A relay without sockets or clocks: time that stands still, and ends that bytes wait at."""

import asyncio
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from isochrone.wire.ids import BootId, PopId
from isochrone.wire.routes import RouteTable
from router.apis.dispatch import ApiDispatcher
from router.apis.openai.surface import OpenAiSurface
from router.apis.request_ids import RequestIds
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.server import PublicServer
from router.dataplane.upstream import Upstream
from router.decide.limits import KeyLimiter
from router.fleet_state import FleetState
from router.metrics import Metrics
from router.pipeline import RequestPipeline
from router.record import Recorder
from router.usage_journal import UsageJournal

BUFFER_BYTES = 2_000


@types.coroutine
def a_turn() -> Generator[None, None, None]:
    """Let one turn of the loop pass."""
    yield


class End(asyncio.Transport):
    """The router's end of one connection. `inbox` came for it, `outbox` was written to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: Any) -> None:
        super().__init__()
        self.inbox = b""
        self.outbox = b""
        self.reads_on = True
        self.is_paused = False
        self.is_lost = False
        self._is_closing = False
        self._loop = loop
        self._protocol = protocol
        protocol.connection_made(self)

    def deliver(self, size: int) -> None:
        """Hand over some of what came, where it is read."""
        data, self.inbox = self.inbox[:size], self.inbox[size:]
        if data:
            self._protocol.data_received(data)

    @property
    def can_deliver(self) -> bool:
        return bool(self.inbox) and self.reads_on and not self._is_closing

    def read(self) -> None:
        """The other side reads everything."""
        self.outbox = b""
        if self.is_paused:
            self.is_paused = False
            self._protocol.resume_writing()
        if self._is_closing:
            self.abort()

    def leave(self, *, politely: bool) -> None:
        """The other side goes."""
        if not politely:
            self.abort()
        elif self.reads_on and not self._is_closing and not self._protocol.eof_received():
            self.close()

    # What the protocol does.

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
        self.reads_on = False

    def resume_reading(self) -> None:
        self.reads_on = True

    def close(self) -> None:
        self._is_closing = True
        if not self.outbox:
            self.abort()

    def abort(self) -> None:
        self._is_closing = True
        if not self.is_lost:
            self.is_lost = True
            self._loop.call_soon(self._protocol.connection_lost, None)


class StillLoop(asyncio.SelectorEventLoop):
    """Time passes when told to, and who dials waits until it is answered.

    As in uvloop, a dial given up ends without a word to a protocol that was told of a beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.dials: list[asyncio.Future[None]] = []
        self.wrong: list[dict[str, Any]] = []
        self.nodes: list[End] = []
        self.set_exception_handler(lambda _, context: self.wrong.append(context))

    def time(self) -> float:
        return self.now_s

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        dial: asyncio.Future[None] = self.create_future()
        self.dials.append(dial)
        await dial
        end = End(self, factory())
        try:
            # Between what is made and who asked for it.
            await self._turns(4)
        except asyncio.CancelledError:
            end.is_lost = True
            raise
        self.nodes.append(end)
        return end, None

    def settle(self, act: Callable[[], None] | None = None, turns: int = 8) -> None:
        """Do something in a callback, and let some turns pass."""
        if act is not None:
            self.call_soon(act)
        self.run_until_complete(self._turns(turns))

    async def _turns(self, turns: int) -> None:
        for _ in range(turns):
            await a_turn()


class Relay:
    """The router from its listener to its nodes' connections, as `app.py` ties it."""

    def __init__(self, loop: StillLoop, table: RouteTable, folder: Path) -> None:
        self.loop = loop
        config = RouterConfig(state_folder=folder)
        clock, metrics = loop.time, Metrics()
        self.fleet = FleetState(PopId("ams"), clock, "router-1")
        self.fleet.adopt(table)
        self.deadlines = Deadlines(clock)
        self.upstream = Upstream(config, self.deadlines, clock)
        self.gate = KeyLimiter()
        self.journal = UsageJournal(folder)
        self.recorder = Recorder(PopId("ams"), metrics, self.journal)
        self.pipeline = RequestPipeline(
            config=config,
            fleet=self.fleet,
            gate=self.gate,
            upstream=self.upstream,
            recorder=self.recorder,
            metrics=metrics,
            clock=clock,
        )
        surface = OpenAiSurface(config, self.fleet, clock)
        ids = RequestIds(BootId("0"))
        dispatcher = ApiDispatcher(surface, self.pipeline, self.upstream, ids, metrics)
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

    def client(self) -> End:
        """Let a client connect."""
        return End(self.loop, self.server.make_connection())

"""Run a router as several processes behind one port, each worker led by the main process.

The main process holds the connection to the scheduler. Over a socket pair it sends the route table
and its changes to the workers, and receives their demand and usage, which it forwards unchanged.
Each process tells the others once a second which prompts were read where (prompt_sharing.py), and
which requests are suspected of making engines fail (suspicion_sharing.py). Other state is not
shared: each worker has its own limits, fleet state, connections and usage journal. The kernel
spreads connections over the processes (SO_REUSEPORT). A worker that ends or hangs is replaced.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.client_keys.key_use import FleetKeyUse
from isochrone.wire.peers.routes import RouteDelta, RouteTable, RouteTablePart, diff
from isochrone.wire.peers.table_parts import split_table
from isochrone.wire.peers.usage import Demand, Usage, UsageAck
from router.config import RouterConfig
from router.scheduler_client import SchedulerAccess
from router.sharing.key_use_sharing import OwnKeyUse
from router.sharing.prompt_sharing import SharedPrompts
from router.sharing.suspicion_sharing import SharedSuspicions

log = logging.getLogger(__name__)

LENGTH_PREFIX_BYTES: Final = 4
RESTART_PAUSE_S: Final = 1.0
WORKER_ENV: Final = "ISOCHRONE_WORKER"
"""Number, inherited descriptor and port of a worker: `1:7:8080`."""

UNREAD_BYTES_MAX: Final = 4 * 1024 * 1024
"""A process that is this far behind with reading gets no more messages."""

DELTA_BYTES_MAX: Final = 512 * 1024
"""A worker is sent a larger change as a whole table, in parts."""

SILENCE_S: Final = 15.0
"""A worker that sends nothing for twice this long is replaced. It hangs, but keeps its share of the
port's connections, and systemd watches only the main process."""

Shared = SharedPrompts | SharedSuspicions
"""Messages from any process to all others."""

ToAllWorkers = UsageAck | SchedulerAccess | FleetKeyUse | Shared

_FROM_WORKER: Final = codec.decoder(Demand | Usage | OwnKeyUse | Shared)
_FROM_MAIN: Final = codec.decoder(
    RouteTablePart | RouteDelta | UsageAck | SchedulerAccess | FleetKeyUse | Shared
)

Send = Callable[[msgspec.Struct], Awaitable[bool]]


class WorkerIdentity(NamedTuple):
    """The identity of a worker process: its number, its end of the socket pair, the port."""

    number: int
    end: socket.socket
    port: int


def parse_worker_identity(text: str) -> WorkerIdentity | None:
    """Parse the value of WORKER_ENV; return None if it is empty, as in the main process."""
    if not text:
        return None
    number, descriptor, port = (int(part) for part in text.split(":"))
    return WorkerIdentity(number, socket.socket(fileno=descriptor), port)


def worker_config(worker: WorkerIdentity, config: RouterConfig) -> RouterConfig:
    """Return a worker's settings: no scheduler, and a state folder of its own."""
    return msgspec.structs.replace(
        config,
        state_folder=config.state_folder / f"worker-{worker.number}",
        schedulers=(),
        port=worker.port,
        private_host="",
        private_port=0,
    )


class WorkerPipe:
    """Length-prefixed messages over one end of a socket pair."""

    def __init__(self, end: socket.socket, decoder: Any) -> None:
        """Read messages with `decoder`, a typed msgspec decoder."""
        self._end = end
        self._decoder = decoder
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._table_lock = asyncio.Lock()

    async def open(self) -> None:
        """Attach the socket to the running event loop."""
        self._streams = await asyncio.open_connection(sock=self._end)

    async def read(self) -> Any:
        """Return the next message, None at the end."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            size = int.from_bytes(await reader.readexactly(LENGTH_PREFIX_BYTES), "big")
            return codec.decode(await reader.readexactly(size), self._decoder)
        except (asyncio.IncompleteReadError, ConnectionError, codec.MalformedFrame):
            return None

    def write(self, message: msgspec.Struct) -> bool:
        """Send one message; return False if the other end is gone or too far behind."""
        if self._streams is None:
            return False
        transport = self._streams[1].transport
        if transport.is_closing() or transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            return False
        self._write_frame(transport, codec.encode(message))
        return True

    async def write_table(self, table: RouteTable, former: RouteTable | None) -> bool:
        """Send the change from the `former` table, or the whole in parts, each when the other end
        has read enough. Return False if it is gone.
        """
        if self._streams is None:
            return False
        writer = self._streams[1]
        # The parts of two tables must not be mixed.
        async with self._table_lock:
            try:
                for frame in _table_frames(table, former):
                    if writer.transport.is_closing():
                        return False
                    self._write_frame(writer.transport, frame)
                    await writer.drain()
                    # Drain returns at once while the buffer is small; requests get a turn here.
                    await asyncio.sleep(0)
            except ConnectionError:
                return False
        return True

    @staticmethod
    def _write_frame(transport: asyncio.WriteTransport, frame: bytes) -> None:
        transport.write(len(frame).to_bytes(LENGTH_PREFIX_BYTES, "big") + frame)

    def close(self) -> None:
        """Close this end."""
        if self._streams is None:
            self._end.close()
        else:
            self._streams[1].close()


@dataclass(eq=False)
class WorkerPool:
    """The main process's side: keeps `count` workers running that serve `table()`.

    It forwards their reports with `send`. Messages that a worker shares go to `learn` and to the
    other workers. A worker has `end_timeout_s` to finish its requests when it is stopped.
    """

    count: int
    send: Send
    table: Callable[[], RouteTable | None]
    learn: Callable[[Shared | OwnKeyUse], None]
    end_timeout_s: float
    _sent_tables: dict[WorkerPipe, RouteTable | None] = field(default_factory=dict, init=False)
    """The pipe to each worker, with the last table that it was sent."""

    async def run(self, port: int) -> None:
        """Keep the workers running on `port` until cancelled, then end them."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, self.count + 1):
                tasks.create_task(self._keep_running(number, port), name=f"worker-{number}")

    async def send_table(self) -> int:
        """Send the table in use to the workers that have another; return how many took it."""
        table = self.table()
        if table is None:
            return 0
        behind = {pipe: sent for pipe, sent in self._sent_tables.items() if sent is not table}
        for pipe in behind:
            self._sent_tables[pipe] = table
        taken = await asyncio.gather(
            *(pipe.write_table(table, former) for pipe, former in behind.items())
        )
        for pipe, is_taken in zip(behind, taken, strict=True):
            if not is_taken and self._sent_tables.get(pipe) is table:
                self._sent_tables[pipe] = None
        return sum(taken)

    def broadcast(self, message: ToAllWorkers, sender: WorkerPipe | None = None) -> None:
        """Send `message` to every worker except its sender. Workers that are behind miss it."""
        for pipe in self._sent_tables:
            if pipe is not sender:
                pipe.write(message)

    async def _keep_running(self, number: int, port: int) -> None:
        while True:
            fields: dict[str, object] = {"worker": number}
            try:
                fields["code"] = await self._run_worker(number, port)
            except OSError as error:
                # Too little memory or too few descriptors to start a process.
                fields["reason"] = error.strerror
            log.error("worker ended", extra={"fields": fields})
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _run_worker(self, number: int, port: int) -> int | None:
        """Run one worker until it ends; return its exit code."""
        main_end, worker_end = socket.socketpair()
        pipe = WorkerPipe(main_end, _FROM_WORKER)
        try:
            with worker_end:
                environment = {**os.environ, WORKER_ENV: f"{number}:{worker_end.fileno()}:{port}"}
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "router", *sys.argv[1:]),
                    env=environment,
                    pass_fds=(worker_end.fileno(),),
                )
            try:
                await self._forward_messages(pipe)
            finally:
                await self._stop(process)
        finally:
            pipe.close()
        return process.returncode

    async def _forward_messages(self, pipe: WorkerPipe) -> None:
        """Forward a worker's messages until it ends or hangs."""
        await pipe.open()
        self._sent_tables[pipe] = None
        try:
            await self.send_table()
            while (message := await _next_message(pipe)) is not None:
                if isinstance(message, OwnKeyUse):
                    # The other processes have shares of their own.
                    self.learn(message)
                elif not isinstance(message, Shared):
                    # Reports that are not forwarded are not acknowledged: the worker resends them.
                    await self.send(message)
                elif not isinstance(message, SharedPrompts) or message.rows:
                    self.learn(message)
                    self.broadcast(message, sender=pipe)
        finally:
            del self._sent_tables[pipe]

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """Ask a worker to end, and kill it after the timeout."""
        try:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.end_timeout_s):
                    await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _table_frames(table: RouteTable, former: RouteTable | None) -> Iterator[bytes]:
    """Return the message for a worker that has the `former` table: its change, or all parts."""
    if former is not None:
        delta = codec.encode(diff(former, table))
        if len(delta) <= DELTA_BYTES_MAX:
            return iter((delta,))
    return split_table(table)


async def _next_message(pipe: WorkerPipe) -> Any:
    """Return a worker's next message; None if it ended, or hangs.

    Each worker sends something every second. Two timeouts are needed, because an event loop that
    was held up runs its timers before it reads what has arrived.
    """
    # One read for both waits: cancelling it could lose half of a frame.
    reading = asyncio.ensure_future(pipe.read())
    try:
        for _ in range(2):
            await asyncio.wait((reading,), timeout=SILENCE_S)
            if reading.done():
                return reading.result()
        return None
    finally:
        reading.cancel()


class ParentLink:
    """A worker's connection to the main process, used in place of one to a scheduler."""

    def __init__(
        self, end: socket.socket, on_message: Callable[[Any], Awaitable[None]], ended: asyncio.Event
    ) -> None:
        """Pass messages to `on_message`; set `ended` when the main process is gone."""
        self.connected = True
        self._got_message = asyncio.Event()
        self._pipe = WorkerPipe(end, _FROM_MAIN)
        self._on_message = on_message
        self._ended = ended

    async def run(self) -> None:
        """Read messages until the main process ends, then end this worker too."""
        await self._pipe.open()
        try:
            while (message := await self._pipe.read()) is not None:
                await self._on_message(message)
                if not isinstance(message, RouteTablePart) or message.is_last:
                    self._got_message.set()
            self.connected = False
            self._ended.set()
        finally:
            self._pipe.close()

    async def wait_for_message(self, timeout_s: float) -> None:
        """Return after the first message, or after `timeout_s`: there may be no table yet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._got_message.wait()

    async def send(self, message: msgspec.Struct) -> bool:
        """Send the messages that the main process forwards. It measures round trips itself."""
        if isinstance(message, Demand | Usage | OwnKeyUse | Shared):
            return self._pipe.write(message)
        return False

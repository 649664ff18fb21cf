"""Several processes behind one port: a worker is a router whose scheduler is the main process.

The main process holds the conversation with the scheduler. Down a pair of sockets it passes each
table it serves by, and up it takes demand and usage, as they are, to send them on. Which prompts
were read where, each tells all others once a second. Nothing else is shared: each worker has
limits, beliefs and connections of its own, and a journal of its own that its next life finds. The
kernel spreads connections over all of them (SO_REUSEPORT). A worker that ends or hangs is replaced.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.routes import RouteTable
from isochrone.wire.usage import Demand, Usage, UsageAck
from router.config import RouterConfig
from router.prompt_sharing import SharedPrompt, SharedPrompts

log = logging.getLogger(__name__)

LENGTH_PREFIX_BYTES: Final = 4
RESTART_PAUSE_S: Final = 1.0
WORKER_ENV: Final = "ISOCHRONE_WORKER"
"""Number, inherited descriptor and port of a worker: `1:7:8080`."""

UNREAD_BYTES_MAX: Final = 4 * 1024 * 1024
"""Who has this much not read yet is told no more."""

SILENCE_S: Final = 15.0
"""A worker that hangs would keep its share of the port's connections: systemd sees the main one."""

_FROM_WORKER: Final = codec.decoder(Demand | Usage | SharedPrompts)
_FROM_MAIN: Final = codec.decoder(RouteTable | UsageAck | SharedPrompts)

Send = Callable[[msgspec.Struct], Awaitable[bool]]


class WorkerIdentity(NamedTuple):
    """What makes this process one of several: its number, its end of the pipe, the port."""

    number: int
    end: socket.socket
    port: int


def parse_worker_identity(text: str) -> WorkerIdentity | None:
    """Read what the main process says to a worker; None in the main process itself."""
    if not text:
        return None
    number, descriptor, port = (int(part) for part in text.split(":"))
    return WorkerIdentity(number, socket.socket(fileno=descriptor), port)


def worker_config(worker: WorkerIdentity, config: RouterConfig) -> RouterConfig:
    """Return by what a worker runs: led by the main process, in a folder of its own."""
    return msgspec.structs.replace(
        config,
        state_folder=config.state_folder / f"worker-{worker.number}",
        schedulers=(),
        port=worker.port,
        private_host="",
    )


class WorkerPipe:
    """Frames over one end of a pair of sockets, each behind its size."""

    def __init__(self, end: socket.socket, reader: Any) -> None:
        """Read messages by `reader`, a typed decoder."""
        self._end = end
        self._decoder = reader
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def open(self) -> None:
        """Begin to use it, in the running loop."""
        self._streams = await asyncio.open_connection(sock=self._end)

    async def read(self) -> Any:
        """Return the next message; None at the end."""
        assert self._streams is not None
        reader = self._streams[0]
        try:
            size = int.from_bytes(await reader.readexactly(LENGTH_PREFIX_BYTES), "big")
            return codec.decode(await reader.readexactly(size), self._decoder)
        except (asyncio.IncompleteReadError, ConnectionError, codec.MalformedFrame):
            return None

    def write(self, message: msgspec.Struct) -> bool:
        """Send one message; False where the other end is gone, or has too much not read yet."""
        if self._streams is None:
            return False
        transport = self._streams[1].transport
        if transport.is_closing() or transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            return False
        frame = codec.encode(message)
        transport.write(len(frame).to_bytes(LENGTH_PREFIX_BYTES, "big") + frame)
        return True

    def close(self) -> None:
        """Let go of it."""
        if self._streams is None:
            self._end.close()
        else:
            self._streams[1].close()


class WorkerPool:
    """The main process's side: as many workers as it should have, each started again if it ends."""

    def __init__(
        self,
        count: int,
        send: Send,
        table: Callable[[], RouteTable | None],
        learn: Callable[[Iterable[SharedPrompt]], None],
        end_timeout_s: float,
    ) -> None:
        """Keep `count` workers; `send` passes on what they tell, `table` is what they serve by.

        What one tells of prompts goes to `learn`, and to all others. One that is to end is given
        `end_timeout_s` for what it still does.
        """
        self._learn = learn
        self._count = count
        self._send = send
        self._table = table
        self._end_timeout_s = end_timeout_s
        self._pipes: dict[WorkerPipe, RouteTable | None] = {}
        """To each worker, with the table it was told last."""

    async def run(self, port: int) -> None:
        """Keep them running, on `port`, until cancelled; then end them."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(1, self._count + 1):
                tasks.create_task(self._keep(number, port), name=f"worker-{number}")

    async def lead(self) -> int:
        """Tell the table served by to whoever was told another; return how many took it."""
        table, led = self._table(), 0
        for pipe, told in self._pipes.items():
            if table is not None and told is not table and pipe.write(table):
                self._pipes[pipe] = table
                led += 1
        return led

    def tell(self, message: UsageAck | SharedPrompts, but: WorkerPipe | None = None) -> None:
        """Pass down to all of them, `but` to whom it is from, what who is behind can do without."""
        for pipe in self._pipes:
            if pipe is not but:
                pipe.write(message)

    async def _keep(self, number: int, port: int) -> None:
        while True:
            fields: dict[str, object] = {"worker": number}
            try:
                fields["code"] = await self._live(number, port)
            except OSError as error:
                # Too little memory or too few descriptors, as when the last one was killed for it.
                fields["reason"] = error.strerror
            log.error("worker ended", extra={"fields": fields})
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _live(self, number: int, port: int) -> int | None:
        """Run one worker to its end; return its exit code."""
        ours, theirs = socket.socketpair()
        pipe = WorkerPipe(ours, _FROM_WORKER)
        try:
            with theirs:
                environment = {**os.environ, WORKER_ENV: f"{number}:{theirs.fileno()}:{port}"}
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "router", *sys.argv[1:]),
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                )
            try:
                await self._listen(pipe)
            finally:
                await self._end(process)
        finally:
            pipe.close()
        return process.returncode

    async def _listen(self, pipe: WorkerPipe) -> None:
        """Pass on what a worker tells, until it ends or hangs."""
        await pipe.open()
        self._pipes[pipe] = None
        try:
            await self.lead()
            while (message := await _next_message(pipe)) is not None:
                if not isinstance(message, SharedPrompts):
                    # Usage not passed on is not acknowledged: the worker sends it again.
                    await self._send(message)
                elif message.rows:
                    self._learn(message.rows)
                    self.tell(message, but=pipe)
        finally:
            del self._pipes[pipe]

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """See a worker off: asked to end, and killed where it does not."""
        try:
            with suppress(ProcessLookupError):
                process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._end_timeout_s):
                    await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _next_message(pipe: WorkerPipe) -> Any:
    """Return what a worker says next; None where it ended, or hangs: each says something a second.

    It may be silent twice: a loop that was held up runs its timers before it reads what came.
    """
    # One reading, however often it is looked at: half a frame read is lost with who read it.
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
    """A worker's side: what it has in place of the conversation with a scheduler."""

    def __init__(
        self, end: socket.socket, on_message: Callable[[Any], Awaitable[None]], ended: asyncio.Event
    ) -> None:
        """Give what comes down to `on_message`; set `ended` when the main process is gone."""
        self.connected = True
        self._told = asyncio.Event()
        self._pipe = WorkerPipe(end, _FROM_MAIN)
        self._on_message = on_message
        self._ended = ended

    async def run(self) -> None:
        """Listen to the main process until it ends: then end too, for nobody leads."""
        await self._pipe.open()
        try:
            while (message := await self._pipe.read()) is not None:
                await self._on_message(message)
                self._told.set()
            self.connected = False
            self._ended.set()
        finally:
            self._pipe.close()

    async def until_told(self, timeout_s: float) -> None:
        """Return when something came down, or after `timeout_s`: it may have nothing to tell."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._told.wait()

    async def send(self, message: msgspec.Struct) -> bool:
        """Send what is the main process's to pass on; round trips are its own to measure."""
        if isinstance(message, Demand | Usage | SharedPrompts):
            return self._pipe.write(message)
        return False

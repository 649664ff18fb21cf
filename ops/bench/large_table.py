"""Send one router a route table with very many keys, and print what that costs.

    python -m ops.bench.large_table [--keys N] [--single-frame]

A stand-in scheduler on loopback sends the table, then a delta of one key. The router runs in a
process of its own with its real control link, table follower and loops. `--single-frame` sends the
table as releases before table parts did: above 16 MiB it never arrives. A stall is the lateness of
a task of the router's event loop that sleeps 2 ms again and again.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from aiohttp import web

from isochrone.service.event_loop_lag import call_location
from isochrone.service.http_server import serve_http
from isochrone.service.identity import Authority, Identity, make_csr, new_key_pem
from isochrone.wire import codec
from isochrone.wire.control import Challenge, PeerRole, Welcome
from isochrone.wire.ids import ClusterId, Epoch, Generation, KeyId, PopId, TenantId
from isochrone.wire.routes import KeyEntry, KeyLimits, KeyTable, RouteDelta, RouteTable
from isochrone.wire.table_parts import split_table
from router.app import RouterApp, open_router
from router.config import RouterConfig

CLUSTER: Final = ClusterId("c-bench")
TICK_S: Final = 0.002
SAMPLE_S: Final = 0.003
SAMPLED_AFTER_S: Final = 0.008
"""A tick that takes longer is sampled."""

TIMEOUT_S: Final = 60.0
GIVE_UP_S: Final = 15.0
"""A table that did not arrive by then, and after several connections, never does."""


class Stall(NamedTuple):
    """A stall in ms, and of it: the thread's CPU time, its wait for a processor, and collections.

    What is left is waiting for another thread that holds the interpreter's lock, or for the kernel.
    """

    ms: float = 0.0
    cpu_ms: float = 0.0
    queued_ms: float = 0.0
    gc_ms: float = 0.0


class BusyStall(NamedTuple):
    """The CPU time of the event loop between two ticks in ms, that of collections within it, and
    the code location that was sampled most meanwhile."""

    cpu_ms: float = 0.0
    gc_ms: float = 0.0
    location: str = ""


class RouterFigures(msgspec.Struct):
    """Figures that the router's process observed."""

    keys: int
    table_s: float
    delta_s: float
    table_stall: Stall
    delta_stall: Stall
    persist_stall: Stall
    memory_mib: float
    peak_mib: float


def make_table(keys: int) -> RouteTable:
    """Return a table with so many keys of 1,000 tenants."""
    limits = [KeyLimits(requests_per_min=600 + n, tokens_per_min=1_000_000) for n in range(10)]
    return RouteTable(
        cluster_id=CLUSTER,
        generation=Generation(1),
        epoch=Epoch(1),
        keys=KeyTable.of(make_key(n, limits[n % 10]) for n in range(keys)),
    )


def make_key(number: int, limits: KeyLimits) -> KeyEntry:
    """Return the entry of one key."""
    return KeyEntry(
        key_id=KeyId(f"{number:012d}"),
        secret_sha256=f"{number:064x}",
        tenant_id=TenantId(f"tenant-{number % 1000}"),
        limits=limits,
    )


def new_identity(folder: Path) -> Identity:
    """Return a router's identity from an authority of its own."""
    now = datetime.now(UTC)
    authority = Authority.create(folder / "authority", "bench", now)
    key_pem = new_key_pem()
    pop = PopId("ams")
    certificate_pem = authority.issue(
        make_csr(key_pem, "router-1"), role=PeerRole.ROUTER, name="router-1", pop=pop, now=now
    )
    return Identity(
        name="router-1",
        role=PeerRole.ROUTER,
        pop=pop,
        cluster_id=CLUSTER,
        key_pem=key_pem,
        certificate_pem=certificate_pem,
        ca_pem=authority.ca_pem,
    )


class TableSender:
    """The control endpoint of a scheduler that has one table."""

    def __init__(self, table: RouteTable, *, is_single_frame: bool) -> None:
        """Send the table as one frame, or in parts."""
        self._table = table
        self._is_single_frame = is_single_frame
        self._frames: list[bytes] = []
        self.connections = 0
        self.encode_s = 0.0
        self.delta = asyncio.Event()

    @property
    def bytes(self) -> int:
        """Return the size of what a router is sent."""
        return sum(map(len, self._frames))

    def encode(self) -> None:
        """Encode the table."""
        began = time.monotonic()
        if self._is_single_frame:
            self._frames = [codec.encode(self._table)]
        else:
            self._frames = list(split_table(self._table))
        self.encode_s = time.monotonic() - began

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Register a router, send it the table and, on request, a delta of one key."""
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        challenge = Challenge(protocol=codec.PROTOCOL, cluster_id=CLUSTER, nonce=b"n" * 32)
        await socket.send_bytes(codec.encode(challenge))
        await socket.receive()
        self.connections += 1
        await socket.send_bytes(codec.encode(Welcome(cluster_id=CLUSTER, epoch=Epoch(1))))
        reading = asyncio.ensure_future(read_all(socket))
        with suppress(ConnectionError):
            for frame in self._frames:
                await socket.send_bytes(frame)
            await self.delta.wait()
            key = make_key(len(self._table.keys), KeyLimits())
            delta = RouteDelta(
                cluster_id=CLUSTER,
                base=Generation(1),
                generation=Generation(2),
                epoch=Epoch(1),
                keys_set=(key,),
            )
            await socket.send_bytes(codec.encode(delta))
            await reading
        reading.cancel()
        return socket


async def read_all(socket: web.WebSocketResponse) -> None:
    """Ignore what the router sends."""
    async for _ in socket:
        pass


class StallWatch:
    """Records the longest stall of the event loop since the last reading.

    The CPU time of the loop's thread between two ticks is caused by the process itself; the rest is
    waiting for a processor or for another thread.
    """

    def __init__(self) -> None:
        self._longest = Stall()
        self._busiest = BusyStall()
        self._gc_s = self._gc_began_s = 0.0
        self._began_s = float("inf")
        self._seen: Counter[str] = Counter()
        self._ended = threading.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        gc.callbacks.append(self._note_collection)
        schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        arguments = (threading.get_ident(),)
        threading.Thread(target=self._sample, args=arguments, daemon=True).start()
        try:
            while True:
                began = time.monotonic(), time.thread_time(), _queued_s(schedstat), self._gc_s
                self._began_s = began[0]
                await asyncio.sleep(TICK_S)
                self._began_s = float("inf")
                ended = time.monotonic(), time.thread_time(), _queued_s(schedstat), self._gc_s
                took = [1000 * (end - start) for start, end in zip(began, ended, strict=True)]
                stall = Stall(took[0] - 1000 * TICK_S, *took[1:])
                self._longest = max(self._longest, stall)
                seen, self._seen = self._seen, Counter()
                if stall.cpu_ms > self._busiest.cpu_ms:
                    location = seen.most_common(1)[0][0] if seen else ""
                    self._busiest = BusyStall(stall.cpu_ms, stall.gc_ms, location)
        finally:
            self._ended.set()
            os.close(schedstat)
            gc.callbacks.remove(self._note_collection)

    def _sample(self, loop_thread: int) -> None:
        """Note in a thread what the event loop is in the middle of, while it stalls."""
        while not self._ended.wait(SAMPLE_S):
            if time.monotonic() - self._began_s > SAMPLED_AFTER_S:
                frame = sys._current_frames().get(loop_thread)
                if frame is not None:
                    self._seen[call_location(frame)] += 1
                del frame

    def take(self) -> Stall:
        """Return the longest stall since the last call."""
        longest, self._longest = self._longest, Stall()
        return longest

    def take_ms(self) -> float:
        """Return the longest stall in ms since the last call."""
        return self.take().ms

    def take_busiest(self) -> "BusyStall":
        """Return the stall with the most CPU time since the last call."""
        busiest, self._busiest = self._busiest, BusyStall()
        return busiest

    def _note_collection(self, phase: str, info: object) -> None:
        if phase == "start":
            self._gc_began_s = time.thread_time()
        else:
            self._gc_s += time.thread_time() - self._gc_began_s


def _queued_s(schedstat: int) -> float:
    """Return for how long the thread has waited for a processor."""
    return int(os.pread(schedstat, 100, 0).split()[1]) / 1e9


async def run_router(
    folder: Path, identity: Identity, port: int, ask_for_delta: Callable[[], None]
) -> RouterFigures:
    """Run a router until it has the table and the delta; measure."""
    config = RouterConfig(
        state_folder=folder / "state",
        schedulers=(f"http://127.0.0.1:{port}",),
        host="127.0.0.1",
        port=0,
        private_host="127.0.0.1",
        private_port=0,
    )
    watch = StallWatch()
    async with open_router(config, identity) as app:
        watching = asyncio.create_task(watch.run())
        before_mib = resident_mib()
        began = time.monotonic()
        watch.take_ms()
        await until_generation(app, 1)
        table_s, table_stall = time.monotonic() - began, watch.take()
        await app.loops["persist"].wait_turns(1)
        await asyncio.sleep(0.1)
        persist_stall = watch.take()
        memory_mib = resident_mib() - before_mib
        began = time.monotonic()
        ask_for_delta()
        await until_generation(app, 2)
        delta_s = time.monotonic() - began
        await asyncio.sleep(0.1)
        figures = RouterFigures(
            keys=len(app.fleet.directory.keys),
            table_s=table_s,
            delta_s=delta_s,
            table_stall=table_stall,
            delta_stall=watch.take(),
            persist_stall=persist_stall,
            memory_mib=memory_mib,
            peak_mib=peak_mib(),
        )
        watching.cancel()
    return figures


async def until_generation(app: RouterApp, generation: int) -> None:
    """Wait for a generation of the route table."""
    while app.follower.progress().generation != generation:  # noqa: ASYNC110 - no hook needed
        await asyncio.sleep(TICK_S)


def resident_mib() -> float:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def peak_mib() -> float:
    """Return the most memory that this process ever had; getrusage includes its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def router_process(folder: Path, identity: Identity, port: int, pipe: object) -> None:
    """Run a router in this process; send the figures through `pipe`."""
    send = pipe.send  # type: ignore[attr-defined]
    send(asyncio.run(run_router(folder, identity, port, lambda: send("delta"))))


@asynccontextmanager
async def a_sender(
    table: RouteTable, *, is_single_frame: bool
) -> AsyncIterator[tuple[TableSender, int]]:
    """Serve a table on a free port."""
    sender = TableSender(table, is_single_frame=is_single_frame)
    sender.encode()
    app = web.Application()
    app.router.add_get("/v1/router", sender.serve)
    async with serve_http(app, "127.0.0.1", 0) as port:
        yield sender, port


async def measure(keys: int, *, is_single_frame: bool) -> None:
    """Run the benchmark and print its figures."""
    table = make_table(keys)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with a_sender(table, is_single_frame=is_single_frame) as (sender, port):
            print(
                f"{keys} keys: {sender.bytes / 2**20:.0f} MiB, encoded in {sender.encode_s:.2f} s"
            )
            arguments = (folder, new_identity(folder), port, theirs)
            process = context.Process(target=router_process, args=arguments, daemon=True)
            process.start()
            try:
                await report(ours, sender, is_single_frame=is_single_frame)
            finally:
                process.kill()
                process.join()


async def report(pipe: object, sender: TableSender, *, is_single_frame: bool) -> None:
    """Print the router's figures, or that the table does not arrive."""
    receive = pipe.recv  # type: ignore[attr-defined]
    poll = pipe.poll  # type: ignore[attr-defined]
    timeout_s = GIVE_UP_S if is_single_frame else TIMEOUT_S
    if not await asyncio.to_thread(poll, timeout_s):
        print(f"no table after {timeout_s:.0f} s and {sender.connections} connections")
        return
    assert await asyncio.to_thread(receive) == "delta"
    sender.delta.set()
    figures: RouterFigures = await asyncio.to_thread(receive)
    print(
        f"router: {figures.keys} keys, table in {figures.table_s:.2f} s, "
        f"delta of one key in {1000 * figures.delta_s:.0f} ms, memory +{figures.memory_mib:.0f} MiB"
        f" (peak of the process {figures.peak_mib:.0f} MiB)"
    )
    print("longest stall, of it: CPU / waiting for a processor / garbage collection (CPU)")
    for name, stall in (
        ("with the table", figures.table_stall),
        ("while it is written to disk", figures.persist_stall),
        ("with the delta", figures.delta_stall),
    ):
        parts = f"{stall.cpu_ms:.0f} / {stall.queued_ms:.0f} / {stall.gc_ms:.0f} ms"
        print(f"  {name}: {stall.ms:.0f} ms, {parts}")
    print(f"{sender.connections} connections")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--single-frame", action="store_true")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.keys, is_single_frame=arguments.single_frame))


if __name__ == "__main__":
    main()

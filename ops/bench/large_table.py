"""Send one router a route table with very many keys, and print what that costs.

    python -m ops.bench.large_table [--keys N] [--single-frame]
    python -m ops.bench.large_table --keys 10000 --replicas 10000 --for 60
    python -m ops.bench.large_table --keys 10000 --replicas 9400 --for 4 --returning

A stand-in scheduler on loopback sends the table, then a delta of one key. The router runs in a
process of its own with its real control link, table follower and loops. `--single-frame` sends the
table as releases before table parts did: above 16 MiB it never arrives. A stall is the lateness of
a task of the router's event loop that sleeps 2 ms again and again.

With `--replicas`, the table also has so many replicas, on half as many nodes, whose names do not
exist, of 1,000 deployments. The router probes them in vain for a while (`--for`). Then the
scheduler ends the connection, and the next one sends the table of another term, which lacks every
third replica. With `--returning`, that table has few replicas, and the others come back a few at a
time, as when a scheduler hears its nodes one after another. A router that runs for less than 15 s
(`--for 4`) refuses such a table, as one does whose nodes answer.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import uvloop
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.service.network.name_lookup import ServiceLoop
from isochrone.service.trust.identity import Authority, Identity, make_csr, new_key_pem
from isochrone.wire import codec
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
    TenantId,
)
from isochrone.wire.peers.control import Challenge, PeerRole, Welcome
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    KeyEntry,
    KeyLimits,
    KeyTable,
    Route,
    RouteDelta,
    RouteTable,
)
from isochrone.wire.peers.table_parts import split_table
from ops.bench.stall_watch import TICK_S, BusyStall, Stall, StallWatch, peak_mib, resident_mib
from router.app import RouterApp, open_router
from router.config import RouterConfig

CLUSTER: Final = ClusterId("c-bench")
DEPLOYMENTS: Final = 1_000
POPS: Final = 190
AFTER_FAILOVER_S: Final = 5.0
RETURNED_AT_FIRST: Final = 100
RETURNED_AT_ONCE: Final = 50
RETURN_S: Final = 0.1
TIMEOUT_S: Final = 60.0
GIVE_UP_S: Final = 15.0
"""A table that did not arrive by then, and after several connections, never does."""


class FleetFigures(msgspec.Struct):
    """The stalls with the most CPU time: while nodes are probed, and at a failover."""

    probing: BusyStall
    failover: BusyStall
    failover_s: float


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
    fleet: FleetFigures | None = None


def make_table(keys: int, replicas: int = 0) -> RouteTable:
    """Return a table with so many keys of 1,000 tenants, and replicas of 1,000 deployments."""
    limits = [KeyLimits(requests_per_min=600 + n, tokens_per_min=1_000_000) for n in range(10)]
    return RouteTable(
        cluster_id=CLUSTER,
        generation=Generation(1),
        epoch=Epoch(1),
        keys=KeyTable.of(make_key(n, limits[n % 10]) for n in range(keys)),
        routes=tuple(make_route(n) for n in range(replicas)),
        deployments=tuple(
            DeploymentEntry(
                deployment_id=DeploymentId(f"d{n:04d}"),
                name=f"m{n}",
                model_id=ModelId(f"m{n}"),
                context_tokens=8192,
            )
            for n in range(DEPLOYMENTS if replicas else 0)
        ),
    )


def make_route(number: int) -> Route:
    """Return the route to one replica; its node's name does not exist."""
    node = f"n{number // 2:05d}"
    return Route(
        replica_id=ReplicaId(f"r{number:05d}"),
        deployment_id=DeploymentId(f"d{number % DEPLOYMENTS:04d}"),
        version=1,
        node_id=NodeId(node),
        pop=PopId(f"p{number // 2 % POPS:03d}"),
        address=f"http://{node}.invalid:1",
    )


def after_failover(table: RouteTable, *, is_returning: bool) -> RouteTable:
    """Return the table of the next term, which lacks every third replica or most of them."""
    kept = tuple(route for number, route in enumerate(table.routes) if number % 3)
    if is_returning:
        kept = table.routes[:RETURNED_AT_FIRST]
    return msgspec.structs.replace(table, generation=Generation(3), epoch=Epoch(2), routes=kept)


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

    def __init__(self, table: RouteTable, *, is_single_frame: bool, is_returning: bool) -> None:
        """Send the table as one frame, or in parts; after a failover with few replicas at first."""
        self._table = table
        self._is_returning = is_returning
        self._is_single_frame = is_single_frame
        self._frames: list[bytes] = []
        self.connections = 0
        self.encode_s = 0.0
        self.delta = asyncio.Event()
        self.failover = asyncio.Event()

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
        frames: Iterable[bytes] = self._frames
        if self.failover.is_set():
            frames = split_table(after_failover(self._table, is_returning=self._is_returning))
        with suppress(ConnectionError):
            for frame in frames:
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
            if not self.failover.is_set():
                await socket.send_bytes(codec.encode(delta))
                await self.failover.wait()
                await socket.close()
            elif self._is_returning:
                await self._send_returning(socket)
            await reading
        reading.cancel()
        return socket

    async def _send_returning(self, socket: web.WebSocketResponse) -> None:
        """Send changes that bring the replicas back, each as its node reports it again."""
        routes = self._table.routes
        for number, start in enumerate(range(RETURNED_AT_FIRST, len(routes), RETURNED_AT_ONCE)):
            back = routes[start : start + RETURNED_AT_ONCE]
            delta = RouteDelta(
                cluster_id=CLUSTER,
                base=Generation(3 + number),
                generation=Generation(4 + number),
                epoch=Epoch(2),
                routes_set=tuple(msgspec.structs.replace(route, version=2) for route in back),
            )
            await socket.send_bytes(codec.encode(delta))
            await asyncio.sleep(RETURN_S)


async def read_all(socket: web.WebSocketResponse) -> None:
    """Ignore what the router sends."""
    async for _ in socket:
        pass


async def run_router(
    folder: Path, identity: Identity, port: int, for_s: float, ask: Callable[[str], None]
) -> RouterFigures:
    """Run a router until it has the table and the delta; measure. `ask` asks the scheduler."""
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
        ask("delta")
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
        if for_s:
            figures.fleet = await watch_fleet(app, watch, for_s, ask)
        watching.cancel()
    return figures


async def watch_fleet(
    app: RouterApp, watch: StallWatch, for_s: float, ask: Callable[[str], None]
) -> FleetFigures:
    """Let the router probe its nodes for a while, then have it follow another scheduler's term."""
    watch.take_busiest()
    await asyncio.sleep(for_s)
    probing = watch.take_busiest()
    began = time.monotonic()
    ask("failover")
    await until_generation(app, 3)
    failover_s = time.monotonic() - began
    await asyncio.sleep(AFTER_FAILOVER_S)
    return FleetFigures(probing, watch.take_busiest(), failover_s)


async def until_generation(app: RouterApp, generation: int) -> None:
    """Wait for a generation of the route table."""
    while app.follower.progress().generation < generation:  # noqa: ASYNC110 - no hook needed
        await asyncio.sleep(TICK_S)


def router_process(folder: Path, identity: Identity, port: int, for_s: float, pipe: object) -> None:
    """Run a router in this process; send the figures through `pipe`."""
    send = pipe.send  # type: ignore[attr-defined]
    send(uvloop.run(run_router(folder, identity, port, for_s, send), loop_factory=ServiceLoop))


@asynccontextmanager
async def a_sender(
    table: RouteTable, *, is_single_frame: bool, is_returning: bool
) -> AsyncIterator[tuple[TableSender, int]]:
    """Serve a table on a free port."""
    sender = TableSender(table, is_single_frame=is_single_frame, is_returning=is_returning)
    sender.encode()
    app = web.Application()
    app.router.add_get("/v1/router", sender.serve)
    async with serve_http(app, "127.0.0.1", 0) as port:
        yield sender, port


async def measure(
    keys: int, replicas: int, for_s: float, *, is_single_frame: bool, is_returning: bool
) -> None:
    """Run the benchmark and print its figures."""
    table = make_table(keys, replicas)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sending = a_sender(table, is_single_frame=is_single_frame, is_returning=is_returning)
        async with sending as (sender, port):
            print(
                f"{keys} keys: {sender.bytes / 2**20:.0f} MiB, encoded in {sender.encode_s:.2f} s"
            )
            arguments = (folder, new_identity(folder), port, for_s, theirs)
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
    answer = await asyncio.to_thread(receive)
    if answer == "failover":
        sender.failover.set()
        answer = await asyncio.to_thread(receive)
    figures: RouterFigures = answer
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
    if figures.fleet is not None:
        print("the most CPU time of the event loop in one, of it garbage collection, and where")
        for name, busy in (
            ("while nodes are probed in vain", figures.fleet.probing),
            (f"with a failover, followed in {figures.fleet.failover_s:.1f} s",
             figures.fleet.failover),
        ):  # fmt: skip
            print(f"  {name}: {busy.cpu_ms:.0f}, {busy.gc_ms:.0f} ms, {busy.location}")
    print(f"{sender.connections} connections")


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--single-frame", action="store_true")
    parser.add_argument("--returning", action="store_true")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--for", dest="seconds", type=float, default=60.0)
    given = parser.parse_args()
    for_s = given.seconds if given.replicas else 0.0
    asyncio.run(
        measure(
            given.keys,
            given.replicas,
            for_s,
            is_single_frame=given.single_frame,
            is_returning=given.returning,
        )
    )


if __name__ == "__main__":
    main()

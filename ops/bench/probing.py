"""Measures the age of many nodes' loads at a router: each node pinged, or one queried for its PoP.

    python -m ops.bench.probing [--nodes 10000] [--rtt-ms 80] [--for-s 24] [--live] [--write]

The router is its real prober and poller with its real connections, in their real periodic jobs;
nothing else runs in it, so a serving router is slower. The nodes are simulated, each with an
address on loopback: they answer a ping after a round trip, and for their PoP with the real
`PopLoadReader`, whose pings take 1 ms.

All run in one process, whose clock counts the router's CPU time and the time that nothing is to be
done (`cpu_clock.py`): neither other processes nor the simulated nodes make a load older. With
--live the nodes are a process of their own, and all times are those of the machine as it is.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import platform
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

import uvloop

from isochrone.service.loop import Loop
from isochrone.wire import codec
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.pop_loads import LoadsQuery
from isochrone.wire.peers.routes import DeploymentEntry, Pop, Route, RouteTable
from nodeagent.api.pop_loads import PopLoadReader
from ops.bench.cpu_clock import CpuClockLoop, run_with_cpu_clock
from router import build
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.upstream import Upstream
from router.decide.liveness.probe_plan import GroupPlan
from router.fleet_state import FleetState
from router.loops import probe_nodes, read_pop_loads
from router.loops.probe_nodes import NodeProber
from router.loops.read_pop_loads import PopLoadPoller
from router.recording.metrics import Metrics

POPS: Final = 190
LAN_S: Final = 0.001
REPORT: Final = Path(__file__).with_suffix(".md")
INTERVAL_S: Final = 2.0
FIRST_MAX_S: Final = 120.0
DESCRIPTORS_SPARE: Final = 1_000
CPU_CLOCK: Final = (
    "Time is the router's own CPU time and the time that it waits for nodes; other processes and "
    "the work of the simulated nodes do not count. asyncio's own event loop, slower than the "
    "service's."
)
LIVE: Final = "On the clock of this machine, with its other work; uvloop."


class SimulatedNodes:
    """All nodes: each is known by the address that a connection was made to."""

    def __init__(self, rtt_s: float, clock: Callable[[], float]) -> None:
        self.rtt_s = rtt_s
        self._clock = clock
        self.pings: Counter[str] = Counter()
        self.readers: dict[str, PopLoadReader] = {}

    async def ping(self, node_id: NodeId, address: str) -> str:
        """Answer a node of the same PoP."""
        await asyncio.sleep(LAN_S)
        self.pings[node_id] += 1
        return loads_of(node_id)

    def reader(self, name: str) -> PopLoadReader:
        """Return what a node answers for its PoP with."""
        if name not in self.readers:
            self.readers[name] = PopLoadReader(self.ping, self._clock)
        return self.readers[name]


class NodeProtocol(asyncio.Protocol):
    """One connection of the router to a simulated node."""

    def __init__(self, nodes: SimulatedNodes) -> None:
        self._nodes = nodes
        self._data = b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note which node was addressed."""
        self._transport = cast("asyncio.Transport", transport)
        self._name = node_at(transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        """Answer complete requests, each after the round trip."""
        self._data += data
        head, end, rest = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._data = rest
            self._nodes.pings[self._name] += 1
            header = f"x-isochrone-loads: {loads_of(self._name)}\r\n"
            self._answer_later(f"HTTP/1.1 204 No Content\r\n{header}\r\n".encode())
            return
        lines = head.lower().split(b"\r\n")
        size = next(int(line.split(b":")[1]) for line in lines if b"content-length" in line)
        if len(rest) < size:
            return
        self._data = rest[size:]
        query = codec.decode(rest[:size], codec.decoder(LoadsQuery))
        task = asyncio.create_task(self._answer_for_pop(query))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_for_pop(self, query: LoadsQuery) -> None:
        body = codec.encode(await self._nodes.reader(self._name).read(query))
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
        self._answer_later(head.encode() + body)

    def _answer_later(self, answer: bytes) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._nodes.rtt_s, self._write, answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def node_at(host: str) -> str:
    """Return the node of an address."""
    _, high, low, _ = map(int, host.split("."))
    return f"n{256 * high + low:05d}"


def address_of(number: int, port: int) -> str:
    """Return the address of a node."""
    return f"127.{number // 256}.{number % 256}.1:{port}"


def loads_of(name: str) -> str:
    """Return the header with the loads of two replicas."""
    return ",".join(f"r{name}-{n} p=700;d=40;r=2;w=0;u=700;o=700;e=40" for n in range(2))


def make_table(nodes: int, port: int) -> RouteTable:
    """Return a table with two replicas on each node."""
    return RouteTable(
        cluster_id=ClusterId("c"),
        generation=Generation(1),
        epoch=Epoch(1),
        pops=tuple(
            Pop(pop=PopId(f"p{n:03d}"), city="x", country="NL", latitude=n % 60, longitude=n % 170)
            for n in range(POPS)
        ),
        deployments=tuple(
            DeploymentEntry(
                deployment_id=DeploymentId(f"d{n:04d}"),
                name=f"m{n}",
                model_id=ModelId("m"),
                context_tokens=4096,
            )
            for n in range(1000)
        ),
        routes=tuple(
            Route(
                replica_id=ReplicaId(f"rn{number:05d}-{n}"),
                deployment_id=DeploymentId(f"d{number % 1000:04d}"),
                version=1,
                node_id=NodeId(f"n{number:05d}"),
                pop=PopId(f"p{number % POPS:03d}"),
                address=address_of(number, port),
                prefill_tokens_per_s=10_000.0,
            )
            for number in range(nodes)
            for n in range(2)
        ),
    )


class AgeWatch:
    """The time at which each node's load was true, as far as the router knows it."""

    def __init__(self, fleet: FleetState, trip_s: float) -> None:
        """Let `trip_s` be how long an answer is on its way from a node to the router."""
        self.true_at_s: dict[NodeId, float] = {}
        self._fleet = fleet
        self._trip_s = trip_s

    def read(self) -> None:
        """Read what the router knows now.

        The attribute is read because a compiled class's methods cannot be replaced.
        """
        # A node that does not answer any more keeps the time of its last answer.
        for node_id, at_s in self._fleet.nodes._answered_at_s.items():
            self.true_at_s[node_id] = at_s - self._trip_s

    def ages_s(self) -> list[float]:
        """Return the age of every load now, sorted."""
        self.read()
        now_s = self._fleet.clock()
        return sorted(now_s - at_s for at_s in self.true_at_s.values())


class Probing:
    """The two jobs of a router that learn loads, on `clock`."""

    def __init__(self, nodes: int, port: int, clock: Callable[[], float], trip_s: float) -> None:
        """Know `nodes` nodes, all of which listen on `port`."""
        self._clock = clock
        fleet = self._fleet = FleetState(PopId("p000"), clock, "router-1")
        config = RouterConfig(state_folder=Path("/nonexistent"))
        self._deadlines = Deadlines(clock)
        self._upstream = Upstream(config, self._deadlines, clock)
        metrics = Metrics()
        poller = PopLoadPoller(
            fleet=fleet,
            upstream=self._upstream,
            metrics=metrics,
            timeout_s=config.probe_timeout_s,
            interval_s=INTERVAL_S,
        )
        prober = NodeProber(
            fleet=fleet,
            upstream=self._upstream,
            metrics=metrics,
            dropped=lambda: (),
            on_dropped_answer=lambda route, refusal: None,
            on_node_lost=lambda node_id, since_s: None,
            timeout_s=config.probe_timeout_s,
            interval_s=INTERVAL_S,
            unanswered=lambda: poller.unanswered,
        )
        jitter = random.Random(1)
        # As in router/app.py.
        self._jobs = (
            Loop("pop_loads", poller.run_once, INTERVAL_S / 4, jitter=jitter),
            Loop("probe", prober.run_once, INTERVAL_S, jitter=jitter),
        )
        self._close = poller.close
        self._watch = AgeWatch(fleet, trip_s)
        fleet.adopt(make_table(nodes, port))
        self._nodes = nodes

    async def run(self, for_s: float, cpu_s: Callable[[], float]) -> dict[str, float]:
        """Run the jobs until all loads are known and for `for_s` after; return what was seen."""
        began_s, clock, watch = self._clock(), self._clock, self._watch
        self._deadlines.start()
        jobs = [asyncio.create_task(job.run()) for job in self._jobs]
        while len(watch.true_at_s) < self._nodes and clock() < FIRST_MAX_S + began_s:
            await asyncio.sleep(0.05)
            watch.read()
        known_s = clock() - began_s
        # The first ages are those of the start.
        await asyncio.sleep(2 * INTERVAL_S)
        began_s, cpu_before_s = clock(), cpu_s()
        oldest_s, middle_s = [], []
        while clock() < began_s + for_s:
            await asyncio.sleep(0.5)
            ages_s = watch.ages_s()
            oldest_s.append(ages_s[-1])
            middle_s.append(ages_s[len(ages_s) // 2])
        seconds = clock() - began_s
        figures = {
            "known_s": known_s,
            "oldest_s": max(oldest_s),
            "middle_s": max(middle_s),
            "cpu": (cpu_s() - cpu_before_s) / seconds,
        }
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        self._close()
        self._deadlines.stop()
        await self._upstream.close()
        return figures


async def serve_nodes(nodes: SimulatedNodes) -> int:
    """Listen as all nodes; return the port."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: NodeProtocol(nodes), "0.0.0.0", 0, backlog=4096)
    port: int = server.sockets[0].getsockname()[1]
    return port


def serve_nodes_apart(rtt_s: float, pipe: Any) -> None:
    """Simulate the nodes in this process until the parent asks for the number of pings."""

    async def serve() -> None:
        nodes = SimulatedNodes(rtt_s, time.monotonic)
        pipe.send(await serve_nodes(nodes))
        with contextlib.suppress(EOFError):
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            pipe.send(dict(nodes.pings))

    uvloop.run(serve())


def measure(nodes: int, rtt_s: float, for_s: float) -> dict[str, float]:
    """Return the figures of a machine with a free processor for the router."""

    async def run(loop: CpuClockLoop) -> dict[str, float]:
        cast(Any, probe_nodes).perf_counter = loop.time
        simulated = SimulatedNodes(rtt_s, loop.time)
        port = await loop.run_elsewhere(lambda: loop.create_task(serve_nodes(simulated)))
        began_s = loop.time()
        figures = await Probing(nodes, port, loop.time, rtt_s / 2).run(for_s, loop.cpu_s)
        seconds = loop.time() - began_s
        figures["pings_per_s"] = max(simulated.pings.values()) / seconds
        figures["elsewhere"] = loop.elsewhere_s / seconds
        return figures

    return cast("dict[str, float]", run_with_cpu_clock(run))


def measure_live(nodes: int, rtt_s: float, for_s: float) -> dict[str, float]:
    """Return the figures of this machine as it is."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_nodes_apart, args=(rtt_s, theirs), daemon=True)
    process.start()

    async def run() -> dict[str, float]:
        return await Probing(nodes, ours.recv(), time.monotonic, rtt_s / 2).run(
            for_s, time.process_time
        )

    try:
        began_s = time.monotonic()
        figures = uvloop.run(run())
        ours.send("pings")
        figures["pings_per_s"] = max(ours.recv().values()) / (time.monotonic() - began_s)
    finally:
        process.kill()
        process.join()
    return figures


def ping_each_node() -> None:
    """Probe as a router of a small fleet does."""
    poller, prober = cast(Any, read_pop_loads), cast(Any, probe_nodes)
    poller.plan_groups = lambda *_, **__: GroupPlan((), frozenset())
    prober.nodes_to_ping = lambda node_ids, **_: node_ids


def main() -> None:
    """Print, and with --write keep, a table of both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[5000, 10_000])
    parser.add_argument("--rtt-ms", type=float, default=80.0)
    parser.add_argument("--for-s", type=float, default=24.0, help="how long ages are measured")
    parser.add_argument("--live", action="store_true", help="with the machine's own clock")
    parser.add_argument("--write", action="store_true", help="write the table to probing.md")
    options = parser.parse_args()
    # Both ends of each connection are in this process.
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    where = (
        f"{platform.machine()}, Python {platform.python_version()}, "
        f"{'compiled' if build.is_compiled() else 'interpreted'} request path, "
        f"{datetime.now(UTC):%Y-%m-%d}"
    )
    lines = [
        "# The loads of many nodes, as one router knows them",
        "",
        f"{POPS} PoPs, a round trip of {options.rtt_ms:g} ms to every node, {options.for_s:g} s.",
        f"{where}. " + (LIVE if options.live else CPU_CLOCK),
        "",
        f"    python -m ops.bench.probing{' --live' if options.live else ''}",
        "",
        "| nodes | asked | all known after | median load, oldest seen | oldest load "
        "| router's CPU, share of a core | simulated nodes' CPU | most pings of a node a second |",
        "|---|---|---|---|---|---|---|---|",
    ]
    take = measure_live if options.live else measure
    ways = [("one for its PoP", False), ("each node", True)]
    for nodes, (name, is_each) in ((n, way) for way in ways for n in options.nodes):
        if is_each and 2 * nodes + DESCRIPTORS_SPARE > files_max:
            lines.append(
                f"| {nodes} | {name} | needs more than {files_max} descriptors | | | | | |"
            )
            continue
        if is_each:
            ping_each_node()
        seen = take(nodes, options.rtt_ms / 1000, options.for_s)
        elsewhere = f"{seen['elsewhere']:.2f}" if "elsewhere" in seen else "-"
        lines.append(
            f"| {nodes} | {name} | {seen['known_s']:.2f} s "
            f"| {seen['middle_s']:.2f} s | {seen['oldest_s']:.2f} s "
            f"| {seen['cpu']:.2f} | {elsewhere} | {seen['pings_per_s']:.1f} |"
        )
        print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if options.write:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()

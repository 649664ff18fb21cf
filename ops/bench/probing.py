"""Measures the age of many nodes' loads at a router: each node pinged, or one queried for its PoP.

    python -m ops.bench.probing [--nodes 10000] [--rtt-ms 80] [--rounds 8] [--write]

The nodes are simulated by a process of their own, each with an address on loopback: they answer a
ping after a round trip, and for their PoP with the real `PopLoadReader`, whose pings take 1 ms. The
router is its real prober with its real connections, under uvloop as in service. Nothing else runs
in it, so a serving router is slower.
"""

import argparse
import asyncio
import contextlib
import functools
import multiprocessing
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import uvloop

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
from isochrone.wire.pop_loads import LoadsQuery
from isochrone.wire.routes import DeploymentEntry, Pop, Route, RouteTable
from nodeagent.api.pop_loads import PopLoadReader
from router.config import RouterConfig
from router.dataplane.deadlines import Deadlines
from router.dataplane.upstream import Upstream
from router.decide import probe_plan
from router.fleet_state import FleetState
from router.loops.pop_loads import PopLoadPoller
from router.loops.probe_nodes import NodeProber
from router.metrics import Metrics

POPS: Final = 190
LAN_S: Final = 0.001
REPORT: Final = Path(__file__).with_suffix(".md")
INTERVAL_S: Final = 2.0


class SimulatedNodes:
    """All nodes: each is known by the address that a connection was made to."""

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
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
            self.readers[name] = PopLoadReader(self.ping, time.monotonic)
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
    """The time at which each node's load was true, as reported to the router."""

    def __init__(self, fleet: FleetState) -> None:
        self.true_at_s: dict[NodeId, float] = {}
        self._fleet = fleet
        self._record = fleet.nodes.record_answer
        fleet.nodes.record_answer = self._note  # type: ignore[method-assign]
        self._record_round_trip = fleet.nodes.record_round_trip
        fleet.nodes.record_round_trip = self._note_ping  # type: ignore[method-assign]

    def _note(self, node_id: NodeId, now_s: float) -> None:
        self.true_at_s[node_id] = max(now_s, self.true_at_s.get(node_id, 0.0))
        self._record(node_id, now_s)

    def _note_ping(self, node_id: NodeId, rtt_ms: float, now_s: float) -> None:
        self.true_at_s[node_id] = now_s - rtt_ms / 2000
        self._record_round_trip(node_id, rtt_ms, now_s)

    def ages_s(self) -> list[float]:
        """Return the age of every load now, sorted."""
        now_s = self._fleet.clock()
        return sorted(now_s - at_s for at_s in self.true_at_s.values())


async def probe(nodes: int, port: int, rounds: int) -> dict[str, float]:
    """Run rounds of probes at the usual interval; return what was seen after the first."""
    clock = time.monotonic
    fleet = FleetState(PopId("p000"), clock, "router-1")
    config = RouterConfig(state_folder=Path("/nonexistent"))
    deadlines = Deadlines(clock)
    deadlines.start()
    upstream = Upstream(config, deadlines, clock)
    metrics = Metrics()
    poller = PopLoadPoller(
        fleet=fleet, upstream=upstream, metrics=metrics, timeout_s=config.probe_timeout_s
    )
    prober = NodeProber(
        fleet=fleet,
        upstream=upstream,
        metrics=metrics,
        dropped=lambda: (),
        on_dropped_answer=lambda route, refusal: None,
        on_node_lost=lambda node_id, since_s: None,
        timeout_s=config.probe_timeout_s,
        interval_s=INTERVAL_S,
        unanswered=lambda: poller.unanswered,
    )
    watch = AgeWatch(fleet)
    fleet.adopt(make_table(nodes, port))
    began = clock()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(poller.run_once())
        tasks.create_task(prober.run_once())
    first_s = clock() - began
    known_first = len(watch.true_at_s)
    until_s = clock() + rounds * INTERVAL_S
    oldest_s, middle_s = [], []
    async with asyncio.TaskGroup() as tasks:
        turns = [
            tasks.create_task(repeat(poller.run_once, INTERVAL_S / 2, until_s)),
            tasks.create_task(repeat(prober.run_once, INTERVAL_S, until_s)),
        ]
        while clock() < until_s:
            await asyncio.sleep(0.5)
            # Measurements start after each loop had another turn.
            if clock() > until_s - (rounds - 1) * INTERVAL_S:
                ages_s = watch.ages_s()
                oldest_s.append(ages_s[-1])
                middle_s.append(ages_s[len(ages_s) // 2])
    took_s = [max(turn.result()) for turn in turns]
    deadlines.stop()
    await upstream.close()
    return {
        "first_s": first_s,
        "known": known_first,
        "round_s": max(took_s),
        "oldest_s": max(oldest_s),
        "middle_s": max(middle_s),
    }


async def repeat(
    work: Callable[[], Awaitable[object]], interval_s: float, until_s: float
) -> list[float]:
    """Run `work` once in each interval; return how long each turn took."""
    took_s = []
    while time.monotonic() < until_s:
        began = time.monotonic()
        await work()
        took_s.append(time.monotonic() - began)
        await asyncio.sleep(max(0.0, interval_s - took_s[-1]))
    return took_s


def serve_nodes(rtt_s: float, pipe: Any) -> None:
    """Simulate the nodes until the parent asks for the number of pings."""

    async def serve() -> None:
        nodes = SimulatedNodes(rtt_s)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: NodeProtocol(nodes), "0.0.0.0", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        with contextlib.suppress(EOFError):
            while await loop.run_in_executor(None, pipe.recv) == "pings":
                pipe.send(dict(nodes.pings))
                nodes.pings.clear()

    uvloop.run(serve())


def measure(nodes: int, rtt_ms: float, rounds: int, ping_all_max: int) -> dict[str, float]:
    """Return the figures of one way of probing."""
    probe_plan.PING_ALL_NODES_MAX = ping_all_max  # type: ignore[misc]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_nodes, args=(rtt_ms / 1000, theirs), daemon=True)
    process.start()
    try:
        began, cpu_s = time.monotonic(), time.process_time()
        figures = uvloop.run(functools.partial(probe, nodes, ours.recv(), rounds)())
        ours.send("pings")
        pings = ours.recv()
        seconds = time.monotonic() - began
        figures["pings_per_s"] = max(pings.values()) / seconds
        figures["cpu"] = (time.process_time() - cpu_s) / seconds
    finally:
        process.kill()
        process.join()
    return figures


def main() -> None:
    """Print, and with --write keep, a table of both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[5000, 10_000])
    parser.add_argument("--rtt-ms", type=float, default=80.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="write the table to probing.md")
    options = parser.parse_args()
    lines = [
        "# The loads of many nodes, as one router knows them",
        "",
        f"{POPS} PoPs, a round trip of {options.rtt_ms:g} ms to every node, a round every "
        f"{INTERVAL_S:g} s, {options.rounds} rounds after the first.",
        "",
        f"2 vCPU, Debian 12, shared with the simulated nodes and with other work; Python "
        f"{platform.python_version()}, uvloop {version('uvloop')}; {datetime.now(UTC):%Y-%m-%d}.",
        "",
        "    python -m ops.bench.probing --write",
        "",
        "| nodes | asked | first round | longest round | median load, oldest seen | oldest load "
        "| router's CPU, share of a core | most pings that a node answers a second |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for nodes in options.nodes:
        for name, ping_all_max in (("each node", 10**9), ("one for its PoP", 256)):
            seen = measure(nodes, options.rtt_ms, options.rounds, ping_all_max)
            lines.append(
                f"| {nodes} | {name} | {seen['first_s']:.1f} s | {seen['round_s']:.2f} s "
                f"| {seen['middle_s']:.1f} s | {seen['oldest_s']:.1f} s "
                f"| {seen['cpu']:.2f} | {seen['pings_per_s']:.1f} |"
            )
            print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    if options.write:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()

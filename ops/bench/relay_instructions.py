"""Counts what a request costs in the request path, without sockets and without a kernel.

    python -m ops.bench.relay_instructions [--sizes 0 4 16 100 1024] [--replicas 8]
        [--requests 200] [--body prompt | ignored | same] [--callgrind [--keep FOLDER]] [--stream]
        [--rate 1000000] [--prefill 0]

One process has the whole request path, from the bytes of a client to the bytes for a node and back,
over transports in memory. With `--callgrind` it runs under valgrind, which counts instructions:
these do not depend on what else the machine does. Without it the least CPU time of some repetitions
is printed, in us.

`--body ignored` puts the text of a body into an unused field: the difference to the usual
`prompt` is the work on the prompt itself. `--body same` always sends the same conversation.
`--stream` sends one request, and measures a token of its answer, each of which comes alone;
`--requests` is then the number of tokens.
`--prefill N` makes the last N replicas prefill replicas, one of which reads each prompt: the
difference to 0 is the router's part of two legs. `--rate` is how many prompt tokens a replica
reads in a second; only prompts of some milliseconds have two legs.
"""

import argparse
import asyncio
import ctypes
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.wire.http import headers
from isochrone.wire.ids import BootId, PopId
from isochrone.wire.peers.assignment import Role
from isochrone.wire.peers.routes import RouteTable
from ops.bench import backend
from ops.bench.bench_router import KEY, route_table
from ops.bench.relay import CONVERSATIONS, PATH, PLAIN, STREAM_OPTIONS, conversation
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

REPETITIONS: Final = 7
READ_BYTES: Final = 256 * 1024
"""The most bytes that the event loop reads at once."""

WARM_UP_REQUESTS: Final = 64
DIAL_TURNS: Final = 1000
MARK: Final = "#include <valgrind/callgrind.h>\nvoid relay_mark(void) { CALLGRIND_DUMP_STATS; }\n"


class MemoryTransport(asyncio.Transport):
    """The router's end of a connection. A node's end answers the written requests on demand."""

    def __init__(self, protocol: Any) -> None:
        """Open the connection of `protocol`."""
        super().__init__()
        self.written = 0
        self.answered = 0
        """How much was written before the last answer."""
        self._protocol = protocol
        protocol.connection_made(self)

    def deliver(self, data: bytes) -> None:
        """Deliver bytes of the other side, in parts as large as the event loop reads."""
        begin = 0
        while begin < len(data):
            part = data[begin : begin + READ_BYTES]
            if isinstance(self._protocol, asyncio.BufferedProtocol):
                buffer = memoryview(self._protocol.get_buffer(READ_BYTES))
                part = part[: len(buffer)]
                buffer[: len(part)] = part
                self._protocol.buffer_updated(len(part))
            else:
                self._protocol.data_received(part)
            begin += len(part)

    def set_protocol(self, protocol: Any) -> None:
        """Deliver to another protocol from now on."""
        self._protocol = protocol

    def write(self, data: Any) -> None:
        """Count what was written."""
        self.written += len(data)

    def writelines(self, list_of_data: Any) -> None:
        """Count what was written."""
        self.written += sum(map(len, list_of_data))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the address of the other side."""
        return ("10.0.0.1", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Do nothing: nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        """Return 0: nothing is buffered."""
        return 0

    def is_closing(self) -> bool:
        """Return False."""
        return False


class MemoryLoop(asyncio.SelectorEventLoop):
    """An event loop that opens connections to nodes in memory."""

    def __init__(self) -> None:
        """Start without connections."""
        super().__init__()
        self.nodes: list[MemoryTransport] = []

    async def create_connection(self, factory: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Open a connection to a node."""
        transport = MemoryTransport(factory())
        self.nodes.append(transport)
        return transport, None


def table_with_roles(replicas: int, rate: float, prefill: int) -> RouteTable:
    """Return a table whose last `prefill` replicas read prompts for the others."""
    table = route_table(1, replicas, rate)
    routes = list(table.routes)
    for n in range(replicas - prefill, replicas):
        routes[n] = msgspec.structs.replace(routes[n], role=Role.PREFILL)
    return msgspec.structs.replace(table, routes=tuple(routes))


def public_server(folder: Path, table: RouteTable) -> PublicServer:
    """Return the server of a router, composed as in `router/app.py`."""
    config = RouterConfig(state_folder=folder, parse_bytes_per_key_per_s=1 << 40)
    clock, metrics = time.monotonic, Metrics()
    fleet = FleetState(PopId("ams"), clock, "router-1")
    fleet.adopt(table)
    upstream = Upstream(config, Deadlines(clock), clock)
    pipeline = RequestPipeline(
        config=config,
        fleet=fleet,
        limiter=KeyLimiter(),
        upstream=upstream,
        recorder=Recorder(PopId("ams"), metrics, UsageJournal(folder, clock)),
        metrics=metrics,
        poison_guard=PoisonGuard(SuspectTable(b"key", 600.0), metrics, clock),
        clock=clock,
    )
    surface, ids = OpenAiSurface(config, fleet, time.time), RequestIds(BootId("0"))
    client = SchedulerClient(None)
    stored = compose_stored_answers(
        *(config, client, surface, pipeline.serve, metrics),
        charge=lambda *_: None,
        keys=lambda: fleet.directory.keys,
        may_lease=lambda: True,
        request_ids=ids,
        is_main_process=True,
    )
    media = MediaRoutes(surface, pipeline, config.audio_relayed_bytes_max)
    dispatcher = ApiDispatcher(
        *(surface, pipeline, upstream, ids, metrics, client, stored.routes, media)
    )
    return PublicServer(
        config=config,
        authorize=dispatcher.authorize,
        handler=dispatcher.dispatch,
        encode_error=dispatcher.encode_error,
        deadlines=Deadlines(clock),
        clock=clock,
        unix_clock=time.time,
    )


def requests_of(kib: int, kind: str, *, is_stream: bool = False) -> list[bytes]:
    """Return the bytes of the requests of a load."""
    count = 1 if kind == "same" or not kib else CONVERSATIONS
    bodies = [conversation(kib, number) for number in range(count)] if kib else [PLAIN]
    if kind == "ignored":
        bodies = [PLAIN[:-1] + f',"metadata_ignored":{body}}}' for body in bodies]
    if is_stream:
        bodies = [STREAM_OPTIONS + body[1:] for body in bodies]
    return [
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:18102\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        for body in bodies
    ]


ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % len(backend.WHOLE)
) + backend.WHOLE


STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def answer_of(table: RouteTable) -> bytes:
    """Return what a node sends: with prefill replicas, first which of them reads the prompt."""
    last = table.routes[-1]
    if last.role is not Role.PREFILL:
        return ANSWER
    named = f"HTTP/1.1 103 Early Hints\r\n{headers.PREFILL_REPLICA}: {last.replica_id}\r\n\r\n"
    return named.encode() + ANSWER


async def serve(
    loop: MemoryLoop, client: MemoryTransport, requests: list[bytes], count: int, answer: bytes
) -> None:
    """Send `count` requests, one after the other, and answer each as a node."""
    for number in range(count):
        client.deliver(requests[number % len(requests)])
        node = _node_asked(loop)
        for _ in range(DIAL_TURNS):
            if node is not None:
                break
            # The first request to a node waits for its connection.
            await asyncio.sleep(0)
            node = _node_asked(loop)
        if node is None:
            raise SystemExit("cannot measure: a request was not sent to a node")
        written = client.written
        node.answered = node.written
        node.deliver(answer)
        if client.written == written:
            raise SystemExit("cannot measure: a request was not answered")


def _node_asked(loop: MemoryLoop) -> MemoryTransport | None:
    for node in loop.nodes:
        if node.written != node.answered:
            return node
    return None


async def serve_stream(
    loop: MemoryLoop, client: MemoryTransport, requests: list[bytes], tokens: int
) -> None:
    """Send one request, and answer it with a stream of so many tokens, each on its own."""
    client.deliver(requests[0])
    node = _node_asked(loop)
    if node is None:
        raise SystemExit("cannot measure: a request was not sent to a node")
    node.answered = node.written
    node.deliver(STREAM_HEAD + backend.chunk(backend.FRAMES[0]))
    for number in range(tokens):
        node.deliver(backend.chunk(backend.FRAMES[number % len(backend.FRAMES)]))
    written = client.written
    node.deliver(b"".join(map(backend.chunk, backend.TAIL)) + b"0\r\n\r\n")
    if client.written == written:
        raise SystemExit("cannot measure: the stream did not end")


async def measure(loop: MemoryLoop, arguments: argparse.Namespace, kib: int) -> float:
    """Return the CPU time of a request in us."""
    with tempfile.TemporaryDirectory() as name:
        table = table_with_roles(arguments.replicas, arguments.rate, arguments.prefill)
        server, answer = public_server(Path(name), table), answer_of(table)
        client = MemoryTransport(server.make_connection())
        requests = requests_of(kib, arguments.body)
        await serve(loop, client, requests, WARM_UP_REQUESTS, answer)
        streams = requests_of(kib, arguments.body, is_stream=True)
        mark = _mark_of(arguments.mark)
        best_s = 1e9
        for _ in range(1 if arguments.mark else REPETITIONS):
            began_s = time.process_time()
            mark()
            if arguments.stream:
                await serve_stream(loop, client, streams, arguments.requests)
            else:
                await serve(loop, client, requests, arguments.requests, answer)
            mark()
            best_s = min(best_s, time.process_time() - began_s)
        requests_count: int = arguments.requests
        return 1e6 * best_s / requests_count


def _mark_of(library: str) -> Callable[[], object]:
    """Return the function at whose calls valgrind writes down its count."""
    return ctypes.CDLL(library).relay_mark if library else bool


def instructions(arguments: argparse.Namespace) -> list[float]:
    """Return the instructions of a request of each size, as valgrind counts them."""
    with tempfile.TemporaryDirectory() as name:
        library, source = Path(name, "mark.so"), Path(name, "mark.c")
        source.write_text(MARK)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        command = ["valgrind", "--tool=callgrind"]
        command += [f"--callgrind-out-file={name}/counts", sys.executable]
        command += ["-m", "ops.bench.relay_instructions", "--mark", str(library)]
        command += ["--replicas", str(arguments.replicas), "--requests", str(arguments.requests)]
        command += ["--rate", str(arguments.rate), "--prefill", str(arguments.prefill)]
        command += ["--stream"] * arguments.stream
        command += ["--body", arguments.body, "--sizes", *map(str, arguments.sizes)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        counts = [_total(Path(name, f"counts.{n + 1}")) for n in range(2 * len(arguments.sizes))]
        if arguments.keep:
            for n in range(1, len(counts), 2):
                kept = Path(arguments.keep, f"{arguments.body}-{arguments.sizes[n // 2]}")
                kept.write_bytes(Path(name, f"counts.{n + 1}").read_bytes())
    return [count / arguments.requests for count in counts[1::2]]


def _total(dump: Path) -> int:
    """Return how many instructions one of valgrind's files counts."""
    found = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"cannot measure: no total in {dump}")
    return int(found.group(1))


def main() -> None:
    """Measure each size and print a row for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[0, 4, 16, 100, 1024])
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e6, help="prompt tokens/s of a replica")
    parser.add_argument("--prefill", type=int, default=0, help="replicas that only read prompts")
    parser.add_argument("--body", choices=("prompt", "ignored", "same"), default="prompt")
    parser.add_argument("--callgrind", action="store_true", help="count instructions")
    parser.add_argument("--stream", action="store_true", help="count a token, not a request")
    parser.add_argument("--keep", default="", help="a folder for callgrind's profile of each size")
    parser.add_argument("--mark", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.callgrind:
        for kib, count in zip(arguments.sizes, instructions(arguments), strict=True):
            print(f"{kib or 0.1} KiB: {count:,.0f} instructions")
        return
    for kib in arguments.sizes:
        loop = MemoryLoop()
        us = loop.run_until_complete(measure(loop, arguments, kib))
        loop.close()
        print(f"{kib or 0.1} KiB: {us:.1f} us", flush=True)


if __name__ == "__main__":
    main()

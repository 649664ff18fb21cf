"""In any order of events every request ends, and everything it held is released.

Clients send, read, stall and disconnect; nodes answer, refuse, stall, break and close, and say
which prefill replica reads a prompt; dials succeed late, fail or are cancelled; time passes. At the
end either every client and node continues, and every answer must arrive before any deadline; or
none of them does anything more, and the deadlines alone must end everything.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import Role
from ops.bench.bench_router import KEY, route_table
from tests.unit.router.in_memory import FakeTransport, ManualLoop, RequestPath

TOKENS = 4
FRAMES = b"".join(
    b'data: {"choices":[{"index":0,"delta":{"content":"t%d %s"}}]}\n\n' % (n, b"x" * 700)
    for n in range(TOKENS)
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
WHOLE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}'
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nx-isochrone-refused: busy\r\ncontent-length: 0\r\n\r\n"
BROKEN = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
SILENCE_STEPS = 80
READERS = ("r-002", "r-003")
"""The prefill replicas, if replicas have roles."""

ANY_READER = (*READERS, "r-000", "r-001", "unknown")
READ_BY = b"HTTP/1.1 103 Early Hints\r\nx-isochrone-prefill-replica: %s\r\n\r\n"
PICK = st.integers(0, 1_000)


def a_request(stream: bool, close_after: bool) -> bytes:
    body = (
        b'{"model":"bench","stream":%s,"max_tokens":4,"messages":[{"role":"user","content":"x"}]}'
    )
    body %= b"true" if stream else b"false"
    close = b"connection: close\r\n" if close_after else b""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n%s"
        b"content-length: %d\r\n\r\n%s" % (KEY.encode(), close, len(body), body)
    )


def an_answer(stream: bool, cut: int) -> bytes:
    if not stream:
        return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(WHOLE), WHOLE)
    frames = FRAMES + b"data: [DONE]\n\n"
    parts = [part for part in (frames[:cut], frames[cut:]) if part]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return STREAM_HEAD + chunks + b"0\r\n\r\n"


class AnyOrderOfEvents(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = ManualLoop()
        self.folder = TemporaryDirectory()
        self.clients: list[FakeTransport] = []

    @initialize(
        capacity=st.sampled_from([30, 10_000]), all_continue=st.booleans(), has_roles=st.booleans()
    )
    def open_router(self, capacity: int, all_continue: bool, has_roles: bool) -> None:
        self.all_continue = all_continue
        self.has_roles = has_roles
        default = route_table(1, 4 if has_roles else 2, 10.0 if has_roles else 1e6)
        routes = tuple(
            replace(
                route,
                tokens_in_flight_max=capacity,
                role=Role.PREFILL if route.replica_id in READERS else Role.UNIFIED,
            )
            for route in default.routes
        )
        self.router = RequestPath(
            self.loop, replace(default, routes=routes), Path(self.folder.name)
        )

    @property
    def open_clients(self) -> list[FakeTransport]:
        return [client for client in self.clients if not client.is_lost]

    @property
    def open_nodes(self) -> list[FakeTransport]:
        return [node for node in self.loop.nodes if not node.is_lost]

    @rule()
    @precondition(lambda self: len(self.open_clients) < 4)
    def client_connects(self) -> None:
        self.loop.settle(lambda: self.clients.append(self.router.connect_client()))

    @rule(
        which=PICK,
        stream=st.booleans(),
        close_after=st.booleans(),
        size=st.sampled_from([40, 9999]),
    )
    @precondition(lambda self: self.open_clients)
    def client_sends_request(self, which: int, stream: bool, close_after: bool, size: int) -> None:
        client = self.open_clients[which % len(self.open_clients)]
        client.inbox += a_request(stream, close_after)
        self.deliver_to(client, size)

    @rule(stream=st.booleans(), close_after=st.booleans())
    @precondition(lambda self: len(self.open_clients) < 4)
    def request_reaches_node(self, stream: bool, close_after: bool) -> None:
        """Without this rule few of the drawn histories have a request that a node could answer."""
        self.client_connects()
        self.client_sends_request(len(self.open_clients) - 1, stream, close_after, 9999)
        while self.open_dials:
            self.dial_completes(is_good=True, iterations=8)

    @rule(which=PICK, size=st.sampled_from([1, 100, 9999]))
    @precondition(lambda self: self.clients)
    def peer_sends_more(self, which: int, size: int) -> None:
        self.deliver_to(
            (self.clients + self.loop.nodes)[which % len(self.clients + self.loop.nodes)], size
        )

    def deliver_to(self, transport: FakeTransport, size: int) -> None:
        if transport.can_deliver and not transport.is_lost:
            self.loop.settle(lambda: transport.deliver(size))

    @rule(which=PICK)
    @precondition(lambda self: self.open_clients)
    def client_reads(self, which: int) -> None:
        self.loop.settle(self.open_clients[which % len(self.open_clients)].read)

    @rule(which=PICK, half_closes=st.booleans())
    @precondition(lambda self: self.open_clients)
    def client_disconnects(self, which: int, half_closes: bool) -> None:
        self.loop.settle(
            lambda: self.open_clients[which % len(self.open_clients)].leave(half_closes=half_closes)
        )

    @rule(is_good=st.booleans(), iterations=st.integers(0, 8))
    @precondition(lambda self: self.open_dials)
    def dial_completes(self, is_good: bool, iterations: int) -> None:
        self.loop.settle(lambda: self.complete_dial(is_good=is_good), iterations)

    @property
    def open_dials(self) -> list["asyncio.Future[None]"]:
        return [dial for dial in self.loop.dials if not dial.done()]

    def complete_dial(self, *, is_good: bool) -> None:
        for dial in self.open_dials[:1]:
            if is_good:
                dial.set_result(None)
            else:
                dial.set_exception(ConnectionRefusedError())

    @rule(which=PICK, how=st.sampled_from(["ok", "ok", "busy", "broken"]), cut=PICK, size=PICK)
    @precondition(lambda self: self.open_nodes)
    def node_answers(self, which: int, how: str, cut: int, size: int) -> None:
        node = self.open_nodes[which % len(self.open_nodes)]
        self.answer(node, how, 1 + cut % (len(FRAMES) + 20))
        self.deliver_to(node, 1 + 4 * size)

    def answer(self, node: FakeTransport, how: str, cut: int) -> None:
        if node.outbox.endswith(b"}"):
            stream = b'"stream":true' in node.outbox
            node.inbox += {"busy": BUSY, "broken": BROKEN}.get(how) or an_answer(stream, cut)
            self.loop.settle(node.read)

    @rule(which=PICK, reader=st.sampled_from(ANY_READER), size=st.sampled_from([9, 9999]))
    @precondition(lambda self: self.has_roles and self.open_nodes)
    def node_says_where_a_prompt_is_read(self, which: int, reader: str, size: int) -> None:
        node = self.open_nodes[which % len(self.open_nodes)]
        if node.outbox.endswith(b"}"):
            node.inbox += READ_BY % reader.encode()
            self.deliver_to(node, size)

    @rule(which=PICK, half_closes=st.booleans())
    @precondition(lambda self: self.open_nodes)
    def node_breaks(self, which: int, half_closes: bool) -> None:
        self.loop.settle(
            lambda: self.open_nodes[which % len(self.open_nodes)].leave(half_closes=half_closes)
        )

    @rule(seconds=st.sampled_from([0.05, 0.3, 4.0, 21.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.now_s += seconds
        self.loop.settle()

    @rule()
    @precondition(lambda self: self.open_nodes)
    def node_is_lost(self) -> None:
        node_id = next(iter(self.router.fleet.directory.node_addresses()), NodeId(""))
        self.loop.settle(
            lambda: self.router.upstream.fail_exchanges(node_id, self.loop.now_s, lambda: True)
        )

    @invariant()
    def no_task_failed_and_idle_connections_are_read(self) -> None:
        assert not self.loop.errors
        idle = self.router.upstream._idle.values()
        kept = {connection._transport for connections in idle for connection in connections}
        assert all(node.reads for node in self.open_nodes if node in kept)

    @invariant()
    def a_request_counts_where_it_is_read_and_where_it_is_answered(self) -> None:
        """Or nowhere, while it waits for its next attempt."""
        in_progress = sum(bool(connection._task) for connection in self.router.server.connections)
        assert self.router.fleet.in_flight.requests <= 2 * in_progress

    def teardown(self) -> None:
        if self.all_continue:
            self.let_all_continue()
            assert not self.is_busy, "a waiting request was not resumed"
        self.let_deadlines_expire()
        self.check_all_released()
        self.router.deadlines.stop()
        self.router.journal.close()
        self.folder.cleanup()
        self.loop.settle()
        self.loop.close()

    @property
    def is_busy(self) -> bool:
        return any(connection._task is not None for connection in self.router.server.connections)

    def let_all_continue(self) -> None:
        """Let every client and node continue for less than a second.

        That is longer than the pause between two attempts, and shorter than every deadline.
        """
        for _ in range(90):
            while self.open_dials:
                self.loop.settle(lambda: self.complete_dial(is_good=True))
            for node in self.open_nodes:
                self.answer(node, "ok", 500)
            for transport in [*self.open_nodes, *self.open_clients]:
                self.deliver_to(transport, 99_999)
                self.loop.settle(transport.read if transport in self.clients else None)
            self.time_passes(0.01)

    def let_deadlines_expire(self) -> None:
        for _ in range(SILENCE_STEPS):
            self.time_passes(5.0)

    def check_all_released(self) -> None:
        router = self.router
        assert not self.loop.errors
        assert not router.server.connections
        assert not router.server._connection_count._by_network
        assert not len(router.server.bodies.held)
        assert len(router.upstream) == len(router.deadlines) == 0
        assert router.fleet.in_flight.requests == 0
        assert router.pipeline.queue.depth == 0
        assert not asyncio.all_tasks(self.loop)
        assert not any(use.concurrent for use in router.limiter._usages.values())


TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase
TestAnyOrderOfEvents.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

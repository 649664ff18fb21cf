"""Whatever the order of events: every request ends, and everything held is given back.

Clients send, read, stall and leave; nodes answer, shed, stall, break and close; dials succeed late,
fail or are given up; time passes. At the end either everybody does his part, and every answer is
there without waiting for a deadline; or nobody ever does anything again, and the deadlines alone
must end it all.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from isochrone.wire.ids import NodeId
from ops.bench.bench_router import KEY, table
from tests.unit.router.wire import End, Relay, StillLoop

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
PICK = st.integers(0, 1_000)


def a_request(stream: bool, wants_close: bool) -> bytes:
    body = (
        b'{"model":"bench","stream":%s,"max_tokens":4,"messages":[{"role":"user","content":"x"}]}'
    )
    body %= b"true" if stream else b"false"
    close = b"connection: close\r\n" if wants_close else b""
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


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = StillLoop()
        self.folder = TemporaryDirectory()
        self.clients: list[End] = []
        self.answered: set[End] = set()

    @initialize(room=st.sampled_from([30, 10_000]), ends_well=st.booleans())
    def begin(self, room: int, ends_well: bool) -> None:
        self.ends_well = ends_well
        known = table(1, 2)
        routes = tuple(replace(route, tokens_in_flight_max=room) for route in known.routes)
        self.relay = Relay(self.loop, replace(known, routes=routes), Path(self.folder.name))

    @property
    def here(self) -> list[End]:
        return [client for client in self.clients if not client.is_lost]

    @property
    def nodes(self) -> list[End]:
        return [node for node in self.loop.nodes if not node.is_lost]

    @rule()
    @precondition(lambda self: len(self.here) < 4)
    def connects(self) -> None:
        self.loop.settle(lambda: self.clients.append(self.relay.client()))

    @rule(
        which=PICK,
        stream=st.booleans(),
        wants_close=st.booleans(),
        size=st.sampled_from([40, 9999]),
    )
    @precondition(lambda self: self.here)
    def asks(self, which: int, stream: bool, wants_close: bool, size: int) -> None:
        client = self.here[which % len(self.here)]
        client.inbox += a_request(stream, wants_close)
        self.delivers_to(client, size)

    @rule(which=PICK, size=st.sampled_from([1, 100, 9999]))
    @precondition(lambda self: self.clients)
    def sends_on(self, which: int, size: int) -> None:
        self.delivers_to(
            (self.clients + self.loop.nodes)[which % len(self.clients + self.loop.nodes)], size
        )

    def delivers_to(self, end: End, size: int) -> None:
        if end.can_deliver and not end.is_lost:
            self.loop.settle(lambda: end.deliver(size))

    @rule(which=PICK)
    @precondition(lambda self: self.here)
    def reads(self, which: int) -> None:
        self.loop.settle(self.here[which % len(self.here)].read)

    @rule(which=PICK, politely=st.booleans())
    @precondition(lambda self: self.here)
    def leaves(self, which: int, politely: bool) -> None:
        self.loop.settle(lambda: self.here[which % len(self.here)].leave(politely=politely))

    @rule(is_good=st.booleans(), turns=st.integers(0, 8))
    @precondition(lambda self: self.dials)
    def dials_end(self, is_good: bool, turns: int) -> None:
        self.loop.settle(lambda: self.dial_ends(is_good=is_good), turns)

    @property
    def dials(self) -> list["asyncio.Future[None]"]:
        return [dial for dial in self.loop.dials if not dial.done()]

    def dial_ends(self, *, is_good: bool) -> None:
        for dial in self.dials[:1]:
            if is_good:
                dial.set_result(None)
            else:
                dial.set_exception(ConnectionRefusedError())

    @rule(which=PICK, how=st.sampled_from(["well", "well", "busy", "broken"]), cut=PICK, size=PICK)
    @precondition(lambda self: self.nodes)
    def answers(self, which: int, how: str, cut: int, size: int) -> None:
        node = self.nodes[which % len(self.nodes)]
        self.answer(node, how, 1 + cut % (len(FRAMES) + 20))
        self.delivers_to(node, 1 + 4 * size)

    def answer(self, node: End, how: str, cut: int) -> None:
        if node.outbox.endswith(b"}"):
            stream = b'"stream":true' in node.outbox
            node.inbox += {"busy": BUSY, "broken": BROKEN}.get(how) or an_answer(stream, cut)
            self.loop.settle(node.read)

    @rule(which=PICK, politely=st.booleans())
    @precondition(lambda self: self.nodes)
    def breaks(self, which: int, politely: bool) -> None:
        self.loop.settle(lambda: self.nodes[which % len(self.nodes)].leave(politely=politely))

    @rule(seconds=st.sampled_from([0.05, 0.3, 4.0, 21.0]))
    def waits(self, seconds: float) -> None:
        self.loop.now_s += seconds
        self.loop.settle()

    @rule()
    def a_node_is_gone(self) -> None:
        node_id = next(iter(self.relay.fleet.directory.node_addresses()), NodeId(""))
        self.loop.settle(
            lambda: self.relay.upstream.fail_exchanges(node_id, self.loop.now_s, lambda: True)
        )

    @invariant()
    def nothing_went_wrong(self) -> None:
        assert not self.loop.wrong
        idle = self.relay.upstream._idle.values()
        kept = {connection._transport for some in idle for connection in some}
        assert all(node.reads_on for node in self.nodes if node in kept)

    def teardown(self) -> None:
        if self.ends_well:
            self.everybody_does_his_part()
            assert not self.is_busy, "a wake was lost"
        self.nobody_does_anything()
        self.everything_is_given_back()
        self.relay.deadlines.stop()
        self.relay.journal.close()
        self.folder.cleanup()
        self.loop.settle()
        self.loop.close()

    @property
    def is_busy(self) -> bool:
        return any(one.is_answering for one in self.relay.server.connections)

    def everybody_does_his_part(self) -> None:
        """Less than a second passes: pauses between two attempts are over, no deadline is."""
        for _ in range(90):
            while self.dials:
                self.loop.settle(lambda: self.dial_ends(is_good=True))
            for node in self.nodes:
                self.answer(node, "well", 500)
            for end in [*self.nodes, *self.here]:
                self.delivers_to(end, 99_999)
                self.loop.settle(end.read if end in self.clients else None)
            self.waits(0.01)

    def nobody_does_anything(self) -> None:
        for _ in range(SILENCE_STEPS):
            self.waits(5.0)

    def everything_is_given_back(self) -> None:
        relay = self.relay
        assert not self.loop.wrong
        assert not relay.server.connections
        assert not relay.server._census._by_address
        assert len(relay.upstream) == len(relay.deadlines) == 0
        assert relay.fleet.in_flight.requests == 0
        assert relay.pipeline.queue.depth == 0
        assert not asyncio.all_tasks(self.loop)
        assert not any(use.concurrent for use in relay.gate._usages.values())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

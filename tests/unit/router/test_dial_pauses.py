"""Waiting requests do not dial without end on a machine that lacks ports or descriptors."""

import asyncio
import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from isochrone.wire.ids import NodeId
from ops.bench.bench_router import route_table
from router.decide.liveness.dial_pauses import DIAL_AGAIN_S, EVERY_NODE, FORGET_S, DialPauses
from tests.unit.router.in_memory import FakeTransport, ManualLoop, RequestPath
from tests.unit.router.test_request_path import WHOLE, a_request

CLIENTS = 20
STEP_S = 0.01
N1, N2 = NodeId("n1"), NodeId("n2")


@pytest.mark.parametrize(
    ("lacking", "others_wait"), [(N1, False), (EVERY_NODE, True)], ids=["port", "descriptor"]
)
def test_one_request_dials_after_each_pause(lacking: NodeId, others_wait: bool) -> None:
    pauses, now_s = DialPauses(), 100.0
    assert not pauses
    assert not pauses.is_paused(N1, now_s)
    pauses.record_lack(lacking, now_s)
    assert pauses
    assert pauses.is_paused(N1, now_s)
    assert pauses.is_paused(N2, now_s) == others_wait
    now_s += DIAL_AGAIN_S
    assert not pauses.is_paused(N1, now_s)
    pauses.record_dial(N1, now_s)
    assert pauses.is_paused(N1, now_s), "two dial at once"
    assert pauses.record_open(N1)
    assert not pauses.is_paused(N1, now_s)
    assert not pauses.record_open(N1), "a lack ends twice"


def test_a_pause_of_a_node_that_is_not_wanted_is_dropped() -> None:
    pauses = DialPauses()
    pauses.record_lack(N1, 100.0)
    pauses.drop_old(100.0 + DIAL_AGAIN_S + FORGET_S)
    assert pauses
    pauses.drop_old(101.0 + DIAL_AGAIN_S + FORGET_S)
    assert not pauses


class CrowdedRouter:
    """A router whose machine lacks something while many clients want answers."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.loop = ManualLoop()
        self.path = RequestPath(self.loop, route_table(1, nodes), folder)
        self.dials_seen = 0
        self.clients: list[FakeTransport] = []

    def send(self, count: int) -> None:
        for _ in range(count):
            client = self.path.connect_client()
            self.clients.append(client)
            client.inbox = a_request(stream=False, close_after=False)
            self.loop.settle(partial(client.deliver, 9999))

    @property
    def new_dials(self) -> "list[asyncio.Future[None]]":
        dials = self.loop.dials[self.dials_seen :]
        self.dials_seen += len(dials)
        return dials

    def fail_dials(self, number: int, iterations: int = 50) -> int:
        """Fail each dial at once, as `connect` does, for some turns of the loop; count them."""
        count = 0
        for _ in range(iterations):
            for dial in self.new_dials:
                count += 1
                dial.set_exception(OSError(number, os.strerror(number)))
            self.loop.settle(iterations=1)
        return count

    def fail_for(self, number: int, seconds: float) -> int:
        """Fail the dials of this time; return how many there were."""
        count = 0
        for _ in range(round(seconds / STEP_S)):
            self.loop.now_s += STEP_S
            count += self.fail_dials(number)
        return count

    def open_dials(self) -> list[FakeTransport]:
        """Let the open dials succeed; return the nodes' ends."""
        before = len(self.loop.nodes)
        for dial in self.new_dials:
            dial.set_result(None)
        self.loop.settle(iterations=16)
        return self.loop.nodes[before:]

    def answer(self, node: FakeTransport) -> None:
        node.read()
        node.inbox = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(WHOLE), WHOLE)
        self.loop.settle(lambda: node.deliver(9999), iterations=16)

    def close(self) -> None:
        for client in self.clients:
            self.loop.settle(client.abort)
        self.path.deadlines.stop()
        self.loop.settle()
        self.path.journal.close()
        self.loop.close()


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[CrowdedRouter]:
    router = CrowdedRouter(tmp_path, nodes=1)
    yield router
    router.close()


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[CrowdedRouter]:
    router = CrowdedRouter(tmp_path, nodes=2)
    yield router
    router.close()


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EMFILE])
def test_a_crowd_dials_a_few_times_a_second(one_node: CrowdedRouter, number: int) -> None:
    one_node.send(CLIENTS)
    one_node.fail_dials(number)
    assert one_node.fail_for(number, 5.0) <= 5.0 / DIAL_AGAIN_S + 1


def test_requests_go_to_a_node_that_can_be_connected_to(two_nodes: CrowdedRouter) -> None:
    """Without waiting: a lack of ports concerns one address."""
    two_nodes.send(1)
    two_nodes.fail_dials(errno.EADDRNOTAVAIL, iterations=1)
    two_nodes.loop.settle()
    [node] = two_nodes.open_dials()
    assert node.outbox.endswith(b"}")
    two_nodes.send(CLIENTS)
    assert len(two_nodes.open_dials()) == CLIENTS


def test_a_free_connection_is_used_at_once(one_node: CrowdedRouter) -> None:
    """A pause keeps no request from a connection that another one has finished with."""
    one_node.send(1)
    [node] = one_node.open_dials()
    one_node.send(CLIENTS)
    one_node.fail_dials(errno.EADDRNOTAVAIL)
    for _ in range(CLIENTS):
        assert node.outbox.endswith(b"}"), "no request came over the connection"
        one_node.answer(node)
    assert not one_node.new_dials


def test_waiting_requests_dial_once_there_are_ports_again(one_node: CrowdedRouter) -> None:
    one_node.send(CLIENTS)
    one_node.fail_dials(errno.EADDRNOTAVAIL)
    opened = 0
    for _ in range(100):
        one_node.loop.now_s += STEP_S
        one_node.loop.settle()
        opened += len(one_node.open_dials())
    assert opened == CLIENTS

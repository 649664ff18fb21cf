"""What bodies may cost: held bytes, the parse budget, and how far a body may inflate."""

import gzip
import random
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers.routes import KeyEntry, KeyLimits, KeyTable
from ops.bench.bench_router import KEY, route_table
from router.config import RouterConfig
from router.dataplane.body_inflater import OUTPUT_SLICE_BYTES, BodyInflater
from router.dataplane.deadlines import Deadlines
from router.dataplane.http1 import HeaderFields
from router.dataplane.http_messages import HttpRequest, HttpResponse
from router.dataplane.server import ClientConnection, PublicServer
from router.decide.admission.body_limits import (
    BOMB_RATIO,
    BOMB_WEIGHT,
    INFLATED_WEIGHT,
    INFLATION_FREE_BYTES,
    LARGE_BODY_BYTES,
    PARSE_BURST_S,
    AnsweredBodies,
    HeldBytes,
    ParseBudget,
    inflated_bytes_max,
    inflated_charge,
)
from router.decide.admission.limits import LimitExceeded
from scheduler.decide.adapter_limits import AdapterLimits
from scheduler.decide.batch_limits import BatchLimits
from tests.unit.router.in_memory import FakeTransport, ManualLoop, RequestPath

MIB = 1024 * 1024
CONFIG = RouterConfig(
    processes=1,
    body_bytes_max=MIB,
    held_bytes_per_key_max=2 * MIB,
    held_bytes_per_network_max=3 * MIB,
    held_bytes_max=4 * MIB,
    parse_bytes_per_key_per_s=MIB,
)


def test_a_form_with_the_largest_file_passes_the_router() -> None:
    form_bytes = 64 * 1024
    config = RouterConfig()
    assert config.upload_bytes_max >= BatchLimits().file_bytes_max + form_bytes
    assert config.adapter_bytes_max >= AdapterLimits().file_bytes_max + form_bytes


def a_key(name: str) -> KeyEntry:
    return KeyEntry(key_id=KeyId(name), secret_sha256="", tenant_id=TenantId(name))


class Clients:
    """A server in memory, and clients of it whose key is named by a header."""

    def __init__(self, config: RouterConfig) -> None:
        self.loop = ManualLoop()
        self.bodies: list[bytes] = []
        self.errors: list[ApiError] = []
        self.server = PublicServer(
            config=config,
            authorize=self._authorize,
            handler=self._answer,
            encode_error=self._encode_error,
            deadlines=Deadlines(self.loop.time),
            clock=self.loop.time,
            unix_clock=self.loop.time,
        )

    def _authorize(self, method: bytes, path: str, fields: HeaderFields) -> KeyEntry | None:
        return a_key(fields[b"key"].decode())

    async def _answer(self, request: HttpRequest, client: ClientConnection) -> None:
        self.bodies.append(request.body)
        client.reply(HttpResponse(200, b""))

    def _encode_error(self, error: ApiError, request: HttpRequest) -> HttpResponse:
        self.errors.append(error)
        return HttpResponse(error.meaning.status, b"")

    def connect(self) -> FakeTransport:
        return FakeTransport(self.loop, self.server.make_connection())

    def send(self, client: FakeTransport, data: bytes) -> None:
        client.inbox = data
        # A body is inflated in as many iterations as it has slices.
        self.loop.settle(lambda: client.deliver(len(data)), MIB // OUTPUT_SLICE_BYTES + 8)

    def post(self, client: FakeTransport, body: bytes, *, sent: int, key: str = "a") -> None:
        """Announce a whole body, and send its head and its first `sent` bytes."""
        encoding = b"content-encoding: gzip\r\n" if body[:2] == b"\x1f\x8b" else b""
        head = b"POST / HTTP/1.1\r\nhost: x\r\nkey: %b\r\ncontent-length: %d\r\n%b\r\n"
        self.send(client, head % (key.encode(), len(body), encoding) + body[:sent])


@pytest.fixture
def clients() -> Iterator[Clients]:
    made = Clients(CONFIG)
    yield made
    for client in list(made.server.connections):
        made.loop.settle(client.abort)
    assert not made.server.connections
    assert made.server.bodies.held.total == len(made.server.bodies.held) == 0
    made.loop.close()


def limits_hit(clients: Clients) -> list[str]:
    return [error.limit for error in clients.errors if isinstance(error, LimitExceeded)]


def test_unfinished_bodies_of_one_key_hold_no_more_than_its_limit(clients: Clients) -> None:
    body = bytes(MIB)
    opened = [clients.connect() for _ in range(10)]
    for client in opened:
        clients.post(client, body, sent=MIB - 1)
    assert clients.server.bodies.held.total <= CONFIG.held_bytes_per_key_max
    assert limits_hit(clients) == ["held_bytes_of_key"] * 8
    assert clients.errors[0].code is ErrorCode.RATE_LIMITED
    assert clients.errors[0].retry_after_s
    # What was held is free again once a body is complete.
    clients.send(opened[0], body[-1:])
    assert clients.bodies == [body]
    assert clients.server.bodies.held.total == MIB - 1


def test_unfinished_bodies_of_many_keys_hold_no_more_than_the_network(clients: Clients) -> None:
    for number in range(10):
        clients.post(clients.connect(), bytes(MIB), sent=MIB - 1, key=f"k{number}")
    assert clients.server.bodies.held.total <= CONFIG.held_bytes_per_network_max
    assert limits_hit(clients) == ["held_bytes_of_network"] * 7


def test_a_body_of_many_small_chunks_is_one_buffer(clients: Clients) -> None:
    client = clients.connect()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nkey: a\r\ntransfer-encoding: chunked\r\n\r\n"
    clients.send(client, head + b"2\r\nab\r\n" * 3)
    assert clients.server.bodies.held.total == 6
    clients.send(client, b"2\r\nab\r\n0\r\n\r\n")
    assert clients.bodies == [b"ab" * 4]


def test_all_networks_together_are_limited_with_503() -> None:
    held = HeldBytes(2, 3, 4)
    held.hold("a", "n1", 2)
    held.hold("b", "n2", 2)
    with pytest.raises(LimitExceeded, match="all clients") as refused:
        held.hold("c", "n3", 1)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    held.release("a", "n1", 2)
    held.hold("c", "n3", 1)
    held.release("b", "n2", 2)
    held.release("c", "n3", 1)
    assert held.total == len(held) == 0


def test_bodies_being_answered_of_one_tenant_leave_memory_for_anothers() -> None:
    bodies, size = AnsweredBodies(8 * LARGE_BODY_BYTES), LARGE_BODY_BYTES
    acme, other = TenantId("acme"), TenantId("other")
    held = [bodies.hold(acme, size) for _ in range(4)]
    with pytest.raises(LimitExceeded, match="fill its share") as refused:
        bodies.hold(acme, size)
    assert refused.value.code is ErrorCode.OUT_OF_CAPACITY
    # Small ones are not counted, and another tenant's may have half of the rest.
    assert bodies.hold(acme, size - 1) == 0
    assert bodies.hold(other, 2 * size) == 2 * size
    for count in held:
        bodies.release(acme, count)
    assert bodies.hold(acme, 3 * size) == 3 * size


def a_bomb(inflated_bytes: int) -> bytes:
    """Return a gzip body just under the ratio that is allowed."""
    noise = random.Random(1).randbytes(inflated_bytes // 60)
    return gzip.compress(noise + bytes(inflated_bytes - len(noise)))


def test_of_many_bombs_of_one_key_one_is_inflated(clients: Clients) -> None:
    bomb = a_bomb(MIB)
    opened = [clients.connect() for _ in range(32)]
    for client in opened:
        # All heads are accepted before the first body is complete.
        clients.post(client, bomb, sent=1)
    for client in opened:
        clients.send(client, bomb[1:])
    assert [len(body) for body in clients.bodies] == [MIB]
    assert limits_hit(clients) == ["parse_budget"] * 31
    # Other keys are served, and the heads of this one are refused before their bodies.
    clients.post(clients.connect(), b"{}", sent=2, key="b")
    assert clients.bodies[1:] == [b"{}"]
    clients.post(clients.connect(), bomb, sent=0)
    assert limits_hit(clients) == ["parse_budget"] * 32
    # A refusal says when the key is served again.
    wait_s = clients.errors[-1].retry_after_s
    assert wait_s is not None
    clients.loop.now_s += wait_s + 0.001
    clients.post(clients.connect(), bomb, sent=len(bomb))
    assert len(clients.bodies) == 3


def test_a_bomb_over_the_ratio_is_refused_after_a_part_of_it(clients: Clients) -> None:
    bomb = gzip.compress(bytes(MIB))
    clients.post(clients.connect(), bomb, sent=len(bomb))
    assert [error.code for error in clients.errors] == [ErrorCode.TOO_LARGE]
    assert not clients.bodies


def test_a_small_compressed_body_is_inflated_at_once_and_charged_by_its_size(
    clients: Clients,
) -> None:
    body = b"{" + b" " * 2000 + b"}"
    for _ in range(50):
        clients.post(clients.connect(), gzip.compress(body), sent=10_000)
    assert clients.bodies == [body] * 50
    assert not clients.errors


def test_a_budget_refuses_a_key_that_owes_more_than_the_burst() -> None:
    budget, key = ParseBudget(100.0), KeyId("a")
    for now_s in (0.0, 1.0):
        budget.check(key, now_s)
        budget.charge(key, 100 * PARSE_BURST_S, now_s)
    with pytest.raises(LimitExceeded) as refused:
        budget.check(key, 1.0)
    assert refused.value.retry_after_s == pytest.approx(PARSE_BURST_S - 1)
    budget.check(KeyId("b"), 1.0)
    budget.charge(key, -100 * PARSE_BURST_S, 1.0)
    budget.check(key, 1.0)


def test_a_budget_forgets_keys_that_owe_nothing() -> None:
    budget = ParseBudget(100.0)
    for number in range(100_000):
        budget.charge(KeyId(str(number)), 100, float(number))
    assert len(budget) < 2100


def test_the_ratio_counts_from_a_free_size_up_to_the_limit_of_a_body() -> None:
    assert inflated_bytes_max(10, MIB) == INFLATION_FREE_BYTES
    assert inflated_bytes_max(10, 1000) == 1000
    assert inflated_bytes_max(2000, MIB) == 200_000
    assert inflated_bytes_max(MIB, MIB) == MIB
    assert INFLATED_WEIGHT > 1


@pytest.mark.parametrize("size", [0, 1, OUTPUT_SLICE_BYTES, 3 * OUTPUT_SLICE_BYTES + 1])
@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_body_is_inflated_in_bounded_slices(size: int, encoding: bytes) -> None:
    for body in (bytes(size), random.Random(size).randbytes(size)):
        packed = gzip.compress(body) if encoding == b"gzip" else zlib.compress(body)
        inflater = BodyInflater(packed, encoding, size)
        before, is_done = 0, False
        while not is_done:
            is_done = inflater.step()
            assert inflater.inflated_bytes - before <= OUTPUT_SLICE_BYTES
            before = inflater.inflated_bytes
        assert inflater.inflated() == body


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_compressed_body_that_is_cut_short_or_followed_by_more_is_refused(cut: int) -> None:
    packed = gzip.compress(random.Random(1).randbytes(300_000))
    for wrong in (packed[:-cut], packed + b"x" * cut, b"", packed + bytes(100_000)):
        inflater = BodyInflater(wrong, b"gzip", MIB)
        with pytest.raises(ApiError, match="cut short"):
            while not inflater.step():
                pass


def test_a_key_over_its_rate_is_refused_before_a_costly_body_is_read(tmp_path: Path) -> None:
    loop = ManualLoop()
    table = route_table(1, 2)
    key = replace(next(iter(table.keys)), limits=KeyLimits(requests_per_min=1))
    router = RequestPath(loop, replace(table, keys=KeyTable.of([key])), tmp_path)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
    costly = (
        b"content-length: 100000\r\n",
        b"transfer-encoding: chunked\r\n",
        b"content-encoding: gzip\r\ncontent-length: 9\r\n",
    )

    def answers() -> list[bytes]:
        found = []
        for framing in (*costly, b"content-length: 9\r\n"):
            client = router.connect_client()
            client.inbox = head % KEY.encode() + framing + b"\r\n"
            loop.settle(partial(client.deliver, len(client.inbox)))
            found.append(client.outbox[9:12])
            loop.settle(client.abort)
        return found

    assert answers() == [b""] * 4
    router.limiter.admit(key, 0, loop.time(), loop.time())
    assert answers() == [b"429"] * 3 + [b""]
    loop.settle(router.deadlines.stop)
    loop.close()


def test_a_bomb_of_the_largest_size_takes_less_than_a_hundredth_of_the_time() -> None:
    """Inflating and parsing 8 MiB takes up to 65 ms, which others must not see at their p99."""
    body_bytes_max, parse_bytes_per_s, longest_s = 8 * 1024**2, 32 * 1024**2, 0.065
    for ratio in (BOMB_RATIO + 1, 50, 99):
        charge = inflated_charge(body_bytes_max // ratio, body_bytes_max)
        assert charge == BOMB_WEIGHT * body_bytes_max
        assert longest_s < 0.01 * charge / parse_bytes_per_s
    # JSON text compresses less, and short bodies cost nothing worth limiting.
    assert inflated_charge(body_bytes_max // 10, body_bytes_max) == INFLATED_WEIGHT * body_bytes_max
    assert inflated_charge(100, 9_000) == INFLATED_WEIGHT * 9_000

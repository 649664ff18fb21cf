"""The prefill leg of a request whose engine dies, and is replaced, while the request waits."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_transfer
from nodeagent import metrics
from nodeagent.decide.requests.handoff import PeerReplicaLost
from nodeagent.decide.requests.prefill_leg import DecodeLoad, TransferRate
from nodeagent.disaggregation.handshake_leg import HandshakeLeg
from nodeagent.disaggregation.kv_fetch import PrefixFetcher
from nodeagent.disaggregation.transfer_leg import LegRequest, PrefillPeers, TransferLeg
from nodeagent.drivers.handshake import NixlHandshake

REPLICAS = [
    PeerReplica(ReplicaId(name), NodeId("n"), "http://n", 100, 10, 100) for name in ("d", "p")
]


class ClosedSession:
    """An engine's session, closed after `answers` requests have found no engine."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self.closed = not answers

    def get(self, path: str) -> AbstractAsyncContextManager[Any]:
        return self._request()

    def delete(self, path: str) -> AbstractAsyncContextManager[Any]:
        return self._request()

    def _request(self) -> AbstractAsyncContextManager[Any]:
        if self.closed:
            raise RuntimeError("Session is closed")
        self._answers -= 1
        self.closed = not self._answers
        raise aiohttp.ServerDisconnectedError


class LateEngine:
    """An engine that has not read the request yet when it is first named."""

    closed = False

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown
        self.has_begun = False
        self.is_asked = asyncio.Event()

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=404)

    @asynccontextmanager
    async def delete(self, path: str) -> AsyncIterator[Any]:
        self.unknown -= 1
        self.is_asked.set()
        self.has_begun = self.unknown < 0
        yield SimpleNamespace(status=204 if self.has_begun else 404)


def a_leg(engine: object) -> TransferLeg:
    async def announce(replica_id: ReplicaId) -> None:
        raise AssertionError("no replica may be tried")

    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=REPLICAS, load=cast(Any, None), announce=announce,
    )  # fmt: skip
    return TransferLeg(
        cast(aiohttp.ClientSession, engine),
        cast(PrefillPeers, None),
        TransferRate(),
        request,
        lambda: 0.0,
        cast(PrefixFetcher, None),
    )


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.disaggregation.transfer_leg.BEGIN_PAUSE_S", 0.0)


async def test_a_leg_ends_without_an_error_once_its_engine_is_replaced() -> None:
    for answers in range(3):
        leg = a_leg(ClosedSession(answers))
        await leg._task
        await leg.close()
        assert leg.received is None


async def test_a_request_that_its_engine_reads_late_is_told_to_begin() -> None:
    """It would wait for its KV forever, and its agent would kill the engine for that."""
    for unknown in (0, 1, 30):
        engine = LateEngine(unknown)
        leg = a_leg(engine)
        await leg._task
        assert engine.has_begun
        await leg.close()


async def test_a_leg_whose_request_has_ended_waits_for_no_engine() -> None:
    """Else its request counts as in flight, without a token, and the agent kills the engine."""
    engine = LateEngine(unknown=1_000_000)
    leg = a_leg(engine)
    await engine.is_asked.wait()
    asked = engine.unknown
    await leg.close()
    assert not engine.has_begun
    assert engine.unknown >= asked - 1


class HungEngine:
    """An engine that takes requests, and answers none."""

    closed = False

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.orders = 0

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Any]:
        self.is_asked.set()
        await asyncio.Event().wait()
        yield None

    @asynccontextmanager
    async def delete(self, path: str) -> AsyncIterator[Any]:
        self.orders += 1
        raise TimeoutError
        yield None


async def test_a_leg_whose_request_has_ended_orders_a_hung_engine_once() -> None:
    """The request kept its seat for minutes: each order waits for seconds."""
    engine = HungEngine()
    leg = a_leg(engine)
    await engine.is_asked.wait()
    await leg.close()
    assert engine.orders == 1


def legs(outcome: str) -> float:
    """Return how many prefill legs have had an outcome."""
    return float(metrics.PREFILL_LEGS.labels("chat", outcome)._value.get())


async def test_a_leg_whose_request_has_ended_is_not_counted_as_failed() -> None:
    """Four of ten legs seemed to fail where clients left."""
    failed, ended = legs("failed"), legs("ended")
    engine = HungEngine()
    leg = a_leg(engine)
    await engine.is_asked.wait()
    await leg.close()
    assert (legs("failed"), legs("ended")) == (failed, ended + 1)
    leg = a_leg(LateEngine(0))
    await leg._task
    await leg.close()
    assert (legs("failed"), legs("ended")) == (failed + 1, ended + 1)


class DescribingEngine(LateEngine):
    """An engine that knows the prompt, and begins when it is ordered to."""

    @asynccontextmanager
    async def get(self, path: str) -> AsyncIterator[Any]:
        expected = kv_transfer.ExpectedPrompt(
            prompt_tokens=1001, blocks=62, cached_blocks=2, held_blocks=3, block_tokens=16
        )

        async def pieces() -> AsyncIterator[bytes]:
            yield msgspec.json.encode(expected)

        yield SimpleNamespace(status=200, content=SimpleNamespace(iter_any=pieces))


class HungPeers:
    """A prefill replica whose node answers a probe, and nothing else."""

    async def queued_tokens(
        self, replicas: Sequence[PeerReplica], timeout_s: float = 0.0
    ) -> dict[ReplicaId, int]:
        return {ReplicaId("p"): 0}

    @asynccontextmanager
    async def relay(self, *request: object) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield None


async def test_a_leg_that_is_late_ends_before_its_deadline() -> None:
    """The prompt was refused after the deadline, though reading it takes a tenth of a second."""
    engine, clock = DescribingEngine(0), asyncio.get_running_loop().time
    announced: list[ReplicaId] = []

    async def announce(replica_id: ReplicaId) -> None:
        announced.append(replica_id)

    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=REPLICAS, load=lambda: DecodeLoad(0, 8), announce=announce,
        deadline_s=clock() + 0.4,
    )  # fmt: skip
    leg = TransferLeg(
        cast(aiohttp.ClientSession, engine),
        cast(PrefillPeers, HungPeers()),
        TransferRate(),
        request,
        clock,
        cast(PrefixFetcher, None),
    )
    async with asyncio.timeout(1.5):
        await engine.is_asked.wait()
    await leg.close()
    assert (announced, engine.has_begun) == (["p", "d"], True)
    # What may have arrived before that is no cached part of the prompt.
    assert (leg.received, leg.held_tokens) == (None, 48)


class UnaskedPeers(HungPeers):
    """Prefill replicas whose nodes may not be asked."""

    async def queued_tokens(
        self, replicas: Sequence[PeerReplica], timeout_s: float = 0.0
    ) -> dict[ReplicaId, int]:
        raise AssertionError("their queues decide nothing")


@pytest.mark.parametrize(
    ("decoding", "token_us", "outcome"), [(0, 100, "idle"), (8, 1, "short")], ids=("idle", "short")
)
async def test_a_prompt_that_is_read_here_whatever_the_queues_waits_for_no_node(
    decoding: int, token_us: int, outcome: str
) -> None:
    """The engine of a short prompt waited for answers that could change nothing."""
    before, posted = legs(outcome), asyncio.Event()

    async def announce(replica_id: ReplicaId) -> None:
        raise AssertionError("no replica may be tried")

    @asynccontextmanager
    async def post(body: bytes) -> AsyncIterator[Any]:
        posted.set()
        yield SimpleNamespace(status=200)

    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=[
            PeerReplica(ReplicaId(name), NodeId("n"), "http://n", 1000, 100, token_us)
            for name in ("d", "p")
        ],
        load=lambda: DecodeLoad(0, decoding), announce=announce,
    )  # fmt: skip
    engine, peers, clock = DescribingEngine(0), cast(PrefillPeers, UnaskedPeers()), lambda: 0.0
    embedded = TransferLeg(
        cast(aiohttp.ClientSession, engine),
        peers,
        TransferRate(),
        request,
        clock,
        cast(PrefixFetcher, None),
    )
    await embedded._task
    await embedded.close()
    async with HandshakeLeg(NixlHandshake(), peers, TransferRate(), request, clock).answer(post):
        pass
    assert (engine.has_begun, posted.is_set()) == (True, True)
    assert legs(outcome) == before + 2


async def test_a_leg_of_another_vendor_that_is_late_ends_before_its_deadline() -> None:
    clock, announced = asyncio.get_running_loop().time, []

    async def announce(replica_id: ReplicaId) -> None:
        announced.append(replica_id)

    @asynccontextmanager
    async def post(body: bytes) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=200)

    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=REPLICAS, load=lambda: DecodeLoad(0, 8), announce=announce,
        deadline_s=clock() + 0.4,
    )  # fmt: skip
    peers = cast(PrefillPeers, HungPeers())
    leg = HandshakeLeg(NixlHandshake(), peers, TransferRate(), request, clock)
    async with asyncio.timeout(1.5), leg.answer(post) as answer:
        assert answer.status == 200
    assert announced == ["p", "d"]
    assert leg.received is None


@pytest.fixture
def short_legs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up legs within a millisecond."""
    monkeypatch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 0.001)
    monkeypatch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_FACTOR", 0.01)


class RefusingPeers(HungPeers):
    """A prefill replica whose node refuses."""

    @asynccontextmanager
    async def relay(self, *request: object) -> AsyncIterator[Any]:
        raise PeerReplicaLost("refused")
        yield None


@pytest.mark.usefixtures("short_legs")
@pytest.mark.parametrize("peers", [HungPeers(), RefusingPeers()], ids=["timeout", "late refusal"])
async def test_a_leg_that_took_too_long_counts_with_its_time(peers: HungPeers) -> None:
    """Each next prompt waited as long for nothing, behind a node that refuses just in time, too."""
    announced: list[ReplicaId] = []

    async def announce(replica_id: ReplicaId) -> None:
        announced.append(replica_id)

    engine, rate, seconds = DescribingEngine(0), TransferRate(), itertools.count(1.0)
    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=REPLICAS, load=lambda: DecodeLoad(0, 8), announce=announce,
    )  # fmt: skip
    leg = TransferLeg(
        cast(aiohttp.ClientSession, engine),
        cast(PrefillPeers, peers),
        rate,
        request,
        lambda: next(seconds),
        cast(PrefixFetcher, None),
    )
    await engine.is_asked.wait()
    await leg.close()
    assert (announced, engine.has_begun) == (["p", "d"], True)
    # A second by the clock of this test.
    assert rate.after_ms(944, 100, next(seconds)) == 1000


async def test_a_leg_of_another_vendor_whose_request_has_ended_is_not_counted_as_failed() -> None:
    failed, ended, tried = legs("failed"), legs("ended"), asyncio.Event()

    async def announce(replica_id: ReplicaId) -> None:
        tried.set()

    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=REPLICAS, load=lambda: DecodeLoad(0, 8), announce=announce,
    )  # fmt: skip
    peers = cast(PrefillPeers, HungPeers())
    leg = HandshakeLeg(NixlHandshake(), peers, TransferRate(), request, lambda: 0.0)

    async def answer() -> None:
        async with leg.answer(cast(Any, None)):
            raise AssertionError("the prompt is not read")

    request_task = asyncio.create_task(answer())
    await tried.wait()
    request_task.cancel()
    await asyncio.wait({request_task})
    assert (legs("failed"), legs("ended")) == (failed, ended + 1)


@pytest.mark.usefixtures("short_legs")
async def test_a_leg_of_another_vendor_that_ran_out_of_time_counts_with_it() -> None:
    """While a prefill engine hung, each prompt waited for it: two seconds and more."""
    announced: list[ReplicaId] = []

    async def announce(replica_id: ReplicaId) -> None:
        announced.append(replica_id)

    @asynccontextmanager
    async def post(body: bytes) -> AsyncIterator[Any]:
        yield SimpleNamespace(status=200)

    rate, seconds = TransferRate(), itertools.count(1.0)
    request = LegRequest(
        transfer="f" * 32, deployment="chat", path="/v1/completions", body=b"{}", sent={},
        replicas=REPLICAS, load=lambda: DecodeLoad(0, 8), announce=announce,
    )  # fmt: skip
    peers = cast(PrefillPeers, HungPeers())
    leg = HandshakeLeg(NixlHandshake(), peers, rate, request, lambda: next(seconds))
    async with leg.answer(post) as answer:
        assert answer.status == 200
    assert announced == ["p", "d"]
    # Its clock goes on by a second with each look.
    assert rate.after_ms(100, 100, next(seconds)) >= 1000

"""An answer of two legs: what its node counts of it."""

from collections.abc import AsyncIterator, Mapping
from time import monotonic
from types import SimpleNamespace
from typing import Any, Final

import pytest
from aiohttp import web

from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv.kv_sharing import KV_FOUND
from isochrone.wire.kv.kv_transfer import ReceivedBlocks
from nodeagent import metrics
from nodeagent.api.request.prefill_legs import PrefillLegs, apply_leg, report_found
from nodeagent.decide.requests.admission import ReplicaAdmission
from nodeagent.decide.requests.kv_quota import NO_KV_LIMITS, KvQuota
from nodeagent.disaggregation.transfer_leg import LegRequest
from tests.builders import a_spec


def waits_counted() -> float:
    (family,) = metrics.DECODE_WAIT_SECONDS.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_count"))


async def chunks() -> AsyncIterator[bytes]:
    yield b"{}"


@pytest.mark.parametrize(
    ("content_type", "counted"), [("text/event-stream", 1), ("application/json", 0)]
)
async def test_the_wait_for_the_first_token_is_known_of_streams_only(
    content_type: str, counted: int
) -> None:
    received = ReceivedBlocks(blocks=1, transfer_bytes=1, cached_tokens=0)
    leg: Any = SimpleNamespace(received=received, received_s=monotonic())
    response = web.StreamResponse(headers={"content-type": content_type})
    before = waits_counted()
    body = apply_leg(leg, response, chunks())
    assert waits_counted() - before == counted
    assert b"".join([chunk async for chunk in body])


def test_blocks_of_a_broken_transfer_are_not_found_in_a_cache() -> None:
    leg: Any = SimpleNamespace(received=None, held_tokens=48, expected=None, fetched=None)
    response = web.StreamResponse(headers={KV_FOUND: "device=384;host=16"})
    report_found(leg, response)
    assert response.headers[KV_FOUND] == "device=32;host=16"


async def test_blocks_of_a_broken_transfer_are_not_in_the_usage() -> None:
    async def answer() -> AsyncIterator[bytes]:
        yield b'{"usage":{"prompt_tokens":400,"prompt_tokens_details":{"cached_tokens":384}}}'

    leg: Any = SimpleNamespace(received=None, held_tokens=48)
    response = web.StreamResponse(headers={"content-length": "76"})
    body = b"".join([chunk async for chunk in apply_leg(leg, response, answer())])
    assert b'"cached_tokens":48}' in body
    assert "content-length" not in response.headers


NOTHING: Any = None
NO_HEADERS: Final[Mapping[str, str]] = {}


def open_leg(
    deployment: str,
    prefill_ms: int,
    admitted_s: float,
    more: Mapping[str, str] = NO_HEADERS,
) -> None:
    """Open the leg of a request that takes so long to read here."""
    readers = [
        PeerReplica(ReplicaId(name), NodeId("n"), "n:1", 100, prefill_ms, 20_000)
        for name in ("r1", "p")
    ]
    named = {
        headers.REPLICA: "r1",
        headers.PREFILL_REPLICAS: format_peer_replicas(readers),
    }
    request: Any = SimpleNamespace(path="/v1/completions", headers={**named, **more})
    admission = ReplicaAdmission(10_000)
    replica: Any = SimpleNamespace(spec=a_spec("r1", name=deployment), admission=admission)
    engine: Any = SimpleNamespace(handshake=None, sends_kv=True, http=None)
    reservation = admission.admit(100, 8, now_s=admitted_s)
    assert reservation is not None
    legs = PrefillLegs(NOTHING, KvQuota(NO_KV_LIMITS), NOTHING)
    legs.open(request, replica, engine, b"{}", reservation, ())


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[LegRequest]:
    """The legs that are opened."""
    requests: list[LegRequest] = []
    monkeypatch.setattr(
        "nodeagent.api.request.prefill_legs.TransferLeg",
        lambda http, peers, rate, leg_request, *others: requests.append(leg_request),
    )
    return requests


async def test_the_deadline_counts_from_the_admission(opened: list[LegRequest]) -> None:
    """A leg that was late left no time to read the prompt here if the request had waited for a
    seat before it."""
    admitted_s = monotonic() - 8.0
    open_leg("chat", 4000, admitted_s, {headers.DEADLINE_MS: "9000"})
    assert [leg.deadline_s for leg in opened] == [admitted_s + 9.0]


def test_prompts_are_counted_by_deployment(opened: list[LegRequest]) -> None:
    """With two of them nobody could tell which one's prompts were read where."""

    def counts() -> list[float]:
        labels = metrics.PREFILL_LEGS.labels
        return [labels(name, "short")._value.get() for name in ("chat", "code")]

    before = counts()
    for deployment in ("code", "chat", "code"):
        open_leg(deployment, 1, monotonic())
    assert counts() == [before[0] + 1, before[1] + 2]
    open_leg("code", 4000, monotonic())
    assert [leg.deployment for leg in opened] == ["code"]

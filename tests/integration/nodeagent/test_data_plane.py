"""The data-plane server with mock engines: admission, refusals, handoffs, loads and failures."""

import asyncio
import hashlib
import io
import os
import random
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.typedefs import Middleware

from isochrone.service.network.http_server import serve_http
from isochrone.wire.http import headers
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import Generation, NodeId, ReplicaId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile, EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec, Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.api.data_plane import DataPlaneServer
from nodeagent.api.metrics_page import add_metrics
from nodeagent.api.peer_replicas import LOAD_MAX_AGE_S, PeerReplicaClient
from nodeagent.api.request.answer_relay import ENGINE_LOST_EVENT
from nodeagent.config import NodeConfig
from nodeagent.decide.requests.admission import TokenReservation
from nodeagent.decide.requests.preemption import PREEMPTIONS_MAX
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.driver import EngineCommand, StorePorts
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.host.engines.engine_record import EngineRecord
from nodeagent.supervisor import Supervisor
from tests.builders import a_spec
from tests.postgres import a_folder
from tests.system.harness import until

SALTS = CacheSalts(b"a secret of this node")


class Node(NamedTuple):
    """A supervisor and its data-plane server, without a scheduler."""

    supervisor: Supervisor
    http: aiohttp.ClientSession
    address: str
    artifact: Artifact

    def spec(self, name: str = "r1", in_flight: int = 10_000, **options: str) -> ReplicaSpec:
        engine = EngineSettings(
            driver="mock",
            kv_memory_bytes=1,
            tokens_in_flight_max=in_flight,
            options={"itl_ms": "20", **options},
        )
        return a_spec(name, engine=engine, artifact=self.artifact)

    async def warm(self, spec: ReplicaSpec) -> None:
        self.supervisor.start(spec)

        async def is_warm() -> bool:
            return self.supervisor.states()[spec.replica_id] is ReplicaState.WARM

        await until("warm", is_warm, 15.0)

    async def idle(self, name: str = "r1") -> bool:
        load = self.supervisor.replicas[ReplicaId(name)].admission.load()
        return load == headers.ReportedLoad(0, 0, 0, 0, 0)

    def peer(self, name: str) -> headers.PeerReplica:
        """Describe a replica as a router does: ten tokens to prefill, 1 ms per queued token."""
        return headers.PeerReplica(
            ReplicaId(name), NodeId(self.address), self.address, 10, 10, 1000
        )

    def ask(
        self,
        name: str = "r1",
        tokens: int = 3,
        queue_tokens_max: int | None = None,
        peers: Sequence[headers.PeerReplica] = (),
        sent: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> Any:
        required = {headers.REPLICA: name, headers.TOKENS: f"p=10;o={tokens}"}
        sent = {**required, **(sent or {})}
        if queue_tokens_max is not None:
            sent[headers.QUEUE_TOKENS_MAX] = str(queue_tokens_max)
        if peers:
            sent[headers.PEER_REPLICAS] = format_peer_replicas(peers)
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": tokens,
            "stream": True,
            **extra,
        }
        return self.http.post("/v1/chat/completions", json=body, headers=sent)


@asynccontextmanager
async def a_node(
    load_timeout_s: float = 600.0,
    commands: Mapping[str, ConfiguredCommand] | None = None,
    spans: Middleware | None = None,
    store_ports: StorePorts | None = None,
    stall_s: float = 3.0,
    attach: Callable[[web.Application], None] = lambda _: None,
    canary_interval_s: float = 10.0,
) -> AsyncIterator[Node]:
    folder = a_folder("iso-")
    (folder / "model").mkdir()
    (folder / "model" / "m.gguf").write_bytes(b"GGUF")
    file = ArtifactFile(path="m.gguf", size_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    source = f"file:{folder / 'model'}"
    artifact = Artifact(source=source, files=(file,), digest=manifest_digest([file]))
    config = NodeConfig(
        name="n1",
        schedulers=(),
        state=folder,
        address="",
        stall_s=stall_s,
        load_timeout_s=load_timeout_s,
        canary_interval_s=canary_interval_s,
    )
    supervisor = Supervisor(
        config=config,
        artifacts=ArtifactStore(
            folder / "artifacts",
            ArtifactSources(private=True, hf_url=""),
            1 << 30,
            link=TransferLink(0, time.monotonic),
        ),
        engines=EngineProcesses(folder / "engines", 1, commands=commands, store_ports=store_ports),
        clock=time.monotonic,
        rng=random.Random(1),
        on_change=lambda: None,
    )
    peers = PeerReplicaClient(None, time.monotonic)
    app = DataPlaneServer(supervisor, peers, SALTS, spans=spans).app()
    attach(app)
    async with (
        serve_http(app, "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        yield Node(supervisor, http, f"127.0.0.1:{port}", artifact)
    await supervisor.shut_down(keep_engines=False)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def long_probe_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a peer's node enough time to answer a probe on a busy machine."""
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with a_node() as node:
        yield node


async def test_a_request_is_refused_if_the_queue_is_longer_than_accepted(node: Node) -> None:
    await node.warm(node.spec())
    reservation = node.supervisor.replicas[ReplicaId("r1")].admission.admit(100, 1, 60)
    assert reservation is not None
    async with node.ask(queue_tokens_max=59) as response:
        assert (response.status, response.headers[headers.REFUSED]) == (429, "queued")
        load = headers.parse_load(response.headers[headers.LOAD])
        assert load == headers.ReportedLoad(100, 1, 1, 0, 60)
    for most in (60, None):
        async with node.ask(queue_tokens_max=most) as response:
            assert response.status == 200
            await response.read()
    reservation.release()
    await until("tokens are released", node.idle, 5.0)


async def test_a_tenant_that_fills_the_engine_is_refused_and_another_is_not(node: Node) -> None:
    await node.warm(node.spec(sequences="4"))
    admission = node.supervisor.replicas[ReplicaId("r1")].admission
    while admission.admit(10, 10, generates_for="flood") is not None:
        assert admission.running <= 6
    for tenant, status in (("flood", 429), ("small", 200)):
        async with node.ask(sent={headers.CACHE_SALT: tenant}) as response:
            assert response.status == status
            assert response.headers.get(headers.REFUSED) == ("busy" if status == 429 else None)
            await response.read()


async def test_a_client_takes_the_place_of_an_item_which_the_engine_ends(node: Node) -> None:
    await node.warm(node.spec(sequences="1", itl_ms="200"))
    admission = node.supervisor.replicas[ReplicaId("r1")].admission
    counted = metrics.PREEMPTED_ITEMS.labels("running")
    lost = metrics.PREEMPTED_TOKENS.labels("prompt")
    before, lost_before = counted._value.get(), lost._value.get()

    async def item(preemptions: int, tokens: int) -> tuple[int, str]:
        sent = {headers.PREEMPTIONS: str(preemptions), headers.PRIORITY: headers.PRIORITY_LOWEST}
        async with node.ask(tokens=tokens, sent=sent, stream=False) as response:
            await response.read()
            return response.status, response.headers.get(headers.REFUSED, "")

    async def is_running() -> bool:
        return admission.running == 1

    first = asyncio.create_task(item(PREEMPTIONS_MAX - 1, 1_000))
    await until("the item runs", is_running, 5.0)
    async with node.ask() as response:
        assert response.status == 200
        await response.read()
    assert await first == (429, headers.PREEMPTED)
    assert (counted._value.get() - before, lost._value.get() - lost_before) == (1, 10)
    await until("tokens are released", node.idle, 5.0)
    # After so many times it finishes, and the client waits.
    last = asyncio.create_task(item(PREEMPTIONS_MAX, 3))
    await until("the item runs", is_running, 5.0)
    async with node.ask() as response:
        assert response.status == 200
        await response.read()
    assert await last == (200, "")
    assert counted._value.get() - before == 1
    await until("tokens are released", node.idle, 5.0)


async def test_a_ping_reports_the_load_of_other_routers(node: Node) -> None:
    await node.warm(node.spec())
    admission = node.supervisor.replicas[ReplicaId("r1")].admission
    reservation = admission.admit(100, 7, 60, router="a", prefill_ms=1e9, now_s=time.monotonic())
    assert reservation is not None

    async def others(router: str) -> tuple[int, int]:
        async with node.http.get("/ping", headers={headers.ROUTER: router}) as ping:
            load = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
        return load.others_pending_prefill_tokens, load.others_decode_tokens

    assert await others("a") == (0, 0)
    assert await others("b") == (60, 7)
    assert await others("") == (-1, -1)
    reservation.release()
    assert await others("b") == (0, 0)


async def test_a_ping_says_how_long_a_token_of_a_prompt_takes(node: Node) -> None:
    await node.warm(node.spec())
    for number in range(1, 5):
        # Without streaming, the first byte comes with the last token.
        for stream, itl_ms in ((True, 0), (False, 200)):
            sent = {headers.TOKENS: f"p={100 * number};o=3", headers.ROUTER: "a"}
            mock = {"ttft_ms": 100 * number, "itl_ms": itl_ms}
            async with node.ask(sent=sent, stream=stream, mock=mock) as answer:
                assert answer.status == 200
                await answer.read()
    async with node.http.get("/ping") as ping:
        load = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
    # One millisecond, and what a busy machine adds to a short or a long prompt; whole answers take
    # 2 to 5.
    assert 500_000 < load.prefill_ns_per_token < 1_900_000


async def test_a_request_is_handed_off_to_a_replica_that_starts_sooner(node: Node) -> None:
    """The target is on the same node or on another; without a better one there is no handoff."""
    async with a_node() as other:
        await asyncio.gather(
            node.warm(node.spec()), node.warm(node.spec("r2")), other.warm(other.spec("r3"))
        )
        peers = [node.peer("r1"), node.peer("r2"), other.peer("r3")]

        async def handed_off_to(most: int | None = None) -> str:
            async with node.ask(queue_tokens_max=most, peers=peers) as response:
                assert response.status == 200
                assert headers.parse_load(response.headers[headers.LOAD]) is not None
                assert (await response.text()).endswith("data: [DONE]\n\n")
                return str(response.headers.get(headers.HANDOFF_REPLICA, ""))

        def queue(on: Node, name: str, tokens: int) -> TokenReservation:
            reservation = on.supervisor.replicas[ReplicaId(name)].admission.admit(tokens, 1, tokens)
            assert reservation is not None
            return reservation

        assert await handed_off_to() == ""
        queued = [queue(node, "r1", 300)]
        assert await handed_off_to() == "r2"
        queued.append(queue(node, "r2", 200))
        assert await handed_off_to() == "r3"
        assert await handed_off_to(most=50) == "r3"
        queued.append(queue(other, "r3", 298))
        await asyncio.sleep(2 * LOAD_MAX_AGE_S)
        assert await handed_off_to() == "r2"
        queued.append(queue(node, "r2", 98))
        assert await handed_off_to() == ""
        async with node.ask(queue_tokens_max=50, peers=peers) as response:
            assert response.headers[headers.REFUSED] == headers.QUEUED
        for reservation in queued:
            reservation.release()
        for on, name in ((node, "r1"), (node, "r2"), (other, "r3")):
            await until("tokens are released", partial(on.idle, name), 5.0)
        assert node.supervisor.handoffs_in_progress == 0


async def test_a_handoff_and_its_end_are_announced_before_the_answer(node: Node) -> None:
    """The router hears at once which replica has its request."""
    await asyncio.gather(node.warm(node.spec()), node.warm(node.spec("r2", in_flight=100)))
    admission = {name: node.supervisor.replicas[ReplicaId(name)].admission for name in ("r1", "r2")}
    queued = admission["r1"].admit(300, 1, 300)
    assert queued is not None
    peers = format_peer_replicas([node.peer("r1"), node.peer("r2")])
    body = msgspec.json.encode(
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: n\r\ncontent-type: application/json\r\n"
        f"{headers.REPLICA}: r1\r\n{headers.TOKENS}: p=10;o=3\r\n"
        f"{headers.PEER_REPLICAS}: {peers}\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )

    async def response_heads() -> list[str]:
        """Return the status of each head, with the replica that it names."""
        host, _, port = node.address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        whole = (await reader.read()).decode()
        writer.close()
        assert whole.endswith("data: [DONE]\n\n\r\n0\r\n\r\n")
        found = re.findall(r"HTTP/1.1 (\d+)|x-isochrone-handoff-replica: (\w+)", whole)
        return [status or replica for status, replica in found]

    assert await response_heads() == ["103", "r2", "200", "r2"]
    # The peer is as quick as it seemed, but full.
    full = admission["r2"].admit(95, 1, 0)
    assert full is not None
    assert await response_heads() == ["103", "r2", "103", "r1", "200"]
    queued.release()
    assert await response_heads() == ["200"]
    full.release()


async def test_a_handoff_ends_with_its_caller_and_fails_with_its_engine(
    node: Node,
) -> None:
    async with a_node() as other:
        await asyncio.gather(node.warm(node.spec()), other.warm(other.spec("r3")))
        peers = [node.peer("r1"), other.peer("r3")]
        reservation = node.supervisor.replicas[ReplicaId("r1")].admission.admit(300, 1, 300)
        assert reservation is not None
        async with node.ask(tokens=3000, peers=peers) as response:
            await response.content.readany()
            assert response.headers[headers.HANDOFF_REPLICA] == "r3"
            assert node.supervisor.handoffs_in_progress == 1
            assert not await other.idle("r3")
        await until("the cancellation was relayed", partial(other.idle, "r3"), 5.0)
        peer_replica = other.supervisor.replicas[ReplicaId("r3")]
        engine = peer_replica.engine
        assert engine is not None

        async def has_noticed() -> bool:
            return peer_replica.engine is not engine

        async with node.ask(tokens=3000, peers=peers) as response:
            await response.content.readany()
            os.kill(engine.pid, signal.SIGKILL)
            assert (await response.read()).endswith(ENGINE_LOST_EVENT)
        # Until the peer has noticed, a request is lost there, and not tried here too: it may be
        # what made the engine fail.
        await until("the peer noticed that its engine is gone", has_noticed, 15.0)
        # The addressed replica serves the request, unless the machine stood still for so long that
        # the peer has another engine by the time it is asked.
        async with node.ask(peers=peers) as response:
            assert response.status == 200
            has_restarted = peer_replica.is_serving
            assert has_restarted or headers.HANDOFF_REPLICA not in response.headers
            await response.read()
        reservation.release()
    # The peer's node is gone: the probe costs no more than its timeout.
    reservation = node.supervisor.replicas[ReplicaId("r1")].admission.admit(300, 1, 300)
    assert reservation is not None
    async with node.ask(peers=peers) as response:
        assert (response.status, headers.HANDOFF_REPLICA in response.headers) == (200, False)
        await response.read()
    reservation.release()
    await until("tokens are released", node.idle, 5.0)


async def test_every_answer_carries_the_load_and_releases_its_tokens_once(node: Node) -> None:
    await node.warm(node.spec())
    async with node.ask(tokens=3) as response:
        assert response.status == 200
        assert headers.parse_load(response.headers[headers.LOAD]) == headers.ReportedLoad(
            0, 3, 1, 0, 0
        )
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    await until("tokens are released", node.idle, 5.0)


async def test_each_refusal_has_its_own_word(node: Node) -> None:
    async with node.ask("unknown") as response:
        assert (response.status, response.headers[headers.REFUSED]) == (404, "unknown_replica")
    node.supervisor.start(node.spec("slow", fail_load="1"))
    async with node.ask("slow") as response:
        assert (response.status, response.headers[headers.REFUSED]) == (503, "loading")
    await node.warm(node.spec(in_flight=100))
    async with node.ask(tokens=80) as first:
        await first.content.readany()
        # The answer's load is that after the prefill, like that of a ping.
        async with node.http.get("/ping") as ping:
            pinged = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
        assert headers.parse_load(first.headers[headers.LOAD]) == pinged
        assert (pinged.running, pinged.pending_prefill_tokens, pinged.prefill_tokens) == (1, 0, 0)
        async with node.ask(tokens=80) as second:
            assert (second.status, second.headers[headers.REFUSED]) == (429, "busy")
            assert second.headers["retry-after"] == "1"
        tombstone = Tombstone(replica_id=ReplicaId("r1"), generation=Generation(9), reason="test")
        node.supervisor.end(tombstone)
        async with node.ask() as third:
            assert third.headers[headers.REFUSED] == "draining"
        asked = {headers.REPLICA: "r1"}
        async with node.http.get("/ping", headers=asked) as ping:
            assert ping.headers[headers.REFUSED] == "draining"
        # The request in flight is finished before the replica stops.
        assert (await first.text()).endswith("data: [DONE]\n\n")
    async with node.http.get("/ping") as ping:
        assert ping.status == 204
        # A draining replica gets no requests, so its load is not reported.
        assert ping.headers[headers.LOADS] == ""

    async def is_stopped() -> bool:
        return node.supervisor.states()[ReplicaId("r1")] is ReplicaState.STOPPED

    await until("stopped", is_stopped, 15.0)


async def test_an_engine_without_memory_is_reported_as_full_before_a_request(node: Node) -> None:
    await node.warm(node.spec(in_flight=500, memory_full="1"))

    async def is_full() -> bool:
        sent = {headers.ROUTER: "a"}
        async with node.http.get("/ping", headers=sent) as ping:
            load = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
        return load.others_decode_tokens >= 500

    await until("reported as full", is_full, 5.0)
    async with node.ask() as response:
        assert (response.status, response.headers[headers.REFUSED]) == (429, "busy")
        load = headers.parse_load(response.headers[headers.LOAD])
        assert load is not None and load.decode_tokens >= 500


async def test_a_disconnected_caller_frees_the_engine_and_its_tokens(node: Node) -> None:
    await node.warm(node.spec())
    async with node.ask(tokens=3000) as response:
        await response.content.readany()
        assert not await node.idle()
    await until("tokens are released", node.idle, 5.0)
    engine = node.supervisor.replicas[ReplicaId("r1")].engine
    assert engine is not None

    async def engine_is_idle() -> bool:
        stats = await engine.stats()
        return stats is not None and stats.running == 0

    await until("the engine stopped", engine_is_idle, 5.0)


async def kill_engine(node: Node) -> None:
    engine = node.supervisor.replicas[ReplicaId("r1")].engine
    assert engine is not None
    os.kill(engine.pid, signal.SIGKILL)


async def is_restarted(node: Node) -> bool:
    replica = node.supervisor.replicas[ReplicaId("r1")]
    return replica.state is ReplicaState.WARM and len(replica.failure_times) == 1


async def test_an_engine_that_dies_during_a_stream_ends_it_with_an_error_event(node: Node) -> None:
    """The router must not take an incomplete answer for a complete one, and learns the cause."""
    await node.warm(node.spec())
    async with node.ask(tokens=3000) as response:
        await response.content.readany()
        await kill_engine(node)
        assert (await response.read()).endswith(ENGINE_LOST_EVENT)
    await until("tokens are released", node.idle, 5.0)
    await until("started again", lambda: is_restarted(node), 15.0)


async def test_an_engine_that_the_agent_ends_blames_no_request(node: Node) -> None:
    """What is left of a stream when the drain timeout ends is cut, like any broken stream."""
    await node.warm(node.spec())
    async with node.ask(tokens=3000) as response:
        await response.content.readany()
        node.supervisor.replicas[ReplicaId("r1")].end_ordered.set()
        await kill_engine(node)
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await response.read()


async def test_a_failure_during_a_trial_blames_the_suspect_and_not_what_runs_or_waits(
    node: Node,
) -> None:
    await node.warm(node.spec())
    suspect = {headers.SUSPECT: "1"}
    poison = {"ttft_ms": 1000.0, "crash_at_token": 0.0}
    replica = node.supervisor.replicas[ReplicaId("r1")]

    async def send(**extra: Any) -> tuple[int, bool]:
        async with node.ask(sent=suspect, **extra) as response:
            return response.status, headers.ENGINE_LOST in response.headers

    async with node.ask(tokens=3000) as streaming:
        await streaming.content.readany()
        on_trial = asyncio.create_task(send(mock=poison))

        async def is_on_trial() -> bool:
            return replica.trial_lock.locked()

        await until("the poison is on trial", is_on_trial)
        waiting = [asyncio.create_task(send()) for _ in range(8)]
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await streaming.read()
    assert await on_trial == (502, True)
    # Some of them are sent before the engine's end is known.
    for status, is_blamed in await asyncio.gather(*waiting):
        assert status in (502, 503) and not is_blamed
    await until("tokens are released", node.idle, 5.0)
    await until("started again", lambda: is_restarted(node), 15.0)
    assert await send() == (200, False)
    assert not replica.trial_lock.locked()


async def test_an_error_of_the_engine_is_relayed_unchanged(node: Node) -> None:
    await node.warm(node.spec())
    async with node.ask(tokens=10_000_000) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "context_length_exceeded"
    async with node.http.post(
        "/v1/chat/completions", data=b"{", headers={headers.REPLICA: "r1"}
    ) as response:
        assert response.status == 400
    await until("tokens are released", node.idle, 5.0)


async def test_the_metrics_page_includes_each_warm_engine(node: Node) -> None:
    await node.warm(node.spec("r1"))
    await node.warm(node.spec("r2"))
    async with node.ask("r2", tokens=2) as response:
        await response.read()
    private_app = web.Application()
    add_metrics(private_app, node.supervisor)
    async with (
        serve_http(private_app, "127.0.0.1", 0) as port,
        node.http.get(f"http://127.0.0.1:{port}/metrics") as private,
        node.http.get("/metrics") as page,
    ):
        assert private.status == 200
        text = await page.text()
    assert 'isochrone_node_replicas{state="warm"} 2.0' in text
    # One more each: the warm-up token.
    assert 'isochrone_engine_tokens_out_total{replica="r2"} 3' in text
    assert 'isochrone_engine_tokens_out_total{replica="r1"} 1' in text


UNSAFE_BODIES = (
    b'{"cache_salt": "acme", "\\ud800": 1, "messages": []}',
    b'{"cache_salt": "acme", "messages": ' + b"[" * 970 + b"]" * 970 + b"}",
    b'{"cache_salt": "acme", "messages": "\xff"}',
    '{"cache_salt": "acme", "messages": []}'.encode("utf-16"),
    b'\xef\xbb\xbf{"cache_salt": "acme"}',
    b'["cache_salt"]',
    b"",
)
"""Bodies that a node cannot salt, though an engine may be able to read them."""


async def test_the_cache_salt_is_in_the_body_for_an_engine_that_needs_it_there(node: Node) -> None:
    await node.warm(node.spec())
    engine = node.supervisor.replicas[ReplicaId("r1")].engine
    assert engine is not None
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with serve_http(app, "127.0.0.1", 0) as port:
        await engine.http.close()
        engine._http = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        engine.driver = DRIVERS["vllm"]
        salted = {headers.CACHE_SALT: "acme"}
        async with node.ask(cache_salt="other", sent=salted) as response:
            assert response.status == 200
        async with node.ask(cache_salt="other", priority=-9) as response:
            assert response.status == 200
        sorted_queue = msgspec.structs.replace(
            engine.record.command, arguments=("vllm", "--scheduling-policy", "priority")
        )
        engine.record = msgspec.structs.replace(engine.record, command=sorted_queue)
        async with node.ask(priority=-9, sent={headers.PRIORITY: "10"}) as response:
            assert response.status == 200
        address = "/v1/chat/completions"
        sent = {headers.REPLICA: "r1", "content-type": "application/json", **salted}
        for body in UNSAFE_BODIES:
            async with node.http.post(address, data=body, headers=sent) as response:
                assert response.status == 400, body[:40]
                assert "cannot use the request body" in (await response.json())["error"]["message"]
    acme, without_tenant, less_urgent = seen
    assert acme["cache_salt"] == SALTS.salt_of("acme")
    assert acme["max_tokens"] == 3
    assert without_tenant["cache_salt"] == SALTS.salt_of("")
    # A client cannot put itself before others, nor where the engine does not sort its queue.
    assert (without_tenant["priority"], less_urgent["priority"]) == (0, 40)


async def test_first_tokens_in_time_and_too_late_are_counted(node: Node) -> None:
    await node.warm(node.spec())

    def counted(outcome: str) -> float:
        return float(metrics.TTFT_OBJECTIVES.labels(outcome)._value.get())

    met, missed = counted("met"), counted("missed")
    for sent in ({}, {headers.TTFT_MS: "600000"}, {headers.TTFT_MS: "0"}):
        async with node.ask(sent=sent) as response:
            assert response.status == 200
            await response.read()
    assert (counted("met") - met, counted("missed") - missed) == (1, 1)


async def test_a_reused_pid_is_not_signalled_and_orphans_of_an_engine_are_killed(
    tmp_path: Path,
) -> None:
    """After a crash of the agent, the leader's pid may be reused, or only its children may run."""
    engines = EngineProcesses(tmp_path / "engines", 1)

    def left_behind(name: str, pid: int, started: int) -> None:
        folder = tmp_path / "engines" / name
        folder.mkdir()
        command = EngineCommand(arguments=("x",), base_url="http://localhost")
        record = EngineRecord(pid=pid, started=started, command=command, spec=a_spec(name))
        (folder / "process.json").write_bytes(msgspec.json.encode(record))

    other = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    left_behind("reused", other.pid, started=1)
    parent = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        "sleep 60 >/dev/null 2>&1 & echo $!",
        start_new_session=True,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    orphan = int(await parent.stdout.readline())
    await parent.wait()
    left_behind("orphaned", parent.pid, started=1)
    assert engines.survivors() == []
    assert other.returncode is None

    async def orphan_is_gone() -> bool:
        stat = Path(f"/proc/{orphan}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    await until("the orphan is killed", orphan_is_gone, 5.0)
    other.kill()
    await other.wait()


async def test_a_large_sound_reaches_the_engine_as_it_was_sent(node: Node) -> None:
    spec = msgspec.structs.replace(node.spec(), kind="transcription")
    await node.warm(spec)
    engine = node.supervisor.replicas[spec.replica_id].engine
    assert engine is not None
    assert await engine.canary("chat"), "the assignment's kind counts"
    form = aiohttp.FormData({"model": "m", "response_format": "text"})
    form.add_field("file", io.BytesIO(bytes(9_000_000)), filename="a.wav", content_type="audio/wav")
    sent = {headers.REPLICA: "r1", headers.TOKENS: "p=10;o=3"}
    async with node.http.post("/v1/audio/transcriptions", data=form, headers=sent) as response:
        assert (response.status, response.content_type) == (200, "text/plain")
        assert (await response.text()).endswith(" t8999\n")
    await until("tokens are released", node.idle, 5.0)

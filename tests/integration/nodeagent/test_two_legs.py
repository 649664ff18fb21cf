"""A request with two legs over three nodes: prefill replicas read its prompt, another answers."""

import asyncio
import hashlib
import os
import random
import re
import secrets
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.service.tracing import names
from isochrone.service.tracing.recorder import SpanRecorder
from isochrone.service.tracing.spans import Span
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.http.trace_context import TraceContext
from isochrone.wire.ids import DeviceId, Generation, NodeId, ReplicaId
from isochrone.wire.kv import kv_transfer
from isochrone.wire.kv.transfer_frames import TransferHead, encode_head
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile, EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec, Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.api.peer_replicas import LOAD_MAX_AGE_S
from nodeagent.api.request.request_spans import trace_requests
from nodeagent.decide.replicas.sleep import SleepOutcome
from nodeagent.host.awake_memory import AwakeMemory
from nodeagent.managed_replica import ManagedReplica
from ops.golden import tiny
from tests.builders import a_spec
from tests.chaos.cable import a_cable
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.system.harness import until

TOKENS = 24
NAMES = ("d", "p1", "p2")
SLOW_LINK_BYTES_PER_S = 125_000


def artifact_of(folder: Path) -> Artifact:
    files = tuple(
        ArtifactFile(
            path=path.name,
            size_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(folder.iterdir())
    )
    return Artifact(source=f"file:{folder}", files=files, digest=manifest_digest(files))


def spec_of(name: str, artifact: Artifact) -> ReplicaSpec:
    engine = EngineSettings(
        driver="embedded",
        kv_memory_bytes=4 * 1024 * 1024,
        tokens_in_flight_max=100_000,
        options={"batch_tokens_max": "32"},
    )
    return a_spec(name, engine=engine, artifact=artifact, context_tokens=512)


class Answer(NamedTuple):
    """What a router sees of one request."""

    heads: list[str]
    """Statuses, and the replicas that the interim responses name."""
    body: str

    @property
    def text(self) -> str:
        return "".join(re.findall(r'"text":"((?:[^"\\]|\\.)*)"', self.body))

    @property
    def cached_tokens(self) -> int:
        return int(re.findall(r'"cached_tokens":(\d+)', self.body)[-1])


class TwoLegs(NamedTuple):
    """Up to three nodes, of which the first one decodes."""

    nodes: list[Node]

    def idle(self) -> bool:
        for node, name in zip(self.nodes, NAMES, strict=False):
            admission = node.supervisor.replicas[ReplicaId(name)].admission
            if admission.load() != headers.ReportedLoad(0, 0, 0, 0, 0):
                return False
        return True

    async def is_idle(self) -> bool:
        return self.idle()

    def peers(self, *names: str) -> list[PeerReplica]:
        """Describe the decode replica, slow at reading, and these prefill replicas."""
        by_name = dict(zip(NAMES, self.nodes, strict=False))
        return [
            PeerReplica(
                ReplicaId(name),
                NodeId(by_name[name].address),
                by_name[name].address,
                200,
                4000 if name == "d" else 20,
                20_000 if name == "d" else 100,
            )
            for name in names
        ]

    async def ask(
        self,
        prompt: list[int],
        *candidates: str,
        stream: bool = False,
        tenant: str = "t",
        then: Callable[[], object] | None = None,
        bad: PeerReplica | None = None,
        deadline_ms: int = 0,
        traceparent: str = "",
        at: str = "d",
        fields: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Send a request as a router does, without hiding interim responses; call `then` after.

        `bad` is another prefill replica. Replica `at` may hand the request off to `d`. The body has
        `fields`, too.
        """
        options: dict[str, Any] = {
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **(fields or {}),
        }
        if stream:
            options["stream_options"] = {"include_usage": True}
        body = msgspec.json.encode({"prompt": prompt, **options})
        lines = {
            "host": "n",
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            headers.REPLICA: at,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={len(prompt)};o={TOKENS}",
            headers.PENDING_PREFILL_TOKENS: str(len(prompt)),
            headers.PREFILL_MS: "4000",
        }
        if deadline_ms:
            lines[headers.DEADLINE_MS] = str(deadline_ms)
        if traceparent:
            lines[headers.TRACEPARENT] = traceparent
        if candidates or bad is not None:
            peers = [*self.peers(at, *candidates), *([bad] if bad is not None else [])]
            lines[headers.PREFILL_REPLICAS] = format_peer_replicas(peers)
        if at != "d":
            lines[headers.PEER_REPLICAS] = format_peer_replicas(self.peers(at, "d"))
        host, _, port = self.nodes[NAMES.index(at)].address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
            if then is not None:
                then()
            whole = (await reader.read()).decode()
        finally:
            writer.close()
        found = re.findall(r"HTTP/1.1 (\d+)|x-isochrone-prefill-replica: (\w+)", whole)
        return Answer([status or name for status, name in found], whole)


@pytest.fixture(autouse=True)
def long_probe_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a peer's node enough time to answer a probe on a busy machine."""
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 20.0)


@pytest.fixture
async def spans() -> list[Span]:
    """The spans that the nodes of `fleet` have recorded."""
    return []


@pytest.fixture
async def fleet(spans: list[Span]) -> AsyncIterator[TwoLegs]:
    recorder = SpanRecorder(spans.extend, time.monotonic, time.time, secrets.token_hex)
    folder = Path(tempfile.mkdtemp(prefix="iso-"))
    tiny.write_folder(folder, "qwen3")
    tiny.write_tokenizer(folder)
    try:
        async with AsyncExitStack() as stack:
            nodes = [
                await stack.enter_async_context(
                    a_node(spans=trace_requests(recorder, NodeId(name)))
                )
                for name in NAMES
            ]
            artifact = artifact_of(folder)
            for node, name in zip(nodes, NAMES, strict=True):
                node.supervisor.start(spec_of(name, artifact))
            for node in nodes:
                await until("warm", partial(is_warm, node), 120.0)
            yield TwoLegs(nodes)
    finally:
        shutil.rmtree(folder)


async def is_warm(node: Node) -> bool:
    return all(replica.is_serving for replica in node.supervisor.replicas.values())


def a_prompt() -> list[int]:
    return [secrets.randbelow(60) + 1 for _ in range(200)]


def outcomes() -> Counter[str]:
    """Return how many requests had each outcome of their prefill leg, of all deployments."""
    (family,) = metrics.PREFILL_LEGS.collect()
    counts = Counter[str]()
    for sample in family.samples:
        if sample.name.endswith("_total"):
            counts[sample.labels["outcome"]] += int(sample.value)
    return counts


def refused_formats(purpose: str) -> float:
    """Return how often KV was refused because of its model or format."""
    return float(metrics.KV_OTHER_FORMAT.labels(purpose)._value.get())


def prefilled() -> float:
    return outcomes().get("prefill", 0.0)


async def test_two_legs_answer_as_one_replica_does_whatever_fails(
    fleet: TwoLegs, spans: list[Span]
) -> None:
    """One test, because starting engines takes most of its time."""
    await check_answers(fleet)
    assert not spans
    await check_trace(fleet, spans)
    await check_choices(fleet)
    await check_sleep(fleet)
    await check_handoff(fleet)
    await check_cancel(fleet)
    await check_bad_peers(fleet)
    await check_slow_link(fleet)
    await check_losses(fleet)
    await check_loss_of_the_decode_engine(fleet)
    await check_drain(fleet)


def window_transfers() -> list[float]:
    labels = metrics.KV_WINDOW_TRANSFERS.labels
    return [labels(direction)._value.get() for direction in ("sent", "received")]


async def check_answers(fleet: TwoLegs) -> None:
    moved = window_transfers()
    for stream in (False, True):
        prompt, before = a_prompt(), prefilled()
        alone = await fleet.ask(prompt, tenant="alone", stream=stream)
        assert (alone.heads, alone.cached_tokens) == (["200"], 0)
        answer = await fleet.ask(prompt, "p1", "p2", stream=stream)
        assert answer.heads[0] == "103"
        assert (answer.heads[1] in ("p1", "p2"), answer.heads[2:]) == (True, ["200"])
        assert answer.text == alone.text != ""
        # The decode engine found all of it in its cache, the prefill engine nothing.
        assert answer.cached_tokens == 0
        assert prefilled() == before + 1
        await until("tokens are released", fleet.is_idle, 10.0)
    # All nodes are in this process.
    assert window_transfers() == [count + 2 for count in moved]
    # Now the decode engine itself has the prompt, so nothing is transferred.
    again = await fleet.ask(prompt, "p1", "p2", stream=True)
    assert (again.heads, again.text) == (["200"], answer.text)
    assert again.cached_tokens >= 190


async def check_trace(fleet: TwoLegs, spans: list[Span]) -> None:
    """A traced request has a span for each step of both legs, on both nodes."""
    client = TraceContext("ab" * 16, "cd" * 8)
    await fleet.ask(a_prompt(), "p1", stream=True, traceparent=client.traceparent)
    await until("tokens are released", fleet.is_idle, 10.0)
    assert {span.context.trace_id for span in spans} == {client.trace_id}
    of = {(str(span.attributes.get(names.LEG, "")), span.name): span for span in spans}
    serve, other = of[("", "serve")], of[("prefill", "serve")]
    own = {span.name: span for span in spans if span.parent_id == serve.context.span_id}
    assert [*sorted(own)] == ["admission", "ask prefill nodes", "decode", "prefill"]
    assert serve.parent_id == client.span_id
    assert other.parent_id == own["prefill"].context.span_id
    assert of[("", "transfer kv")].parent_id == own["prefill"].context.span_id
    under = {span.name for span in spans if span.parent_id == own["decode"].context.span_id}
    assert under == {"relay", "engine wait kv", "engine queue", "engine prefill"}
    elsewhere = {span.name for span in spans if span.parent_id == other.context.span_id}
    assert elsewhere == {"admission", "compute kv"}
    computing = of[("", "compute kv")]
    steps = [span for span in spans if span.parent_id == computing.context.span_id]
    assert {span.name for span in steps} == {"engine queue", "engine prefill", "relay"}
    assert all(step.began_s < step.ended_s for step in steps)
    assert (serve.attributes[names.NODE], other.attributes[names.NODE]) == ("d", "p1")
    assert serve.attributes[names.PREFILL_OUTCOME] == "prefill"
    assert own["prefill"].attributes[names.REPLICA] == "p1"
    moved = of[("", "transfer kv")].attributes
    assert int(moved[names.KV_BYTES]) > 0 and int(moved[names.KV_BLOCKS]) > 0
    assert float(own["decode"].attributes[names.FIRST_CHUNK_S]) > 0
    assert float(own["decode"].attributes[names.DECODE_WAIT_S]) >= 0
    assert not any(span.error for span in spans)
    spans.clear()
    # A prompt that is not worth a leg says why.
    await fleet.ask([1, 2, 3], "p1", traceparent=client.traceparent)
    (short,) = [span for span in spans if span.name == "serve"]
    assert short.attributes[names.PREFILL_OUTCOME] == "short"
    engine = {f"engine {step}" for step in ("wait kv", "queue", "prefill", "decode")}
    ours = {"serve", "admission", "decode", "relay"}
    assert {span.name for span in spans} == ours | engine


async def check_choices(fleet: TwoLegs) -> None:
    short = await fleet.ask([1, 2, 3], "p1")
    assert short.heads == ["200"]
    # The prefill replica has a longer queue than the decode replica.
    admission = fleet.nodes[1].supervisor.replicas[ReplicaId("p1")].admission
    queue = admission.admit(90_000, 1, 90_000)
    assert queue is not None
    await asyncio.sleep(2 * LOAD_MAX_AGE_S)
    before = outcomes()
    assert (await fleet.ask(a_prompt(), "p1")).heads == ["200"]
    assert outcomes() == {**before, "busy": before.get("busy", 0) + 1}
    queue.release()
    await asyncio.sleep(2 * LOAD_MAX_AGE_S)
    await until("tokens are released", fleet.is_idle, 10.0)


async def check_sleep(fleet: TwoLegs) -> None:
    """A request wakes its replica and the one that reads its prompt; if that has no memory to wake,
    the prompt is read where it is answered."""
    prompts = [a_prompt() for _ in range(2)]
    alone = [await fleet.ask(prompt, tenant="alone") for prompt in prompts]
    memories = [node.supervisor.awake for node in fleet.nodes[:2]]
    with pytest.MonkeyPatch.context() as patch:
        for prompt, expected, reader_bytes in zip(prompts, alone, (1 << 40, 0), strict=True):
            for memory, name, free_bytes in zip(
                memories, NAMES, (1 << 40, reader_bytes), strict=False
            ):
                budgets = partial(asyncio.sleep, 0, {DeviceId("cpu"): free_bytes})
                patch.setattr(memory, "_budgets", budgets)
                await until(f"{name} sleeps", partial(falls_asleep, memory, ReplicaId(name)), 30.0)
            before = outcomes()
            answer = await fleet.ask(prompt, "p1")
            assert answer.text == expected.text != ""
            wakes = reader_bytes > 0
            assert answer.heads == ["103", "p1", *([] if wakes else ["103", "d"]), "200"]
            outcome = "prefill" if wakes else "failed"
            assert outcomes() == {**before, outcome: before.get(outcome, 0) + 1}
            awake = [memory.asleep_count() == 0 for memory in memories]
            assert awake == [True, wakes]
        patch.setattr(
            memories[1], "_budgets", partial(asyncio.sleep, 0, {DeviceId("cpu"): 1 << 40})
        )
        async with memories[1].use(ReplicaId("p1")):
            pass
    await until("tokens are released", fleet.is_idle, 10.0)


async def falls_asleep(memory: AwakeMemory, replica_id: ReplicaId) -> bool:
    resident = memory._residents[replica_id]
    assert resident.engine is not None
    if await resident.engine.fall_asleep(30.0) is not SleepOutcome.ASLEEP:
        return False
    resident.is_awake = False
    return True


async def check_handoff(fleet: TwoLegs) -> None:
    """The replica that takes over a request has its prompt read, and the router is told where."""
    prompt, before = a_prompt(), prefilled()
    alone = await fleet.ask(prompt, tenant="alone")
    admission = fleet.nodes[NAMES.index("p2")].supervisor.replicas[ReplicaId("p2")].admission
    queued = admission.admit(60_000, 1, 60_000)
    assert queued is not None
    answer = await fleet.ask(prompt, "p1", at="p2")
    queued.release()
    assert (answer.heads, answer.text) == (["103", "103", "p1", "200"], alone.text)
    assert "x-isochrone-handoff-replica: d" in answer.body
    assert prefilled() == before + 1
    await until("tokens are released", fleet.is_idle, 10.0)


async def check_cancel(fleet: TwoLegs) -> None:
    """A request whose router disconnects ends on both legs, at whatever moment."""
    for delay in range(12):
        asking = asyncio.create_task(fleet.ask(a_prompt(), "p1", "p2", stream=True))
        for _ in range(delay * 3):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    await until("tokens are released", fleet.is_idle, 10.0)
    for node in fleet.nodes:
        (replica,) = node.supervisor.replicas.values()
        assert replica.engine is not None
        await until("no block is held", partial(holds_nothing, replica.engine.http), 10.0)


async def holds_nothing(http: Any) -> bool:
    async with http.get("/stats") as response:
        stats = await response.json()
        return not (stats["kv_transfer_held_blocks"] or stats["kv_transfers_waiting"])


async def check_losses(fleet: TwoLegs) -> None:
    """Prefill engines are killed at different moments: no answer is lost or different."""
    for moment in (0, 2):
        prompt = a_prompt()
        alone = await fleet.ask(prompt, tenant="alone")
        victim = fleet.nodes[1].supervisor.replicas[ReplicaId("p1")]
        assert victim.engine is not None
        pid = victim.engine.record.pid
        loop = asyncio.get_running_loop()
        kill = partial(loop.call_later, 0.02 * moment, os.kill, pid, signal.SIGKILL)
        answer = await fleet.ask(prompt, "p1", "p2", then=kill)
        assert answer.heads[-1] == "200"
        assert answer.text == alone.text != ""
        await until("tokens are released", fleet.is_idle, 30.0)
        if not moment:
            await until("restarted", partial(is_restarted, fleet.nodes[1], pid), 120.0)
    # Without any prefill replica the decode replica answers alone.
    prompt = a_prompt()
    alone = await fleet.ask(prompt, tenant="alone")
    gone = PeerReplica(ReplicaId("p9"), NodeId("x"), "127.0.0.1:9", 200, 20, 100)
    answer = await fleet.ask(prompt, bad=gone)
    assert (answer.heads, answer.text) == (["200"], alone.text)
    await until("tokens are released", fleet.is_idle, 10.0)


async def check_bad_peers(fleet: TwoLegs) -> None:
    """A prefill replica that sends nothing useful costs a bounded time, and no token."""
    for fault in ("silent", "trickling", "endless", "foreign", "other format"):
        prompt, refused = a_prompt(), refused_formats("prefill")
        alone = await fleet.ask(prompt, tenant="alone")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 1.0)
            async with a_bad_peer(fault) as bad, asyncio.timeout(60):
                answer = await fleet.ask(prompt, "p1", bad=bad)
        assert (answer.heads[-1], answer.text) == ("200", alone.text), fault
        assert "liar" in answer.heads, fault
        # After wrong bytes the decode engine has begun: no other replica reads the prompt in vain.
        assert ("p1" in answer.heads) == (fault in ("silent", "other format")), fault
        assert refused_formats("prefill") - refused == (fault == "other format")
    await until("tokens are released", fleet.is_idle, 10.0)
    (replica,) = fleet.nodes[0].supervisor.replicas.values()
    assert replica.engine is not None
    await until("no block is held", partial(holds_nothing, replica.engine.http), 20.0)


async def check_slow_link(fleet: TwoLegs) -> None:
    """Over 1 Mbit/s a leg takes a second, or its time limit; a deadline ends both legs."""
    port = int(fleet.nodes[1].address.rpartition(":")[2])
    decoder = fleet.nodes[0].supervisor.replicas[ReplicaId("d")].engine
    reader = fleet.nodes[1].supervisor.replicas[ReplicaId("p1")].engine
    assert decoder is not None
    assert reader is not None
    async with a_cable(port) as cable:
        cable.down.bytes_per_s = SLOW_LINK_BYTES_PER_S
        address = f"127.0.0.1:{cable.port}"
        slow = PeerReplica(ReplicaId("p1"), NodeId(address), address, 200, 20, 100)
        for limit_s, outcome in ((0.3, "failed"), (20.0, "prefill")):
            prompt, before = a_prompt(), outcomes()
            alone = await fleet.ask(prompt, tenant="alone")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", limit_s)
                answer = await fleet.ask(prompt, bad=slow)
            assert (answer.heads[-1], answer.text) == ("200", alone.text)
            # Also if some blocks came before the time was up.
            assert (answer.cached_tokens, "device=" in answer.body) == (0, False)
            assert outcomes() == {**before, outcome: before.get(outcome, 0) + 1}
        late = await fleet.ask(a_prompt(), bad=slow, deadline_ms=100)
        assert late.heads[-1] == "429", late
        assert late.text == ""
    await until("tokens are released", fleet.is_idle, 10.0)
    for engine in (decoder, reader):
        await until("no block is held", partial(holds_nothing, engine.http), 20.0)


@asynccontextmanager
async def a_bad_peer(fault: str) -> AsyncIterator[PeerReplica]:
    """Run a node that looks like the best prefill replica of the PoP."""
    load = headers.ReportedLoad(0, 0, 0, 0, 0, 0, 0)

    async def pong(request: web.Request) -> web.Response:
        return web.Response(
            status=204, headers={headers.LOADS: headers.format_loads({ReplicaId("liar"): load})}
        )

    async def read(request: web.Request) -> web.StreamResponse:
        assert len(request.headers[kv_transfer.KV_FORMAT]) == 32
        if fault == "other format":
            return web.Response(status=kv_transfer.OTHER_FORMAT_STATUS)
        response = web.StreamResponse(headers={"content-type": kv_transfer.CONTENT_TYPE})
        await response.prepare(request)
        head = TransferHead(fingerprint=b"f" * 16, block_bytes=64, first_block=0, blocks=12)
        if fault == "foreign":
            await response.write(encode_head(head))
        while fault in ("trickling", "endless"):
            # 1 Mbit/s would be faster than the first.
            await response.write(bytes(1 if fault == "trickling" else 65536))
            await asyncio.sleep(0.05 if fault == "trickling" else 0)
        if fault == "silent":
            await asyncio.sleep(60)
        return response

    app = web.Application()
    app.router.add_get("/ping", pong)
    app.router.add_post("/v1/completions", read)
    async with serve_http(app, "127.0.0.1", 0) as port:
        address = f"127.0.0.1:{port}"
        yield PeerReplica(ReplicaId("liar"), NodeId(address), address, 200, 1, 5)


async def check_loss_of_the_decode_engine(fleet: TwoLegs) -> None:
    """The router gets an answer or the loss in bounded time, and nothing stays anywhere."""
    victim = fleet.nodes[0].supervisor.replicas[ReplicaId("d")]
    assert victim.engine is not None
    pid = victim.engine.record.pid
    moment_s = random.Random(21).uniform(0, 0.1)
    kill = partial(asyncio.get_running_loop().call_later, moment_s, os.kill, pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        with suppress(OSError):
            answer = await fleet.ask(a_prompt(), "p2", stream=True, then=kill)
            # Every token that was sent was sent once and in order; the end is an abort or an error.
            assert answer.heads[-1] in ("200", "502", "503"), answer
            assert answer.text == "" or answer.heads[-1] == "200"
    await until("tokens are released", fleet.is_idle, 30.0)
    reader = fleet.nodes[2].supervisor.replicas[ReplicaId("p2")]
    assert reader.engine is not None
    await until("no block is held", partial(holds_nothing, reader.engine.http), 20.0)
    await until("restarted", partial(is_restarted, fleet.nodes[0], pid), 120.0)
    prompt = a_prompt()
    alone = await fleet.ask(prompt, tenant="alone")
    assert (await fleet.ask(prompt, "p2")).text == alone.text != ""


async def check_drain(fleet: TwoLegs) -> None:
    """A replica of either role that is to end finishes its leg, and takes nothing more."""
    await until("p1 is warm", partial(is_warm, fleet.nodes[1]), 120.0)
    for victim, reader in (("p2", "p2"), ("d", "p1")):
        prompt = a_prompt()
        alone = await fleet.ask(prompt, tenant="alone")
        supervisor = fleet.nodes[NAMES.index(victim)].supervisor
        replica = supervisor.replicas[ReplicaId(victim)]
        asking = asyncio.create_task(fleet.ask(prompt, reader))
        while not (replica.admission.running or asking.done()):
            await asyncio.sleep(0)
        tombstone = Tombstone(replica_id=ReplicaId(victim), generation=Generation(9), reason="test")
        supervisor.end(tombstone)
        answer = await asking
        assert (answer.heads[-1], answer.text) == ("200", alone.text), victim
        await until("stopped", partial(is_stopped, replica), 60.0)
        late = await fleet.ask(a_prompt(), reader)
        assert late.heads[-1] == ("503" if victim == "d" else "200"), late
    await until("tokens are released", fleet.is_idle, 10.0)


async def is_stopped(replica: ManagedReplica) -> bool:
    return replica.state is ReplicaState.STOPPED


async def is_restarted(node: Node, pid: int) -> bool:
    (replica,) = node.supervisor.replicas.values()
    return replica.is_serving and replica.engine is not None and replica.engine.record.pid != pid

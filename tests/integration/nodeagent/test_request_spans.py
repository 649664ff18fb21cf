"""The steps of a request on its nodes and in their engines reach a real collector as spans."""

import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from isochrone.service.tracing import names
from isochrone.service.tracing.exporter import ServiceName, SpanCounts, SpanExporter
from isochrone.service.tracing.recorder import SpanRecorder
from isochrone.wire.http import headers
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.http.trace_context import TraceContext
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing
from nodeagent.api.request.request_spans import trace_requests
from ops.golden import tiny
from tests.integration.nodeagent.test_data_plane import a_node
from tests.integration.nodeagent.test_kv_sharing import (
    PROMPT_BLOCKS,
    SharingNodes,
    long_timeouts,
    spec_of,
)
from tests.integration.nodeagent.test_two_legs import a_prompt, is_warm
from tests.otlp_collector import Collector, ReceivedSpan, a_real_collector
from tests.system.harness import until

__all__ = ("long_timeouts",)

NAMES = ("a", "b")
QUEUED_TOKENS = 10_000
SLACK_NS = 50_000_000


class TracedNodes(msgspec.Struct):
    """Two nodes of a PoP, whose spans go to a real collector, and what that passes on."""

    nodes: SharingNodes
    exporter: SpanExporter
    collector: Collector

    async def trace(
        self, name: str, prompt: list[int], sent: dict[str, str], *, stream: bool
    ) -> dict[str, ReceivedSpan]:
        """Send a traced request; return its spans by path, once that of the request is there."""
        client = TraceContext(secrets.token_hex(16), secrets.token_hex(8))
        sent = {
            headers.REPLICA: name,
            headers.CACHE_SALT: "t",
            headers.TOKENS: f"p={len(prompt)};o=8",
            headers.PENDING_PREFILL_TOKENS: str(len(prompt)),
            headers.PREFILL_MS: "4000",
            headers.TRACEPARENT: client.traceparent,
            **sent,
        }
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": stream}
        http = self.nodes.nodes[name].http
        async with http.post("/v1/completions", json=body, headers=sent) as response:
            assert response.status == 200, await response.text()
            await response.read()

        async def whole() -> dict[str, ReceivedSpan] | None:
            await self.exporter.run_once()
            spans = {
                span.id: span for span in self.collector.spans if span.trace == client.trace_id
            }
            is_whole = any(span.parent == client.span_id for span in spans.values())
            return {path(spans, span): span for span in spans.values()} if is_whole else None

        found: dict[str, ReceivedSpan] = await until("the spans of the request arrive", whole)
        return found


def path(spans: dict[str, ReceivedSpan], span: ReceivedSpan) -> str:
    above = spans.get(span.parent)
    return f"{path(spans, above)}/{span.name}" if above is not None else span.name


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[TracedNodes]:
    folder = Path(tempfile.mkdtemp(prefix="iso-"))
    (folder / "model").mkdir()
    tiny.write_folder(folder / "model", "qwen3")
    tiny.write_tokenizer(folder / "model")
    try:
        async with AsyncExitStack() as stack:
            url, collector = await stack.enter_async_context(a_real_collector(tmp_path))
            exporter = await stack.enter_async_context(an_exporter(url))
            recorder = SpanRecorder(exporter.add, time.monotonic, time.time, secrets.token_hex)
            nodes = {}
            for name in NAMES:
                spans = trace_requests(recorder, NodeId(name))
                nodes[name] = await stack.enter_async_context(a_node(spans=spans))
                nodes[name].supervisor.start(spec_of(name, folder))
            for node in nodes.values():
                await until("warm", partial(is_warm, node), 120.0)
            yield TracedNodes(SharingNodes(nodes), exporter, collector)
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def an_exporter(url: str) -> AsyncIterator[SpanExporter]:
    resource = ServiceName("node", "n1", "ams").resource
    counts = SpanCounts(CollectorRegistry(), "x_")
    exporter = SpanExporter(url, resource, counts, time.monotonic)
    try:
        yield exporter
    finally:
        await exporter.close()


async def test_each_step_of_a_request_is_a_span(traced: TracedNodes) -> None:
    """One test, because starting engines takes most of its time."""
    prompt = a_prompt()
    await check_engine_steps(traced, prompt)
    await check_fetch(traced, prompt)
    await check_handoff(traced)


async def check_engine_steps(traced: TracedNodes, prompt: list[int]) -> None:
    whole = await traced.trace("a", prompt, {}, stream=False)
    steps = [f"serve/decode/engine {step}" for step in ("queue", "prefill", "decode")]
    assert whole.keys() == {
        "serve",
        "serve/admission",
        "serve/decode",
        "serve/decode/relay",
        *steps,
    }
    times = [whole[step].span for step in steps]
    assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in times)
    # One follows the other, and all are within the node's step.
    for before, after in pairwise(times):
        assert abs(before.end_time_unix_nano - after.start_time_unix_nano) < 10_000
    outer = whole["serve/decode"].span
    assert outer.start_time_unix_nano <= times[0].start_time_unix_nano + SLACK_NS
    assert times[-1].end_time_unix_nano <= outer.end_time_unix_nano
    # The tokens of a stream come after its head: the node's `relay` is their time.
    stream = await traced.trace("a", a_prompt(), {}, stream=True)
    assert stream.keys() == whole.keys() - {steps[2]}


async def check_fetch(traced: TracedNodes, prompt: list[int]) -> None:
    nodes = traced.nodes
    holders = format_peer_replicas([nodes.peer("b"), nodes.peer("a")])
    spans = await traced.trace("b", prompt, {kv_sharing.KV_HOLDERS: holders}, stream=True)
    fetch = spans["serve/fetch kv"]
    assert fetch.attributes[names.KV_OUTCOME] == "fetch"
    assert fetch.attributes[names.KV_PLACE] == "peer"
    assert fetch.attributes[names.REPLICA] == "a"
    assert fetch.attributes[names.KV_BLOCKS] == PROMPT_BLOCKS
    assert fetch.attributes[names.KV_BYTES] > 0
    for step in ("locate kv", "send kv"):
        assert spans[f"serve/fetch kv/{step}"].attributes[names.NODE] == "a"
    waited = spans["serve/decode/engine wait kv"].span
    took_ns = fetch.span.end_time_unix_nano - fetch.span.start_time_unix_nano
    assert waited.end_time_unix_nano - waited.start_time_unix_nano >= took_ns / 2


async def check_handoff(traced: TracedNodes) -> None:
    nodes = traced.nodes
    admission = nodes.nodes["b"].supervisor.replicas[ReplicaId("b")].admission
    queued = admission.admit(QUEUED_TOKENS, 1, QUEUED_TOKENS)
    assert queued is not None
    peers = format_peer_replicas([nodes.peer("b"), nodes.peer("a")])
    spans = await traced.trace("b", a_prompt(), {headers.PEER_REPLICAS: peers}, stream=True)
    queued.release()
    handoff = spans["serve/handoff"]
    assert (handoff.attributes[names.NODE], handoff.attributes[names.REPLICA]) == (
        nodes.nodes["a"].address,
        "a",
    )
    assert spans["serve"].attributes[names.HANDED_OFF_TO] == "a"
    assert spans["serve/handoff/serve"].attributes[names.NODE] == "a"
    assert "serve/handoff/serve/decode/engine prefill" in spans
    assert "serve/decode" not in spans

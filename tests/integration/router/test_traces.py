"""A request's trace from the router's side, as a collector gets it from a running router."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from isochrone.service.tracing import names
from isochrone.wire.http.trace_context import TraceContext, parse_traceparent
from router.config import RouterConfig
from tests.integration.router.fake_node import FakeNode
from tests.integration.router.fleet_of import Bench, a_bench
from tests.otlp_collector import a_collector
from tests.system.harness import until

CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
SECRET = "the secret words of a prompt"


def sent_trace(node: FakeNode, number: int = -1) -> TraceContext:
    """Return the trace of which the node's spans would be a part."""
    found = {name.lower(): value for name, value in node.request_headers[number].items()}
    context = parse_traceparent(found["traceparent"])
    assert context is not None
    return context


async def ask(bench: Bench, *, status: int = 200, **fields: Any) -> str:
    async with bench.chat(**fields) as response:
        assert response.status == status
        return str(await response.text())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_trace_goes_on_through_the_router_to_the_node(
    tmp_path: Path, stream: bool
) -> None:
    async with a_collector() as collector, a_bench(tmp_path, traces_endpoint=collector.url) as b:
        header = {"traceparent": CLIENT.traceparent}
        await ask(b, content=SECRET, headers=header, stream=stream)
        await collector.until(2)
        assert len(collector.spans) == 2
        trace = collector.trace(CLIENT.trace_id)
        request, attempt = trace["chat tiny"], trace["attempt"]
        assert (request.parent, attempt.parent) == (CLIENT.span_id, request.id)
        assert sent_trace(b.nodes[0]) == TraceContext(CLIENT.trace_id, attempt.id)
        told = request.attributes
        assert (told[names.OPERATION], told[names.MODEL]) == ("chat", "tiny")
        assert told[names.STREAM] is stream
        assert told[names.INPUT_TOKENS] > 0 and told[names.OUTPUT_TOKENS] > 0
        assert (told[names.NODE], told[names.POP], told[names.ATTEMPTS]) == ("n1", "ams", 1)
        assert told[names.WHY].startswith("nearest-warm rtt=")
        assert told[names.OUTCOME] == "complete"
        assert "error.type" not in told
        if stream:
            lasted_s = (request.span.end_time_unix_nano - request.span.start_time_unix_nano) / 1e9
            assert 0 < told[names.FIRST_CHUNK_S] <= lasted_s + 1e-5
            assert told[names.FIRST_CHUNK_S] >= attempt.attributes[names.FIRST_CHUNK_S]
        assert attempt.attributes[names.REPLICA] == told[names.REPLICA]
        assert attempt.span.start_time_unix_nano >= request.span.start_time_unix_nano
        assert request.service == "isochrone-router"
        # Neither prompts nor answers nor keys.
        everything = b"".join(collector.bodies)
        assert b"secret" not in everything and b"sk-" not in everything


@pytest.mark.parametrize(
    ("flag", "settings", "is_traced", "is_continued"),
    [
        (None, {}, False, False),
        (None, {"trace_sample_ratio": 1.0}, True, False),
        (True, {}, True, True),
        (False, {"trace_sample_ratio": 1.0}, False, True),
        (True, {"trace_follows_clients": False}, False, False),
        (True, {"trace_follows_clients": False, "trace_sample_ratio": 1.0}, True, False),
    ],
)
async def test_the_flag_or_the_ratio_decides(
    tmp_path: Path,
    flag: bool | None,
    settings: dict[str, Any],
    is_traced: bool,
    is_continued: bool,
) -> None:
    client = None if flag is None else CLIENT._replace(is_sampled=flag)
    header = {} if client is None else {"traceparent": client.traceparent}
    async with a_collector() as collector:
        async with a_bench(tmp_path, traces_endpoint=collector.url, **settings) as bench:
            await ask(bench, headers=header)
            names_sent = {name.lower() for name in bench.nodes[0].request_headers[0]}
            assert ("traceparent" in names_sent) == (is_traced or client is not None)
            if client is not None and not is_traced:
                # What is not traced here is not traced further on, by node or engine.
                sent = sent_trace(bench.nodes[0])
                assert (sent.trace_id, sent.is_sampled) == (CLIENT.trace_id, False)
                assert (sent == client) == is_continued
        # The router has sent what it had when it stopped.
        assert len(collector.spans) == (2 if is_traced else 0)
        for span in collector.named("chat tiny"):
            assert (span.trace == CLIENT.trace_id) == is_continued
            linked = [link.trace_id.hex() for link in span.span.links]
            assert linked == ([CLIENT.trace_id] if client and not is_continued else [])


async def test_each_attempt_and_the_wait_before_it_is_a_step(tmp_path: Path) -> None:
    async with (
        a_collector() as collector,
        a_bench(tmp_path, 2, traces_endpoint=collector.url, trace_sample_ratio=1.0) as bench,
    ):
        first, second = bench.nodes
        first.refuse = second.refuse = "busy"
        asking = asyncio.create_task(ask(bench))

        async def both_refused() -> bool:
            return min(first.requests, second.requests) > 0

        await until("both nodes refused", both_refused)
        first.refuse = second.refuse = ""
        await asking
        await collector.until(4)
        (request,) = collector.named("chat tiny")
        attempts, waits = collector.named("attempt"), collector.named("wait for capacity")
        assert request.attributes[names.ATTEMPTS] == len(attempts) >= 3
        assert {span.parent for span in (*attempts, *waits)} == {request.id}
        errors = [span.attributes.get("error.type", "") for span in attempts]
        assert errors == ["refused"] * (len(attempts) - 1) + [""]
        assert request.attributes[names.QUEUE_WAIT_S] > 0 and waits
        sent = [sent_trace(node, n) for node in bench.nodes for n in range(node.requests)]
        assert sorted(context.span_id for context in sent) == sorted(span.id for span in attempts)


async def test_a_failed_request_says_so(tmp_path: Path) -> None:
    async with (
        a_collector() as collector,
        a_bench(tmp_path, traces_endpoint=collector.url, trace_sample_ratio=1.0) as bench,
    ):
        bench.nodes[0].refuse = "busy"
        await ask(bench, status=429)
        await collector.until(2)
        (request,) = collector.named("chat tiny")
        assert request.attributes["error.type"] == "out_of_capacity"
        assert request.attributes[names.OUTCOME] == "refused"


@pytest.mark.parametrize("fault", ["absent", "hangs", "status", "breaks_off"])
async def test_no_request_waits_for_a_collector(tmp_path: Path, fault: str) -> None:
    async with a_collector() as collector:
        url = "http://127.0.0.1:1" if fault == "absent" else collector.url
        collector.hangs, collector.breaks_off = fault == "hangs", fault == "breaks_off"
        collector.status = 500 if fault == "status" else 200
        async with a_bench(tmp_path, traces_endpoint=url, trace_sample_ratio=1.0) as bench:
            for _ in range(20):
                await ask(bench)
            exporter = bench.app.exporter
            assert exporter is not None
        page = bench.app.metrics.registry.collect()
        dropped = sum(
            sample.value
            for family in page
            for sample in family.samples
            if sample.name == "isochrone_router_trace_spans_dropped_total"
        )
        assert dropped == 40


async def test_without_an_endpoint_a_traceparent_is_passed_on_as_it_came(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        await ask(bench, headers={"traceparent": CLIENT.traceparent})
        assert sent_trace(bench.nodes[0]) == CLIENT
        assert bench.app.exporter is None


def test_a_ratio_without_an_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="without traces_endpoint"):
        RouterConfig(trace_sample_ratio=0.5)

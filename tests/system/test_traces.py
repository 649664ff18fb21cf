"""One request to a whole fleet is one whole trace: router, both legs, each span's parent."""

import random
from collections.abc import Sequence

import aiohttp

from isochrone.service.tracing import names
from tests.otlp_collector import Collector, ReceivedSpan, a_collector
from tests.system.harness import a_fleet, until
from tests.system.test_roles import NODES, deploy, one_answer, process_of, start, until_both

REQUESTS_MAX = 40


def traces(spans: Sequence[ReceivedSpan]) -> dict[str, dict[str, ReceivedSpan]]:
    """Return the spans of each trace by id."""
    found: dict[str, dict[str, ReceivedSpan]] = {}
    for span in spans:
        found.setdefault(span.trace, {})[span.id] = span
    return found


def paths(spans: dict[str, ReceivedSpan]) -> set[tuple[str, ...]]:
    """Return for each span of a trace the names from the first one down to it."""

    def path(span: ReceivedSpan) -> tuple[str, ...]:
        above = spans.get(span.parent)
        return (*(path(above) if above is not None else ()), span.name)

    return {path(span) for span in spans.values()}


REQUEST = "text_completion counting"
SERVE = (REQUEST, "attempt", "serve")
WHOLE = {
    (REQUEST,),
    (REQUEST, "attempt"),
    SERVE,
    (*SERVE, "admission"),
    (*SERVE, "ask prefill nodes"),
    (*SERVE, "prefill"),
    (*SERVE, "prefill", "transfer kv"),
    (*SERVE, "prefill", "serve"),
    (*SERVE, "prefill", "serve", "admission"),
    (*SERVE, "prefill", "serve", "compute kv"),
    (*SERVE, "prefill", "serve", "compute kv", "engine queue"),
    (*SERVE, "prefill", "serve", "compute kv", "engine prefill"),
    (*SERVE, "prefill", "serve", "compute kv", "relay"),
    (*SERVE, "decode"),
    (*SERVE, "decode", "relay"),
}


def has_transferred(span: ReceivedSpan) -> bool:
    """Return whether a span is that of a transfer that ended in time."""
    return span.name == "transfer kv" and names.KV_BYTES in span.attributes


async def whole_trace(collector: Collector) -> dict[str, ReceivedSpan] | None:
    """Return a trace of a request with two legs whose spans have all arrived."""
    return next(
        (
            trace
            for trace in traces(collector.spans).values()
            if paths(trace) >= WHOLE and any(map(has_transferred, trace.values()))
        ),
        None,
    )


async def test_one_request_with_two_legs_is_one_whole_trace() -> None:
    async with a_collector() as collector, a_fleet(comes_up=False) as fleet:
        await start(fleet)
        traced = {"traces_endpoint": collector.url}
        fleet.settings["router-ams"] |= {**traced, "trace_sample_ratio": 1.0}
        for number in NODES:
            fleet.settings[process_of(f"ams-{number}")] = traced
        await deploy(fleet)
        nodes = await until_both(fleet)
        key = {"authorization": f"Bearer {fleet.key}"}
        async with aiohttp.ClientSession(headers=key) as http:
            for number in range(REQUESTS_MAX):
                assert not await one_answer(fleet, http, random.Random(number))
                if any(map(has_transferred, collector.spans)):
                    break
        trace = await until("a whole trace arrives", lambda: whole_trace(collector))
        assert {span.service for span in trace.values()} == {"isochrone-router", "isochrone-node"}
        by_path = {(span.service, span.name): span for span in trace.values()}
        request = by_path["isochrone-router", REQUEST]
        assert request.parent == ""
        assert request.attributes[names.NODE] == nodes["generates"]
        read_at = {span.attributes[names.NODE] for span in trace.values() if span.name == "prefill"}
        assert read_at == {nodes["prefill"]}
        transfer = next(filter(has_transferred, trace.values()))
        assert transfer.attributes[names.KV_BYTES] > 0
        # Every step is within the request, by the clock that all of them share here.
        began, ended = request.span.start_time_unix_nano, request.span.end_time_unix_nano
        slack_ns = 50_000_000
        assert all(span.span.start_time_unix_nano >= began - slack_ns for span in trace.values())
        firsts = [s.span.start_time_unix_nano for s in trace.values() if s.name == "relay"]
        assert max(firsts) <= ended + slack_ns
        page = await http_page(f"{fleet.endpoint('ams')}/metrics")
        assert "isochrone_router_trace_spans_sent_total" in page


async def http_page(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        return await answer.text()

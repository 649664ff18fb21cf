"""Spans reach a collector, and a collector that fails costs a bounded number of spans."""

import asyncio
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from isochrone.service.config import ConfigError
from isochrone.service.tracing import exporter as module
from isochrone.service.tracing.exporter import (
    ATTEMPTS_MAX,
    BACKOFF_MAX_S,
    BATCH_SPANS,
    SPANS_MAX,
    CannotExport,
    ServiceName,
    SpanCounts,
    SpanExporter,
    open_exporter,
)
from isochrone.service.tracing.spans import Span, SpanKind
from isochrone.wire.http.trace_context import TraceContext
from tests.otlp_collector import a_collector, a_real_collector
from tests.ports import free_port
from tests.system.harness import until

NUMBERS = count(1)
SERVICE = ServiceName("router", "r1", "ams")


def spans(number: int) -> list[Span]:
    return [
        Span(
            context=TraceContext("a" * 32, f"{next(NUMBERS):016x}"),
            parent_id="",
            name="s",
            kind=SpanKind.SERVER,
            began_s=1.0,
            ended_s=2.0,
            attributes={},
        )
        for _ in range(number)
    ]


class Export:
    """An exporter whose clock is set by hand, and its metrics."""

    def __init__(self, url: str, authorization: str = "") -> None:
        self.registry = CollectorRegistry()
        self.now_s = 0.0
        counts = SpanCounts(self.registry, "x_")
        self.exporter = SpanExporter(
            url, SERVICE.resource, counts, lambda: self.now_s, authorization
        )

    def sent(self) -> float:
        return self.registry.get_sample_value("x_trace_spans_sent_total") or 0.0

    def dropped(self, reason: str) -> float:
        labels = {"reason": reason}
        return self.registry.get_sample_value("x_trace_spans_dropped_total", labels) or 0.0

    async def turn(self) -> None:
        """Run a turn after any pause that the exporter may make."""
        self.now_s += BACKOFF_MAX_S
        await self.exporter.run_once()


async def test_spans_arrive_in_batches_with_the_name_of_their_service() -> None:
    async with a_collector() as collector:
        export = Export(collector.url + "/", "Bearer abc")
        export.exporter.add(spans(2 * BATCH_SPANS + 1))
        await export.turn()
        assert (len(collector.spans), collector.posts) == (2 * BATCH_SPANS + 1, 3)
        assert len({span.id for span in collector.spans}) == 2 * BATCH_SPANS + 1
        assert {span.service for span in collector.spans} == {"isochrone-router"}
        assert collector.headers[0]["authorization"] == "Bearer abc"
        assert collector.headers[0]["content-type"] == "application/x-protobuf"
        assert export.sent() == 2 * BATCH_SPANS + 1
        collector.rejects = 2
        export.exporter.add(spans(5))
        await export.turn()
        assert (export.sent(), export.dropped("rejected")) == (2 * BATCH_SPANS + 4, 2)
        await export.exporter.close()


@pytest.mark.parametrize("status", [400, 401, 404, 500, 301])
async def test_a_refused_batch_is_dropped_and_counted(status: int) -> None:
    async with a_collector() as collector:
        export = Export(collector.url)
        collector.status = status
        export.exporter.add(spans(3))
        with pytest.raises(CannotExport, match=f"{status}; the batch is dropped"):
            await export.turn()
        assert export.dropped("refused") == 3
        collector.status = 200
        export.exporter.add(spans(1))
        await export.turn()
        assert export.sent() == 1
        await export.exporter.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_batch_waits_for_an_overloaded_collector(status: int) -> None:
    async with a_collector() as collector:
        export = Export(collector.url)
        collector.status = status
        export.exporter.add(spans(3))
        with pytest.raises(CannotExport, match="the batch waits"):
            await export.turn()
        # A turn before the pause is over sends nothing.
        assert await export.exporter.run_once() == 0
        assert collector.posts == 1
        collector.status = 200
        await export.turn()
        assert (export.sent(), export.dropped("unreachable")) == (3, 0)
        await export.exporter.close()


async def fail_until_dropped(export: Export, attempts: int = ATTEMPTS_MAX) -> None:
    for _ in range(attempts):
        with pytest.raises(CannotExport):
            await export.turn()


async def test_an_absent_collector_costs_the_batch_after_some_attempts() -> None:
    export = Export(f"http://127.0.0.1:{free_port()}")
    export.exporter.add(spans(3))
    with pytest.raises(CannotExport, match="v1/traces: Connection refused; the batch waits; check"):
        await export.turn()
    await fail_until_dropped(export, ATTEMPTS_MAX - 1)
    assert export.dropped("unreachable") == 3
    await export.exporter.close()


@pytest.mark.parametrize("fault", ["hangs", "breaks_off"])
async def test_a_collector_that_hangs_or_breaks_off_fills_a_bounded_queue(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 0.2)
    async with a_collector() as collector:
        setattr(collector, fault, True)
        export = Export(collector.url)
        export.exporter.add(spans(1))
        sending = asyncio.create_task(export.turn())
        export.exporter.add(spans(2 * SPANS_MAX))
        with pytest.raises(CannotExport):
            await sending
        export.exporter.add(spans(10))
        # One batch is on its way; the rest of the queue was full when the last spans came.
        held = SPANS_MAX + 1
        assert export.dropped("queue_full") >= 2 * SPANS_MAX + 11 - held - BATCH_SPANS
        await export.exporter.close()
        reasons = ("queue_full", "unreachable", "shutdown")
        assert sum(map(export.dropped, reasons)) == 2 * SPANS_MAX + 11


async def test_what_waits_is_sent_at_shutdown_even_within_a_pause() -> None:
    async with a_collector() as collector:
        export = Export(collector.url)
        collector.status = 503
        export.exporter.add(spans(2))
        with suppress(CannotExport):
            await export.turn()
        collector.status = 200
        export.exporter.add(spans(2))
        await export.exporter.close()
        assert (len(collector.spans), export.dropped("shutdown")) == (4, 0)


async def test_the_loop_sends_by_itself_when_a_batch_is_full() -> None:
    async with a_collector() as collector:
        export = Export(collector.url)
        running = asyncio.create_task(export.exporter.loop.run())
        await export.exporter.loop.wait_turns(1)
        export.exporter.add(spans(BATCH_SPANS))
        await collector.until(BATCH_SPANS)
        running.cancel()
        await asyncio.wait({running})
        await export.exporter.close()


def test_no_endpoint_means_no_exporter_and_a_readable_secret_is_refused(tmp_path: Path) -> None:
    def never() -> SpanCounts:
        raise AssertionError

    assert open_exporter("", None, SERVICE, never, lambda: 0.0) is None
    secret = tmp_path / "authorization"
    secret.write_text("Bearer abc")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        open_exporter("http://c:4318", secret, SERVICE, never, lambda: 0.0)


async def test_a_real_collector_takes_the_spans_and_passes_them_on(tmp_path: Path) -> None:
    async with a_real_collector(tmp_path) as (url, collector):
        export = Export(url)
        made = spans(3)

        async def is_sent() -> bool:
            export.exporter.add(made if not export.sent() else [])
            with suppress(CannotExport):
                await export.turn()
            return export.sent() >= 3

        await until("rotel takes spans", is_sent)
        await collector.until(3)
        assert {span.id for span in collector.spans} == {span.context.span_id for span in made}
        assert {span.service for span in collector.spans} == {"isochrone-router"}
        assert not export.dropped("refused")
        await export.exporter.close()

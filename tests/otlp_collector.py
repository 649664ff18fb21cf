"""Collectors for tests: one takes spans over OTLP/HTTP, decoded by OpenTelemetry's own messages;
a real one (rotel) passes on to it what it takes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import rotel
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from isochrone.service.network.http_server import serve_http
from tests.ports import free_port
from tests.system.harness import until


class ReceivedSpan(NamedTuple):
    """A span as the collector sees it, with plain attributes; `service` made it."""

    service: str
    span: Span
    attributes: dict[str, Any]

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def trace(self) -> str:
        return self.span.trace_id.hex()


class Collector:
    """What has arrived, and how the next requests are answered."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.posts = 0
        self.status = 200
        self.rejects = 0
        self.hangs = False
        self.breaks_off = False

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def trace(self, trace_id: str) -> dict[str, ReceivedSpan]:
        """Return the spans of a trace by name; of several with one name the last."""
        return {span.name: span for span in self.spans if span.trace == trace_id}

    async def until(self, count: int) -> None:
        """Wait until so many spans have arrived."""

        async def have_come() -> bool:
            return len(self.spans) >= count

        await until(f"{count} spans, of which {len(self.spans)}", have_come)

    async def take(self, request: web.Request) -> web.Response:
        self.posts += 1
        body = await request.read()
        if self.hangs:
            await asyncio.sleep(3600)
        if self.breaks_off and request.transport is not None:
            request.transport.abort()
        answer = ExportTraceServiceResponse()
        if self.status == 200:
            self.headers.append({name.lower(): value for name, value in request.headers.items()})
            self.bodies.append(body)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                resource = {pair.key: plain(pair.value) for pair in group.resource.attributes}
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    attributes = {pair.key: plain(pair.value) for pair in span.attributes}
                    name = str(resource["service.name"])
                    self.spans.append(ReceivedSpan(name, span, attributes))
            answer.partial_success.rejected_spans = self.rejects
        return web.Response(
            status=self.status,
            body=answer.SerializeToString(),
            content_type="application/x-protobuf",
        )


def plain(value: AnyValue) -> Any:
    """Return the value of an attribute."""
    return getattr(value, value.WhichOneof("value") or "string_value")


@asynccontextmanager
async def a_collector(port: int = 0) -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with serve_http(app, "127.0.0.1", port) as bound:
        collector.url = f"http://127.0.0.1:{bound}"
        yield collector


@asynccontextmanager
async def a_real_collector(folder: Path) -> AsyncIterator[tuple[str, Collector]]:
    """Run rotel; yield its URL, and the collector behind it. Its log is in `folder`.

    Skips the test where the system lacks a library that rotel's wheel does not bring.
    """
    port, behind = free_port(), free_port()
    agent = Path(rotel.__file__).parent / "rotel-agent"
    tried = await asyncio.create_subprocess_exec(agent, "--version", stderr=asyncio.subprocess.PIPE)
    _, error = await tried.communicate()
    if tried.returncode:
        pytest.skip(f"rotel does not start: {error.decode().strip()}")
    command = [
        *(str(agent), "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"),
        *("--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}"),
        *("--exporter", "otlp", "--otlp-exporter-endpoint", f"http://127.0.0.1:{behind}"),
        *("--otlp-exporter-protocol", "http", "--otlp-exporter-compression", "none"),
    ]
    with (folder / "rotel.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
    try:
        async with a_collector(behind) as collector:
            yield f"http://127.0.0.1:{port}", collector
    finally:
        process.terminate()
        async with asyncio.timeout(20):
            await process.wait()

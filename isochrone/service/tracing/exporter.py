"""Sends finished spans to an OpenTelemetry collector, off the path of requests.

Rule 1: a request never waits. It leaves its spans in a bounded queue; if that is full they are
dropped and counted.
Rule 2: one batch is on its way at a time. While the collector is absent, hangs or is overloaded the
batch waits, for some attempts, and the queue fills.
Rule 3: every span is counted once: sent, or dropped with the reason.

The encoding is OpenTelemetry's (opentelemetry-proto), the transport is aiohttp: its SDK would add a
thread with a blocking HTTP client to each process.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
from prometheus_client import CollectorRegistry, Counter

from isochrone.service.config import read_secret
from isochrone.service.loop import Loop
from isochrone.service.network.connection_errors import describe_connection_error
from isochrone.service.network.name_cache import CachedResolver, NameCache
from isochrone.service.tracing import names
from isochrone.service.tracing.spans import AttributeValue, Span
from isochrone.wire.digits import parse_digits

PATH: Final = "/v1/traces"
SPANS_MAX: Final = 8192
"""Spans that wait to be sent; about 8 MB."""

BATCH_SPANS: Final = 128
"""The most spans of one message, which takes 2 to 4 ms of CPU to encode, without a pause."""

INTERVAL_S: Final = 1.0
POST_TIMEOUT_S: Final = 5.0
FLUSH_TIMEOUT_S: Final = 3.0
ATTEMPTS_MAX: Final = 5
BACKOFF_S: Final = 1.0
"""The pause after a failed attempt; doubled with each further one of the batch."""

BACKOFF_MAX_S: Final = 30.0
"""Also the longest wait for a collector's `Retry-After`."""

ANSWER_BYTES_MAX: Final = 64 * 1024
RETRYABLE: Final = frozenset({429, 502, 503, 504})
"""The statuses after which OTLP says to send a batch again."""


class DropReason(StrEnum):
    """Why spans were not delivered."""

    QUEUE_FULL = "queue_full"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    REJECTED = "rejected"
    SHUTDOWN = "shutdown"


class CannotExport(Exception):
    """A batch could not be delivered; the message says where, why and what becomes of it."""


class SpanCounts:
    """The metrics of the export, for a service's page."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        """Define them in `registry`, with names that begin with `prefix`."""
        self.sent = Counter(
            f"{prefix}trace_spans_sent", "Spans that the collector took.", registry=registry
        )
        self.dropped = Counter(
            f"{prefix}trace_spans_dropped",
            "Spans that were lost, by reason: queue_full, unreachable, refused or rejected by the"
            " collector, or shutdown.",
            ["reason"],
            registry=registry,
        )

    def drop(self, reason: DropReason, count: int) -> None:
        """Count lost spans."""
        if count > 0:
            self.dropped.labels(reason.value).inc(count)


class SpanExporter:
    """The queue of finished spans, and the loop that sends them, which its owner runs."""

    def __init__(
        self,
        endpoint: str,
        resource: Mapping[str, AttributeValue],
        counts: SpanCounts,
        clock: Callable[[], float],
        authorization: str = "",
    ) -> None:
        """Send to the collector at `endpoint`, with `authorization` as the header of that name.

        `resource` describes the service. `clock` returns monotonic seconds.
        """
        # Imported only where spans are exported: its message classes take 4 MB.
        from isochrone.service.tracing import otlp

        self._codec = otlp
        self._url = endpoint.rstrip("/") + PATH
        self._resource = resource
        self._counts = counts
        self._clock = clock
        self._headers = {"content-type": "application/x-protobuf"}
        if authorization:
            self._headers["authorization"] = authorization
        self._queue: deque[Span] = deque()
        self._batch: Sequence[Span] = ()
        self._attempts = 0
        self._not_before_s = 0.0
        self._http: aiohttp.ClientSession | None = None
        self._names = NameCache()
        self.loop = Loop("traces", self.run_once, INTERVAL_S)

    def add(self, spans: Sequence[Span]) -> None:
        """Queue finished spans; drop those beyond SPANS_MAX."""
        free = SPANS_MAX - len(self._queue)
        self._queue.extend(islice(spans, free))
        self._counts.drop(DropReason.QUEUE_FULL, len(spans) - free)
        if len(self._queue) >= BATCH_SPANS:
            self.loop.nudge()

    async def run_once(self) -> int:
        """Send what waits; return how many spans were sent. Raises CannotExport."""
        sent = 0
        while self._clock() >= self._not_before_s and (self._batch or self._queue):
            if not self._batch:
                self._batch, self._attempts = tuple(_taken(self._queue, BATCH_SPANS)), 0
            self._attempts += 1
            sent += await self._send()
        return sent

    async def close(self) -> None:
        """Send what waits, within FLUSH_TIMEOUT_S; drop the rest."""
        self._not_before_s = 0.0
        with suppress(TimeoutError, CannotExport):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self.run_once()
        self._counts.drop(DropReason.SHUTDOWN, len(self._batch) + len(self._queue))
        self._batch = ()
        self._queue.clear()
        if self._http is not None:
            await self._http.close()
        await self._names.aclose()

    async def _send(self) -> int:
        """Send the batch; return how many spans the collector took."""
        count, wait_s = len(self._batch), 0.0
        body = self._codec.encode(self._batch, self._resource)
        try:
            async with (
                asyncio.timeout(POST_TIMEOUT_S),
                self._session().post(
                    self._url, data=body, headers=self._headers, allow_redirects=False
                ) as answer,
            ):
                received = await answer.content.read(ANSWER_BYTES_MAX)
                status = answer.status
                wait_s = float(parse_digits(answer.headers.get("retry-after", ""), 6) or 0)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._postpone(wait_s)
            raise self._failure(describe_connection_error(self._url, error)) from error
        if status in RETRYABLE:
            self._postpone(wait_s)
            raise self._failure(f"it answered {status}")
        self._batch = ()
        if not 200 <= status < 300:
            self._counts.drop(DropReason.REFUSED, count)
            raise self._failure(f"it answered {status}")
        rejected = min(count, max(0, self._codec.rejected_spans(received)))
        self._counts.drop(DropReason.REJECTED, rejected)
        self._counts.sent.inc(count - rejected)
        return count - rejected

    def _postpone(self, wait_s: float) -> None:
        """Keep the batch for a later attempt, or give it up after ATTEMPTS_MAX."""
        pause_s = max(wait_s, BACKOFF_S * 2.0 ** (self._attempts - 1))
        self._not_before_s = self._clock() + min(BACKOFF_MAX_S, pause_s)
        if self._attempts >= ATTEMPTS_MAX:
            self._counts.drop(DropReason.UNREACHABLE, len(self._batch))
            self._batch = ()

    def _failure(self, reason: str) -> CannotExport:
        consequence = "the batch waits" if self._batch else "the batch is dropped"
        return CannotExport(
            f"cannot send spans to {self._url}: {reason}; {consequence}; check `traces_endpoint`"
        )

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            connector = aiohttp.TCPConnector(
                limit=1, resolver=CachedResolver(self._names), use_dns_cache=False
            )
            self._http = aiohttp.ClientSession(connector=connector)
        return self._http


class ServiceName(NamedTuple):
    """Which service made the spans: `router`, its own name, and its PoP if it is in one."""

    kind: str
    name: str
    pop: str = ""

    @property
    def resource(self) -> dict[str, AttributeValue]:
        """The attributes of an OpenTelemetry resource."""
        named = {
            "service.namespace": "isochrone",
            "service.name": f"isochrone-{self.kind}",
            "service.instance.id": self.name,
        }
        return {**named, names.POP: self.pop} if self.pop else {**named}


def open_exporter(
    endpoint: str,
    authorization_file: Path | None,
    service: ServiceName,
    counts: Callable[[], SpanCounts],
    clock: Callable[[], float],
) -> SpanExporter | None:
    """Return the exporter of a service's settings; None without an endpoint. Raises ConfigError.

    `counts` defines its metrics.
    """
    if not endpoint:
        return None
    path = authorization_file
    secret = read_secret(path, "the collector's authorization") if path is not None else ""
    return SpanExporter(endpoint, service.resource, counts(), clock, secret)


def _taken(queue: deque[Span], count: int) -> Iterator[Span]:
    for _ in range(min(count, len(queue))):
        yield queue.popleft()

"""Which requests are traced, how steps nest, and how spans are encoded."""

import asyncio
from itertools import count

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from isochrone.service.tracing import names, otlp
from isochrone.service.tracing.recorder import (
    NO_SPAN,
    SpanRecorder,
    child_span,
    current_span,
)
from isochrone.service.tracing.spans import Sampling, Span, SpanKind
from isochrone.wire.http import headers
from isochrone.wire.http.trace_context import TraceContext
from tests.otlp_collector import plain

CLIENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
UNSAMPLED = CLIENT._replace(is_sampled=False)


@pytest.mark.parametrize(
    ("ratio", "follows", "client", "draw", "expected"),
    [
        (0.0, True, None, 0.0, False),
        (0.0, True, CLIENT, 0.9, True),
        (1.0, True, UNSAMPLED, 0.0, False),
        (0.0, False, CLIENT, 0.0, False),
        (0.1, False, CLIENT, 0.09, True),
        (0.1, False, UNSAMPLED, 0.09, True),
        (0.1, True, None, 0.09, True),
        (0.1, True, None, 0.1, False),
        (1.0, True, None, 0.999, True),
    ],
)
def test_a_request_is_traced_by_its_flag_or_by_the_ratio(
    ratio: float, follows: bool, client: TraceContext | None, draw: float, expected: bool
) -> None:
    assert Sampling(ratio, follows).includes(client, draw) is expected


class Recorded:
    """A recorder with a clock that ticks a second with each look, and numbered ids."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        ticks, ids = count(100.0, 1.0), count(1)
        self.recorder = SpanRecorder(
            self.spans.extend,
            lambda: next(ticks),
            lambda: 1_000_000.0,
            lambda size: f"{next(ids):0{2 * size}x}",
        )


async def test_steps_nest_also_over_tasks_and_end_once() -> None:
    recorded = Recorded()
    with recorded.recorder.request(CLIENT, "serve", SpanKind.SERVER) as serve:
        with child_span("admission") as waiting:
            assert current_span() is waiting
            waiting.end()
            assert current_span() is serve

            async def leg() -> dict[str, str]:
                sent = {headers.TRACEPARENT: CLIENT.traceparent}
                with child_span("prefill", SpanKind.CLIENT) as prefill:
                    prefill.add_to(sent)
                    prefill.set(names.REPLICA, "p1")
                return sent

            sent = await asyncio.create_task(leg())
        assert current_span() is serve
        with pytest.raises(TimeoutError), child_span("decode"):
            raise TimeoutError
    assert current_span() is NO_SPAN
    by_name = {span.name: span for span in recorded.spans}
    assert [*by_name] == ["admission", "prefill", "decode", "serve"]
    own = by_name["serve"].context.span_id
    assert by_name["serve"].parent_id == CLIENT.span_id
    assert {by_name[name].parent_id for name in ("admission", "prefill", "decode")} == {own}
    assert {span.context.trace_id for span in recorded.spans} == {CLIENT.trace_id}
    assert sent[headers.TRACEPARENT] == by_name["prefill"].context.traceparent
    assert by_name["prefill"].attributes == {names.REPLICA: "p1"}
    assert (by_name["decode"].error, by_name["admission"].error) == ("TimeoutError", "")
    # Unix time: the first look at the clock was for the difference.
    assert by_name["serve"].began_s == 1_000_001.0
    assert by_name["serve"].ended_s > by_name["decode"].ended_s > by_name["decode"].began_s


def test_an_untraced_request_records_nothing_and_changes_no_header() -> None:
    sent = {headers.TRACEPARENT: UNSAMPLED.traceparent}
    with child_span("prefill") as span:
        assert span is NO_SPAN
        span.set(names.REPLICA, "p1")
        span.add_to(sent)
    assert sent == {headers.TRACEPARENT: UNSAMPLED.traceparent}


def test_a_span_is_encoded_as_opentelemetry_reads_it() -> None:
    span = Span(
        context=CLIENT,
        parent_id="00000000000000aa",
        name="chat tiny",
        kind=SpanKind.SERVER,
        began_s=1_700_000_000.25,
        ended_s=1_700_000_001.5,
        attributes={"a": "x" * 1000, "b": 7, "c": 0.5, "d": True},
        error="upstream",
        link=TraceContext("1" * 32, "2" * 16),
    )
    request = ExportTraceServiceRequest.FromString(otlp.encode([span], {"service.name": "s"}))
    (group,) = request.resource_spans
    assert [(pair.key, plain(pair.value)) for pair in group.resource.attributes] == [
        ("service.name", "s")
    ]
    (read,) = group.scope_spans[0].spans
    assert (read.trace_id.hex(), read.span_id.hex()) == (CLIENT.trace_id, CLIENT.span_id)
    assert (read.parent_span_id.hex(), read.name, read.kind) == ("00000000000000aa", "chat tiny", 2)
    assert read.start_time_unix_nano == 1_700_000_000_250_000_000
    assert read.end_time_unix_nano == 1_700_000_001_500_000_000
    assert {pair.key: plain(pair.value) for pair in read.attributes} == {
        "a": "x" * otlp.TEXT_CHARS_MAX,
        "b": 7,
        "c": 0.5,
        "d": True,
        "error.type": "upstream",
    }
    assert read.status.code == Status.STATUS_CODE_ERROR
    assert [(link.trace_id.hex(), link.span_id.hex()) for link in read.links] == [
        ("1" * 32, "2" * 16)
    ]


def test_a_clock_that_is_set_back_makes_no_negative_span() -> None:
    span = Span(
        context=CLIENT,
        parent_id="",
        name="x",
        kind=SpanKind.INTERNAL,
        began_s=10.0,
        ended_s=9.0,
        attributes={},
    )
    request = ExportTraceServiceRequest.FromString(otlp.encode([span], {}))
    (read,) = request.resource_spans[0].scope_spans[0].spans
    assert read.start_time_unix_nano == read.end_time_unix_nano
    assert not read.parent_span_id

"""Encodes spans as OTLP (protobuf), with OpenTelemetry's own message classes.

Imported only where spans are exported.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from isochrone.service.tracing import names
from isochrone.service.tracing.spans import AttributeValue, Span

TEXT_CHARS_MAX: Final = 256
"""A longer attribute is cut: useful values are shorter."""

SCOPE: Final = "isochrone"


def encode(spans: Iterable[Span], resource: Mapping[str, AttributeValue]) -> bytes:
    """Return the body of one export request. `resource` names the service that made the spans."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(_key_values(resource))
    scoped = group.scope_spans.add()
    scoped.scope.name = SCOPE
    scoped.spans.extend(map(_message, spans))
    return request.SerializeToString()


def rejected_spans(body: bytes) -> int:
    """Return how many spans the collector's answer says that it did not take."""
    try:
        answer = ExportTraceServiceResponse.FromString(body)
    except DecodeError:
        return 0
    return answer.partial_success.rejected_spans


def _message(span: Span) -> trace_pb2.Span:
    context, attributes = span.context, span.attributes
    message = trace_pb2.Span(
        trace_id=bytes.fromhex(context.trace_id),
        span_id=bytes.fromhex(context.span_id),
        parent_span_id=bytes.fromhex(span.parent_id),
        name=span.name[:TEXT_CHARS_MAX],
        kind=trace_pb2.Span.SpanKind.ValueType(span.kind),
        start_time_unix_nano=_nanoseconds(span.began_s),
        end_time_unix_nano=_nanoseconds(max(span.began_s, span.ended_s)),
        attributes=_key_values(attributes),
        flags=int(context.is_sampled),
    )
    if span.error:
        message.attributes.add(key=names.ERROR_TYPE).value.string_value = span.error
        message.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    if span.link is not None:
        message.links.add(
            trace_id=bytes.fromhex(span.link.trace_id), span_id=bytes.fromhex(span.link.span_id)
        )
    return message


def _key_values(attributes: Mapping[str, AttributeValue]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: AttributeValue) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case _:
            return AnyValue(string_value=value[:TEXT_CHARS_MAX])


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e6) * 1000

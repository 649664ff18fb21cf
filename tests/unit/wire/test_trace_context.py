"""The `traceparent` header, by the examples of W3C Trace Context."""

import pytest

from isochrone.wire.http.trace_context import TraceContext, parse_traceparent

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-{PARENT}-01", TraceContext(TRACE, PARENT, True)),
        (f"00-{TRACE}-{PARENT}-00", TraceContext(TRACE, PARENT, False)),
        (f"00-{TRACE}-{PARENT}-ff", TraceContext(TRACE, PARENT, True)),
        (f"cc-{TRACE}-{PARENT}-02", TraceContext(TRACE, PARENT, False)),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE}-{PARENT}-01\r\nx: y", None),
        (f"00-{TRACE}-{PARENT}", None),
        ("", None),
    ],
)
def test_a_header_is_read_or_ignored(value: str, expected: TraceContext | None) -> None:
    assert parse_traceparent(value) == expected


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_written_header_reads_the_same(is_sampled: bool) -> None:
    context = TraceContext(TRACE, PARENT, is_sampled)
    assert context.traceparent == f"00-{TRACE}-{PARENT}-0{int(is_sampled)}"
    assert parse_traceparent(context.traceparent) == context

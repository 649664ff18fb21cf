"""A request's position in a distributed trace, as W3C Trace Context writes it (`traceparent`)."""

import re
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_INVALID_VERSION: Final = "ff"
_SAMPLED: Final = 1
"""The bit of the flags which says that the sender records this trace."""


class TraceContext(NamedTuple):
    """A trace, and the span in it that is the parent of the next spans. Ids are hexadecimal."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def parse_traceparent(value: str) -> TraceContext | None:
    """Parse a header value; return None if it is malformed, which the standard says to ignore."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags = match.groups()
    # Ids of zeros alone are invalid.
    if version == _INVALID_VERSION or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

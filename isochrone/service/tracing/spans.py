"""A finished span, and the settings of sampling. Pure."""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import msgspec

from isochrone.wire.http.trace_context import TraceContext

AttributeValue = str | int | float | bool


class SpanKind(IntEnum):
    """OTLP's number of a span's kind."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step of a request. Times are Unix time in seconds.

    `parent_id` is empty for the first span of a trace. `error` says what failed; empty if nothing
    did. `link` is another trace that this one was started by.
    """

    context: TraceContext
    parent_id: str
    name: str
    kind: SpanKind
    began_s: float
    ended_s: float
    attributes: Mapping[str, AttributeValue]
    error: str = ""
    link: TraceContext | None = None


class Sampling(NamedTuple):
    """Which requests are traced: `ratio` of them, or those that their client says.

    With `follows_clients` the sampled flag of a `traceparent` decides, both ways.
    """

    ratio: float
    follows_clients: bool

    def includes(self, client: TraceContext | None, draw: float) -> bool:
        """Return whether a request is traced. `draw` is a random number from 0 up to 1."""
        if client is not None and self.follows_clients:
            return client.is_sampled
        return draw < self.ratio

"""Records the spans of a request while it passes through a service.

The current span belongs to a task and to the tasks that it starts, so that no function needs a
parameter for it. Without a traced request nothing is recorded.
"""

from collections.abc import Callable, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from isochrone.service.tracing.spans import AttributeValue, Span, SpanKind
from isochrone.wire.http import headers
from isochrone.wire.http.trace_context import TraceContext


@dataclass(eq=False)
class SpanRecorder:
    """Makes spans, with the clocks and ids given to it, and hands over the finished ones.

    `clock` returns monotonic seconds, `unix_clock` Unix time.
    `new_id(n)` returns `n` random bytes in hexadecimal.
    """

    export: Callable[[Sequence[Span]], None]
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    new_id: Callable[[int], str]

    def request(self, parent: TraceContext, name: str, kind: SpanKind) -> "OpenSpan":
        """Return the first span of this service in the trace of `parent`; use it in a `with`."""
        offset_s = self.unix_clock() - self.clock()
        return OpenSpan(self, parent, name, kind, offset_s)


class OpenSpan:
    """A step that has begun; the current span within its `with` until it ends."""

    def __init__(
        self,
        recorder: SpanRecorder,
        parent: TraceContext,
        name: str,
        kind: SpanKind,
        offset_s: float,
    ) -> None:
        """Begin now. `offset_s` is what to add to monotonic seconds to get Unix time."""
        self._recorder = recorder
        self._parent = parent
        self._name = name
        self._kind = kind
        self._offset_s = offset_s
        self._began_s = recorder.clock()
        self._attributes: dict[str, AttributeValue] = {}
        self._error = ""
        self._outer: OpenSpan | None = None
        self._has_ended = False
        self.context = TraceContext(parent.trace_id, recorder.new_id(8))

    def __enter__(self) -> Self:
        self._outer = _CURRENT.get()
        _CURRENT.set(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(type(error).__name__)
        self.end()

    def child(self, name: str, kind: SpanKind) -> "OpenSpan":
        """Return a step of this one that begins now; use it in a `with`."""
        return OpenSpan(self._recorder, self.context, name, kind, self._offset_s)

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute."""
        self._attributes[name] = value

    def set_elapsed(self, name: str) -> None:
        """Set an attribute to the seconds since the step began."""
        self._attributes[name] = self._recorder.clock() - self._began_s

    def fail(self, error: str) -> None:
        """Set the error's type, in one word."""
        if not self._has_ended:
            self._error = error

    def add_to(self, sent: MutableMapping[str, str]) -> None:
        """Make this step the parent of the spans that the receiver of these headers records."""
        sent[headers.TRACEPARENT] = self.context.traceparent

    def record(self, steps: Sequence[tuple[str, float]]) -> None:
        """Record steps of this one that another process timed: their names and seconds.

        They follow each other, and the last has just ended.
        """
        ended_s = self._offset_s + self._recorder.clock()
        for name, seconds in reversed(steps):
            step = Span(
                context=TraceContext(self.context.trace_id, self._recorder.new_id(8)),
                parent_id=self.context.span_id,
                name=name,
                kind=SpanKind.INTERNAL,
                began_s=ended_s - seconds,
                ended_s=ended_s,
                attributes={},
                error="",
            )
            self._recorder.export((step,))
            ended_s -= seconds

    def end(self) -> None:
        """End the step and let its outer one be current again. A second call has no effect."""
        if self._has_ended:
            return
        self._has_ended = True
        if _CURRENT.get() is self:
            _CURRENT.set(self._outer)
        span = Span(
            context=self.context,
            parent_id=self._parent.span_id,
            name=self._name,
            kind=self._kind,
            began_s=self._offset_s + self._began_s,
            ended_s=self._offset_s + self._recorder.clock(),
            attributes=self._attributes,
            error=self._error,
        )
        self._recorder.export((span,))


class NoSpan:
    """The step of a request that is not traced."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing."""

    def set(self, name: str, value: AttributeValue) -> None:
        """Do nothing."""

    def set_elapsed(self, name: str) -> None:
        """Do nothing."""

    def add_to(self, sent: MutableMapping[str, str]) -> None:
        """Do nothing: a `traceparent` is passed on as it came."""

    def record(self, steps: Sequence[tuple[str, float]]) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


AnySpan = OpenSpan | NoSpan
NO_SPAN: Final = NoSpan()
_CURRENT: Final[ContextVar[OpenSpan | None]] = ContextVar("isochrone_span", default=None)


def current_span() -> AnySpan:
    """Return the current step of the request that this task serves."""
    return _CURRENT.get() or NO_SPAN


def child_span(name: str, kind: SpanKind = SpanKind.INTERNAL) -> AnySpan:
    """Return a step of the current one that begins now; use it in a `with`."""
    current = _CURRENT.get()
    return NO_SPAN if current is None else current.child(name, kind)

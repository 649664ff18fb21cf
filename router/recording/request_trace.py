"""The record of a traced request while it is served; `trace_spans.py` makes spans of it."""

from dataclasses import dataclass, field

from isochrone.wire.http.trace_context import TraceContext
from router.decide.replicas.ranked_route import RankedRoute


@dataclass(slots=True, eq=False)
class AttemptTrace:
    """One attempt: the replica it was sent to, the one that answered, the times in monotonic
    seconds, and the error."""

    span_id: str
    target: RankedRoute
    answered_by: RankedRoute
    sent_at_s: float
    generated_before: int
    prefill_id: str = ""
    first_token_at_s: float = 0.0
    ended_at_s: float = 0.0
    error: str = ""


@dataclass(slots=True, eq=False)
class CapacityWait:
    """One wait in the admission queue, before the attempt of this index. Monotonic seconds.

    That for images is before the first.
    """

    span_id: str
    attempt_index: int
    began_s: float
    ended_s: float


@dataclass(slots=True, eq=False)
class RequestTrace:
    """The trace of one request.

    `context` is the router's own span, `parent_id` the client's if its trace is continued; `link`
    is the client's if it is not. `error` is the code of the error that the client got. `fetch` is
    the wait for the images that the request links to.
    """

    context: TraceContext
    parent_id: str
    link: TraceContext | None
    attempts: list[AttemptTrace] = field(default_factory=list)
    waits: list[CapacityWait] = field(default_factory=list)
    fetch: CapacityWait | None = None
    error: str = ""

    @property
    def traceparent(self) -> str:
        """The header for the node: the current attempt is the parent of what it records."""
        context = self.context
        return TraceContext(context.trace_id, self.attempts[-1].span_id).traceparent

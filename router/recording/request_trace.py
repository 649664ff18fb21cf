"""The record of a traced request while it is served; `trace_spans.py` makes spans of it."""

from isochrone.wire.http.trace_context import TraceContext
from router.decide.replicas.ranked_route import RankedRoute


class AttemptTrace:
    """One attempt: the replica it was sent to, the one that answered, the times in monotonic
    seconds, and the error."""

    __slots__ = (
        "answered_by", "ended_at_s", "error", "first_token_at_s", "generated_before", "prefill_id",
        "sent_at_s", "span_id", "target",
    )  # fmt: skip

    def __init__(
        self, span_id: str, target: RankedRoute, sent_at_s: float, generated_before: int
    ) -> None:
        self.span_id = span_id
        self.target = target
        self.sent_at_s = sent_at_s
        self.generated_before = generated_before
        self.answered_by = target
        self.prefill_id = ""
        self.first_token_at_s = 0.0
        self.ended_at_s = 0.0
        self.error = ""


class CapacityWait:
    """One wait in the admission queue, before the attempt of this index. Monotonic seconds.

    That for images is before the first.
    """

    __slots__ = ("attempt_index", "began_s", "ended_s", "span_id")

    def __init__(self, span_id: str, attempt_index: int, began_s: float, ended_s: float) -> None:
        self.span_id = span_id
        self.attempt_index = attempt_index
        self.began_s = began_s
        self.ended_s = ended_s


class RequestTrace:
    """The trace of one request.

    `context` is the router's own span, `parent_id` the client's if its trace is continued; `link`
    is the client's if it is not. `error` is the code of the error that the client got. `fetch` is
    the wait for the images that the request links to.
    """

    __slots__ = ("attempts", "context", "error", "fetch", "link", "parent_id", "waits")

    def __init__(self, context: TraceContext, parent_id: str, link: TraceContext | None) -> None:
        self.context = context
        self.parent_id = parent_id
        self.link = link
        self.attempts: list[AttemptTrace] = []
        self.waits: list[CapacityWait] = []
        self.fetch: CapacityWait | None = None
        self.error = ""

    @property
    def traceparent(self) -> str:
        """The header for the node: the current attempt is the parent of what it records."""
        context = self.context
        return TraceContext(context.trace_id, self.attempts[-1].span_id).traceparent

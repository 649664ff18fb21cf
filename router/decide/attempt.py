"""The life of one attempt: one request sent to one replica.

Rule 1: every change of state is in TRANSITIONS; an event that is not there is a bug.
Rule 2: an attempt that was refused or failed stays so. The request makes another attempt instead.
Rule 3: a stream that breaks after its first token is INTERRUPTED, and RESUMED once the rest of the
answer comes from elsewhere: from another attempt, or from the router if only the end was missing.
Rule 4: a client that disconnects changes no state. Connection and tokens in flight are released in
every state.
"""

from enum import StrEnum
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode


class AttemptState(StrEnum):
    """How far an attempt has come."""

    RANKED = "ranked"
    """The replica is chosen; nothing is sent yet."""
    SENT = "sent"
    """The request is on its way or being processed; no token has arrived."""
    REFUSED = "refused"
    """The node declined the request. The replica is not at fault."""
    FAILED = "failed"
    """The attempt broke before its first token."""
    ANSWERED = "answered"
    """The first token of a stream or a complete response has arrived."""
    INTERRUPTED = "interrupted"
    """The stream broke after its first token."""
    RESUMED = "resumed"
    """The stream broke, and the rest of the answer came from elsewhere."""
    COMPLETED = "completed"
    """The whole answer came from this attempt."""


class AttemptEvent(StrEnum):
    """An event in the life of an attempt."""

    SENT = "sent"
    HANDED_OFF = "handed_off"
    """The node passed the request on to a peer replica, which answers in its place."""
    REFUSED = "refused"
    FAILED = "failed"
    ANSWERED = "answered"
    RESUMED = "resumed"
    COMPLETED = "completed"


class FailureCause(StrEnum):
    """The reason why an attempt failed."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    CANNOT_RESUME = "cannot_resume"
    """The replica cannot continue a text that another one began."""
    EXHAUSTED = "exhausted"
    """This router, or its machine, has no descriptor or port left for a connection."""
    BROKEN = "broken"
    SILENT = "silent"
    GONE = "gone"
    """The node answers no ping. Its retry was taken from the budget when the node was given up."""
    ERROR = "error"
    ENGINE_LOST = "engine_lost"
    """The engine failed while it processed this request, which may be the cause."""
    SLOW_CLIENT = "slow_client"
    """The node broke off a stream that the client had not read for a while: engines do that."""


REFUSALS: Final = frozenset(
    {FailureCause.REFUSED, FailureCause.CANNOT_RESUME, FailureCause.EXHAUSTED}
)
"""Causes that are no fault of the replica, and cost no retry."""

OF_THE_NODE: Final = frozenset({FailureCause.UNREACHABLE, FailureCause.GONE})
"""Failures of a node that no request causes."""


class NoNodeReached(ApiError):
    """All attempts failed because of their nodes: the request is not the cause."""


class FailedAttempts:
    """The attempts of one request that failed since it was last answered."""

    __slots__ = ("_of_nodes", "count", "last_at_s")

    def __init__(self) -> None:
        self.count = 0
        self.last_at_s = 0.0
        self._of_nodes = 0

    def record(self, cause: FailureCause, now_s: float) -> None:
        """Count an attempt that failed just now."""
        self.count, self.last_at_s = self.count + 1, now_s
        self._of_nodes += cause in OF_THE_NODE

    def as_error(self, last: Exception) -> ApiError:
        """Return the error for the client; `last` is that of the last attempt."""
        kind = NoNodeReached if self._of_nodes == self.count else ApiError
        return kind(
            ErrorCode.UPSTREAM,
            f"cannot answer, try again: {self.count} attempts failed, the last: {last}",
            retry_after_s=1.0,
        )


TRANSITIONS: Final[dict[tuple[AttemptState, AttemptEvent], AttemptState]] = {
    (AttemptState.RANKED, AttemptEvent.SENT): AttemptState.SENT,
    (AttemptState.SENT, AttemptEvent.HANDED_OFF): AttemptState.SENT,
    (AttemptState.SENT, AttemptEvent.REFUSED): AttemptState.REFUSED,
    (AttemptState.SENT, AttemptEvent.FAILED): AttemptState.FAILED,
    (AttemptState.SENT, AttemptEvent.ANSWERED): AttemptState.ANSWERED,
    (AttemptState.ANSWERED, AttemptEvent.FAILED): AttemptState.INTERRUPTED,
    (AttemptState.ANSWERED, AttemptEvent.COMPLETED): AttemptState.COMPLETED,
    (AttemptState.INTERRUPTED, AttemptEvent.RESUMED): AttemptState.RESUMED,
}

FAULTY: Final = frozenset({AttemptState.FAILED, AttemptState.INTERRUPTED, AttemptState.RESUMED})
"""States in which the attempt broke; that was counted against its replica when it happened."""


class ImpossibleAttemptEvent(Exception):
    """The event cannot happen in this state: a bug of the router."""


def after(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """Return the state after `event`; raise ImpossibleAttemptEvent if there is none."""
    following = TRANSITIONS.get((state, event))
    if following is None:
        raise ImpossibleAttemptEvent(f"cannot take {event.value} while {state.value}")
    return following


def event_of(cause: FailureCause) -> AttemptEvent:
    """Return whether a failure is a refusal, which costs no retry, or a fault of the attempt."""
    return AttemptEvent.REFUSED if cause in REFUSALS else AttemptEvent.FAILED

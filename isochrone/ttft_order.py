"""Which of a tenant's waiting requests is next, when some say by when they need a first token.

Tenants share a replica fairly; that is decided before, and apart (`fair_queue.py` of the embedded
engine, `seats.py` of the node). This is the order within a tenant.

Rule 1: of the requests that can still begin to answer in time, the one that is due first goes first
(earliest deadline first).
Rule 2: a request without an objective counts as due TTFT_DEFAULT_S after its arrival, so that
without objectives requests are served in order of arrival.
Rule 3: a request that cannot be answered in time any more, even if it began now, makes way for
those that can: it counts as due LATE_GRACE_S later. It is not dropped, and it does not starve: no
request that arrives after that time goes before it.
Rule 4: an objective that nobody can meet gains nothing: with Rule 3 the request counts as due about
when it would be without one.
"""

from typing import Final, NamedTuple

TTFT_MS_MAX: Final = 600_000
"""The longest objective. It bounds for how long others of the tenant may go before a request."""

TTFT_DEFAULT_S: Final = 10.0
"""When a request without an objective counts as due: as long as a router lets a request wait."""

LATE_GRACE_S: Final = 10.0
"""By how much a request that is too late counts as due later: as without an objective."""


class TtftObjective(NamedTuple):
    """By when a request needs its first token. Times are of one monotonic clock, in seconds."""

    arrived_s: float = 0.0
    due_s: float | None = None
    """At `arrived_s` or later; None if the request has no objective."""
    prefill_s: float = 0.0
    """How long its prompt takes to read, as it is estimated."""

    def is_too_late(self, now_s: float) -> bool:
        """Return True if the first token would come after it is due, even if it began now."""
        return self.due_s is not None and now_s + self.prefill_s > self.due_s

    def counts_due_s(self, now_s: float) -> float:
        """Return when the request counts as due: of a tenant's requests the earliest is next."""
        if self.due_s is None:
            return self.arrived_s + TTFT_DEFAULT_S
        return self.due_s + (LATE_GRACE_S if self.is_too_late(now_s) else 0.0)


NO_OBJECTIVE: Final = TtftObjective()


def ttft_objective(now_s: float, ttft_ms: int | None, prefill_ms: int = 0) -> TtftObjective:
    """Return the objective of a request that arrives now and has `ttft_ms` left, None for none."""
    due_s = None if ttft_ms is None else now_s + ttft_ms / 1000
    return TtftObjective(now_s, due_s, prefill_ms / 1000)

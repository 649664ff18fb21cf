"""Orders a tenant's waiting requests, of which some have a deadline for their first token.

Fair sharing of a replica between tenants is decided before this, elsewhere (`fair_queue.py` of the
embedded engine, `seats.py` of the node). This module orders requests within a tenant.

Rule 1: of the requests that can still begin to answer in time, the one that is due first goes first
(earliest deadline first).
Rule 2: a request without an objective counts as due TTFT_DEFAULT_S after its arrival, so that
without objectives requests are served in order of arrival.
Rule 3: a request that cannot be answered in time any more, even if it began now, makes way for
those that can: it counts as due LATE_GRACE_S later. The request is not dropped, and it does not
starve: no request that arrives after that time is served before it.
Rule 4: an objective that no replica can meet gains nothing: by Rule 3 the request counts as due at
about the time at which it would be due without an objective.
"""

from typing import Final, NamedTuple

TTFT_MS_MAX: Final = 600_000
"""The longest objective. It limits how long other requests of the tenant may be served first."""

TTFT_DEFAULT_S: Final = 10.0
"""A request without an objective counts as due this long after its arrival: as long as a router
lets a request wait."""

LATE_GRACE_S: Final = 10.0
"""The delay of the due time of a request that is too late: as without an objective."""


class TtftObjective(NamedTuple):
    """The due time of a request's first token. Times are of one monotonic clock, in seconds."""

    arrived_s: float = 0.0
    due_s: float | None = None
    """At `arrived_s` or later; None if the request has no objective."""
    prefill_s: float = 0.0
    """The estimated time that prefill of its prompt takes."""

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

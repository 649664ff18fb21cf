"""Start-time fair queueing: assigns each request its position in the queue when it arrives.

Rule 1: virtual time is the latest start of a request that was admitted. A tenant that comes back
after a pause starts there: before all that others have waiting, but without credit for the pause.
Rule 2: the next request of a tenant starts after the cost of its last one. A tenant with a hundred
requests therefore alternates with a tenant that has one. Requests without a tenant share one.
Rule 3: priority moves the start by a fixed number of tokens. The starts of a tenant with higher
priority pass every such lead after a while, so that low priority does not starve behind it.
Rule 4: where requests say by when they need a first token, a tenant's waiting requests of the same
priority exchange their positions: the one that is due first takes the earliest
(isochrone/ttft_order.py). Other tenants' positions stay as they are.

Source: P. Goyal, H. Vin, H. Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from dataclasses import dataclass
from typing import Final

from isochrone.ttft_order import NO_OBJECTIVE, TtftObjective

PRIORITY_MAX: Final = 100
PRIORITY_LOWEST: Final = 0
"""The priority of items of batches and of flexible requests."""

_PRIORITY_DEFAULT: Final = 50
_TOKENS_PER_PRIORITY: Final = 1000
_OUTPUT_TOKENS_CHARGED_MAX: Final = 256
"""Output tokens charged per answer at most: max_tokens is an upper bound, and rarely reached."""
_LEAD_TOKENS_MAX: Final = 65_536
"""A tenant starts at most this far behind the others. It bounds what requests cost their tenant
that were cancelled while they waited; an engine with 80 requests rarely has more waiting."""

_TENANTS_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class SchedulingParams:
    """The parameters of a request that decide when it runs."""

    tenant: bytes = b""
    """The tenant of the request, from the node or else the client's session. Tenants share
    fairly."""
    priority: int = _PRIORITY_DEFAULT
    """Higher is served earlier."""
    deadline_s: float | None = None
    """The time after which the first token is useless, on the clock of `next_batch`'s `now_s`."""
    objective: TtftObjective = NO_OBJECTIVE
    """The time by which the first token is needed, on the same clock."""


class VirtualClock:
    """Assigns virtual start times, and remembers the virtual finish time of each tenant."""

    def __init__(self) -> None:
        self._virtual_time = 0
        self._tenant_finish: dict[bytes, int] = {}

    def __repr__(self) -> str:
        return f"VirtualClock(now={self._virtual_time}, tenants={len(self._tenant_finish)})"

    def record_admitted(self, params: SchedulingParams, virtual_start: int) -> None:
        """Advance virtual time to the start of a request that was admitted."""
        self._virtual_time = max(self._virtual_time, virtual_start + _priority_lead(params))

    def assign_start(
        self, params: SchedulingParams, prompt_tokens: int, tokens_max: int, answers: int = 1
    ) -> int:
        """Return the virtual start of a request that arrives now; the lowest is served first."""
        now = self._virtual_time
        finish = self._tenant_finish.get(params.tenant, now)
        start = max(now, min(finish, now + _LEAD_TOKENS_MAX))
        if len(self._tenant_finish) >= _TENANTS_MAX:
            self._forget_tenants()
        cost = prompt_tokens + answers * min(tokens_max, _OUTPUT_TOKENS_CHARGED_MAX)
        self._tenant_finish[params.tenant] = start + cost
        return start - _priority_lead(params)

    def _forget_tenants(self) -> None:
        """Forget the half of the tenants with the earliest finish: they gain the least by it."""
        by_finish = sorted(self._tenant_finish.items(), key=lambda item: item[1])
        self._tenant_finish = dict(by_finish[_TENANTS_MAX // 2 :])


def _priority_lead(params: SchedulingParams) -> int:
    """Return by how many tokens the priority of a request moves its start forward."""
    return (params.priority - _PRIORITY_DEFAULT) * _TOKENS_PER_PRIORITY

"""The request headers that the engine reads: scheduling, and tokens generated elsewhere."""

from collections.abc import Mapping
from typing import Final

from isochrone.ttft_order import TTFT_MS_MAX, ttft_objective
from isochrone.wire.digits import parse_digits
from isochrone.wire.http.headers import (
    DEADLINE_MS,
    GENERATED_TOKENS,
    PREFILL_MS,
    PRIORITY,
    SESSION_AFFINITY,
    TTFT_MS,
)
from nodeagent.engine.scheduler.fair_queue import PRIORITY_MAX, SchedulingParams
from nodeagent.engine.server.openai.request_errors import invalid_request

_TENANT_BYTES_MAX: Final = 256
_DEADLINE_MS_MAX: Final = 86_400_000
_GENERATED_MAX: Final = 1_000_000


def scheduling_params(headers: Mapping[str, str], salt: str, now_s: float) -> SchedulingParams:
    """Read tenant, priority, deadline and by when the first token is needed.

    The node's `salt` names the tenant. Without one the client's session does, which a client may
    change with every request.
    """
    tenant = (salt or headers.get(SESSION_AFFINITY, "")).encode(errors="surrogateescape")
    deadline_ms = _number(headers, DEADLINE_MS, _DEADLINE_MS_MAX)
    priority = _number(headers, PRIORITY, PRIORITY_MAX)
    ttft_ms = _number(headers, TTFT_MS, TTFT_MS_MAX)
    # The router's estimate, not the client's: one that cannot be read refuses no request.
    prefill_ms = parse_digits(headers.get(PREFILL_MS, "")) or 0
    return SchedulingParams(
        tenant=tenant[:_TENANT_BYTES_MAX],
        priority=SchedulingParams().priority if priority is None else priority,
        deadline_s=None if deadline_ms is None else now_s + deadline_ms / 1000,
        objective=ttft_objective(now_s, ttft_ms, prefill_ms),
    )


def tokens_generated_before(headers: Mapping[str, str]) -> int:
    """Return how many tokens of this answer another engine has generated already."""
    return _number(headers, GENERATED_TOKENS, _GENERATED_MAX) or 0


def _number(headers: Mapping[str, str], name: str, largest: int) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    number = parse_digits(value)
    if number is None or number > largest:
        raise invalid_request(
            name, f"cannot use header '{name}': expected 0 to {largest}, got {value[:40]!r}"
        )
    return number

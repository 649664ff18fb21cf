"""The request headers that the engine reads: scheduling, and tokens generated elsewhere."""

from collections.abc import Mapping
from typing import Final

from isochrone.wire.headers import DEADLINE_MS, GENERATED_TOKENS, PRIORITY, SESSION_AFFINITY
from nodeagent.engine.scheduler.fair_queue import PRIORITY_MAX, SchedulingParams
from nodeagent.engine.server.openai.request_errors import invalid_request

_TENANT_BYTES_MAX: Final = 256
_DEADLINE_MS_MAX: Final = 86_400_000
_GENERATED_MAX: Final = 1_000_000


def scheduling_params(headers: Mapping[str, str], salt: str, now_s: float) -> SchedulingParams:
    """Read tenant, priority and deadline.

    The node's `salt` names the tenant. Without one the client's session does, which a client may
    change with every request.
    """
    tenant = (salt or headers.get(SESSION_AFFINITY, "")).encode(errors="surrogateescape")
    deadline_ms = _number(headers, DEADLINE_MS, _DEADLINE_MS_MAX)
    priority = _number(headers, PRIORITY, PRIORITY_MAX)
    return SchedulingParams(
        tenant=tenant[:_TENANT_BYTES_MAX],
        priority=SchedulingParams().priority if priority is None else priority,
        deadline_s=None if deadline_ms is None else now_s + deadline_ms / 1000,
    )


def tokens_generated_before(headers: Mapping[str, str]) -> int:
    """Return how many tokens of this answer another engine has generated already."""
    return _number(headers, GENERATED_TOKENS, _GENERATED_MAX) or 0


def _number(headers: Mapping[str, str], name: str, largest: int) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) <= largest):
        raise invalid_request(
            name, f"cannot use header '{name}': expected 0 to {largest}, got {value[:40]!r}"
        )
    return int(value)

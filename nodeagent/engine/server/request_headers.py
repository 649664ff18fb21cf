"""What a request's headers say of it: its place in the queue, and what of it was said before."""

from collections.abc import Mapping
from typing import Final

from isochrone.wire.headers import DEADLINE_MS, PRIORITY, SAID, SESSION_AFFINITY
from nodeagent.engine.scheduler.fair_queue import PRIORITY_MAX, Standing
from nodeagent.engine.server.request_body import refused

_SESSION_BYTES_MAX: Final = 256
_DEADLINE_MS_MAX: Final = 86_400_000
_SAID_MAX: Final = 1_000_000


def standing_of(headers: Mapping[str, str], salt: str, now_s: float) -> Standing:
    """Read the headers; without a session the tenant's salt stands for one."""
    session = (headers.get(SESSION_AFFINITY) or salt).encode(errors="surrogateescape")
    deadline_ms = _number(headers, DEADLINE_MS, _DEADLINE_MS_MAX)
    priority = _number(headers, PRIORITY, PRIORITY_MAX)
    usual = Standing()
    return Standing(
        session=session[:_SESSION_BYTES_MAX],
        priority=usual.priority if priority is None else priority,
        deadline_s=None if deadline_ms is None else now_s + deadline_ms / 1000,
    )


def said_of(headers: Mapping[str, str]) -> int:
    """Return how many tokens of this answer were drawn before, elsewhere."""
    return _number(headers, SAID, _SAID_MAX) or 0


def _number(headers: Mapping[str, str], name: str, largest: int) -> int | None:
    value = headers.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) <= largest):
        raise refused(name, f"cannot use {value[:40]!r}: a number from 0 to {largest} is expected")
    return int(value)

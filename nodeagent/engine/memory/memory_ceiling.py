"""Decides whether memory is too close to its limit to accept another request.

Refusing early keeps the kernel from killing the process.

Rule 1: within a margin below any limit no new request is accepted. Running requests continue, and
free memory as they end.
Rule 2: the margin is a share of the limit, because running requests may still grow, and is bounded,
so that a large machine does not waste memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MARGIN_DIVISOR: Final = 20
"""The margin is one part in this many of the limit."""
_MARGIN_BYTES_MAX: Final = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory use of something that has a limit: this process, or a cgroup."""

    owner: str
    used_bytes: int
    ceiling_bytes: int

    @property
    def margin_bytes(self) -> int:
        """The bytes kept free below the limit."""
        return min(self.ceiling_bytes // _MARGIN_DIVISOR, _MARGIN_BYTES_MAX)

    @property
    def left_bytes(self) -> int:
        """The bytes that new requests may take; negative inside the margin."""
        return self.ceiling_bytes - self.margin_bytes - self.used_bytes


def tightest(uses: Sequence[MemoryUse]) -> MemoryUse | None:
    """Return the use with the fewest bytes left, or None if nothing has a limit."""
    return min(uses, key=lambda use: use.left_bytes, default=None)


def refusal_reason(uses: Sequence[MemoryUse]) -> str:
    """Return why another request cannot be accepted, or "" if it can."""
    use = tightest(uses)
    if use is None or use.left_bytes > 0:
        return ""
    return (
        f"cannot take this request: {use.owner} uses {use.used_bytes} bytes of memory; the limit is"
        f" {use.ceiling_bytes}, and no new request is accepted from"
        f" {use.ceiling_bytes - use.margin_bytes} on"
    )

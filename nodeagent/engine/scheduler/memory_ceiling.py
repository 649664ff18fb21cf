"""When memory is too near its end for another request: it is refused before the process is killed.

Rule 1: from a margin below any ceiling on, nothing new is taken; what runs goes on and gives back.
Rule 2: the margin is a share of the ceiling, for what runs may still grow, and bounded: on a large
machine a share would be memory that nobody uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_MARGIN_SHARE: Final = 20
_MARGIN_BYTES_MAX: Final = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Use:
    """How much is taken of what has a ceiling."""

    of: str
    used_bytes: int
    ceiling_bytes: int

    @property
    def margin_bytes(self) -> int:
        """What is kept free below the ceiling."""
        return min(self.ceiling_bytes // _MARGIN_SHARE, _MARGIN_BYTES_MAX)

    @property
    def left_bytes(self) -> int:
        """What new requests may still take; below nought where the margin itself is begun."""
        return self.ceiling_bytes - self.margin_bytes - self.used_bytes


def tightest(uses: Sequence[Use]) -> Use | None:
    """Return the use that leaves least; None where nothing has a ceiling."""
    return min(uses, key=lambda use: use.left_bytes, default=None)


def refusal(uses: Sequence[Use]) -> str:
    """Say why another request cannot be taken; empty where it can."""
    use = tightest(uses)
    if use is None or use.left_bytes > 0:
        return ""
    return (
        f"cannot take this request: {use.of} uses {use.used_bytes} bytes of memory; the limit is"
        f" {use.ceiling_bytes}, and nothing new is taken from"
        f" {use.ceiling_bytes - use.margin_bytes} on"
    )

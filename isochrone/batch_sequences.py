"""How many of an engine's sequences items of batches may take, where a client cannot preempt them.

Routers send no more than this, and nodes run no more: each router sends by what it knew seconds
ago, so several together may send more.
"""

from typing import Final

KEPT_FREE_SHARE: Final = 0.0625
"""The share of the sequences that stays free, at least one: a client's request begins there at
once. Items may use 90 % of what is idle (ops/bench/batch.md)."""


def sequences_for_items(sequences: int) -> int:
    """Return how many of `sequences` items may take; with a single one, that one."""
    return max(1, sequences - max(1, int(KEPT_FREE_SHARE * sequences)))

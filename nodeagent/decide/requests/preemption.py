"""Decides which items of batches end at once, so that a client's request begins in their place.

Rule 1: items end only for a request of a client that would wait or be refused because of them.
Rule 2: the item that was preempted least often ends first, and of several the one that began last,
which loses least. An item that has not begun goes before those that have.
Rule 3: an item whose answer has begun, or that was preempted PREEMPTIONS_MAX times, is not
preempted: it finishes.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Final

PREEMPTIONS_MAX: Final = 3
"""How often an item may lose its place: it then takes at most this many times longer to answer."""


class BatchItem:
    """An item of a batch at a replica, which was preempted `preemptions` times before."""

    __slots__ = ("_is_kept", "_on_preempt", "began_s", "is_preempted", "preemptions")

    def __init__(self, preemptions: int) -> None:
        self.preemptions = preemptions
        self.began_s = inf
        """When it began in the engine, monotonic; infinite while it waits."""
        self.is_preempted = False
        self._is_kept = preemptions >= PREEMPTIONS_MAX
        self._on_preempt: list[Callable[[], object]] = []

    @property
    def has_begun(self) -> bool:
        """True once it is in the engine."""
        return self.began_s != inf

    @property
    def can_be_preempted(self) -> bool:
        """True while a client's request may end it."""
        return not (self._is_kept or self.is_preempted)

    def on_preempt(self, release: Callable[[], object]) -> None:
        """Call `release` when it is preempted."""
        self._on_preempt.append(release)

    def keep(self) -> None:
        """Note that its answer has begun: it is no longer preempted."""
        self._is_kept = True

    def preempt(self) -> None:
        """End it, and give back what it holds."""
        self.is_preempted = True
        for release in self._on_preempt:
            release()


def in_order_of_preemption(items: Iterable[BatchItem]) -> list[BatchItem]:
    """Return the items that may be preempted, the first to go first."""
    endable = [item for item in items if item.can_be_preempted]
    return sorted(endable, key=lambda item: (item.has_begun, item.preemptions, -item.began_s))

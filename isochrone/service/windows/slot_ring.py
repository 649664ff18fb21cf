"""The slots of a window: taken in order for blocks that are sent, and released in order."""

from typing import NamedTuple


class SlotRun(NamedTuple):
    """Slots that lie side by side."""

    first: int
    slots: int


class SlotRing:
    """Counts the slots of one transfer's window."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._next = 0

    def take(self, count_max: int) -> SlotRun | None:
        """Take up to `count_max` slots that lie side by side; None if none is free."""
        count = min(count_max, self.total - self.used, self.total - self._next)
        if count <= 0:
            return None
        run = SlotRun(self._next, count)
        self._next = (self._next + count) % self.total
        self.used += count
        return run

    def give_back(self, count: int) -> None:
        """Give back the last `count` slots of the run that was taken last: they stay empty."""
        self._next = (self._next - count) % self.total
        self.used -= count

    def release(self, count: int) -> None:
        """Free the oldest `count` slots. Raises ValueError if fewer are in use."""
        if not 0 < count <= self.used:
            raise ValueError(f"cannot release {count} slots: {self.used} are in use")
        self.used -= count

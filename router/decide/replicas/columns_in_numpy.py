"""The columns of slot_columns.py in numpy, for routers without the compiled request path."""

from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_EMPTY_ROW: Final = (0.0, 0.0, 0.0, -1.0)
_CAPACITY_MIN: Final = 16

_SHARED_FROM: Final = 2048
"""Fewer slots are copied in less time than noting their changes takes."""

_SLOTS_PER_CHANGE: Final = 4
"""Changes are noted, one for this many slots; after that the rows are copied. A request changes a
dozen, so few requests have to wait for a copy of ten thousand."""


class ValuesInNumpy:
    """See SlotValues."""

    def __init__(self, values: Floats | None = None) -> None:
        """Start empty, or with these values."""
        self._values: Floats = np.empty(0) if values is None else values

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._values)

    def __getitem__(self, slot: int) -> float:
        """Return the value of a slot."""
        return float(self._values[slot])

    def __setitem__(self, slot: int, value: float) -> None:
        """Change the value of a slot."""
        self._values[slot] = value

    def append(self, value: float) -> None:
        """See SlotValues."""
        self._values = np.append(self._values, value)

    def best_two(self) -> tuple[int, float]:
        """See SlotValues."""
        values = self._values
        if not len(values):
            return -1, inf
        best = int(values.argmin())
        lowest = float(values[best])
        if lowest == inf:
            return -1, inf
        values[best] = inf
        second = float(values.min())
        values[best] = lowest
        return best, second

    def count_up_to(self, limit: float) -> int:
        """See SlotValues."""
        return int(np.count_nonzero(self._values <= limit))

    def nth_up_to(self, limit: float, n: int) -> int:
        """See SlotValues."""
        return int(np.flatnonzero(self._values <= limit)[n])

    def up_to(self, limit: float) -> list[int]:
        """See SlotValues."""
        found: list[int] = np.flatnonzero(self._values <= limit).tolist()
        return found

    def add_outside(self, bits: bytes, added: float) -> None:
        """See SlotValues."""
        self._values[~_is_set(bits, len(self._values))] += added

    def lower(self, bits: bytes, amounts: Floats, factor: float) -> None:
        """Lower the values of some slots by their amounts times a factor."""
        slots = np.flatnonzero(_is_set(bits, len(self._values)))
        self._values[slots] -= factor * amounts[slots]


class _Changes:
    """The rows before each change, in the order of the changes, to undo them in a copy."""

    def __init__(self, capacity: int) -> None:
        self.count: int = 0
        self._capacity = capacity
        self._slots = np.empty(capacity, np.intp)
        self._before: Floats = np.empty((4, capacity))

    def note(self, rows: Floats, slot: int) -> bool:
        """Note a slot that is about to change; return False if the log is full."""
        if self.count == self._capacity:
            return False
        self._slots[self.count] = slot
        self._before[:, self.count] = rows[:, slot]
        self.count += 1
        return True

    def undo(self, rows: Floats, since: int) -> None:
        """Undo all changes but the first `since`, the last one first."""
        slots, before = self._slots[since : self.count], self._before[:, since : self.count]
        # Later slots are not in the copy.
        known = slots < rows.shape[1]
        # Where a slot changed more than once, numpy keeps the last value assigned: the oldest.
        rows[:, slots[known][::-1]] = before[:, known][:, ::-1]


class ColumnsInNumpy:
    """See SlotColumns.

    A copy of many slots shares the rows until it is read after a change of the original, which
    notes what it changes. Most copies are read once, before anything changes.
    """

    def __init__(self, rows: Floats | None = None, changes: _Changes | None = None) -> None:
        """Start empty, or as a copy of these rows, before any later change."""
        self._rows: Floats = np.empty((4, 0)) if rows is None else rows
        """Columns by slot: time of readiness, least wait, ms per token and free tokens."""
        self._count: int = self._rows.shape[1]
        self._changes = changes
        """The changes since there are copies that share the rows; None if there are none."""
        self._is_copy = rows is not None
        self._changes_seen: int = changes.count if changes else 0

    def __len__(self) -> int:
        """Return the number of slots."""
        return self._count

    def append(self) -> None:
        """See SlotColumns."""
        if self._is_copy:
            self._separate()
        if self._count == self._rows.shape[1]:
            grown = np.empty((4, max(_CAPACITY_MIN, 2 * self._count)))
            grown[:, : self._count] = self._rows
            self._rows, self._changes = grown, None
        self._rows[:, self._count] = _EMPTY_ROW
        self._count += 1

    def replace(
        self,
        slot: int,
        ready_at_ms: float,
        wait_min_ms: float,
        ms_per_token: float,
        free_tokens: float,
    ) -> None:
        """See SlotColumns."""
        if not 0 <= slot < self._count:
            raise IndexError("no such slot")
        if self._is_copy:
            self._separate()
        changes = self._changes
        if changes is not None and not changes.note(self._rows, slot):
            # Copies keep the rows as they are.
            self._rows, self._changes = self._rows.copy(), None
        self._rows[:, slot] = (ready_at_ms, wait_min_ms, ms_per_token, free_tokens)

    def copy(self) -> "ColumnsInNumpy":
        """See SlotColumns."""
        if self._is_copy:
            self._separate()
        if self._count < _SHARED_FROM:
            return ColumnsInNumpy(self._rows[:, : self._count].copy())
        if self._changes is None:
            self._changes = _Changes(self._count // _SLOTS_PER_CHANGE)
        return ColumnsInNumpy(self._rows[:, : self._count], self._changes)

    def costs(self, now_ms: float, work: float, needed_tokens: float) -> ValuesInNumpy:
        """See SlotColumns."""
        ready_at_ms, wait_min_ms, ms_per_token, free_tokens = self._own_rows()[:, : self._count]
        wait_ms = ready_at_ms - now_ms
        np.maximum(wait_ms, wait_min_ms, out=wait_ms)
        costs = work * ms_per_token
        costs += wait_ms
        costs[free_tokens < needed_tokens] = inf
        return ValuesInNumpy(costs)

    def save(self, costs: object, bits: bytes, saved: float) -> None:
        """See SlotColumns."""
        if not isinstance(costs, ValuesInNumpy):
            raise TypeError("expected the costs of slots")
        costs.lower(bits, self._own_rows()[2], saved)

    def _own_rows(self) -> Floats:
        """Return the rows: of a copy, those at the time when it was made."""
        changes = self._changes
        if self._is_copy and changes is not None and changes.count != self._changes_seen:
            self._separate()
        return self._rows

    def _separate(self) -> None:
        """Let a copy have rows of its own, as the original's were when it was made."""
        rows = self._rows.copy()
        if self._changes is not None:
            self._changes.undo(rows, self._changes_seen)
        self._rows, self._changes, self._is_copy = rows, None, False


def _is_set(bits: bytes, count: int) -> NDArray[np.bool_]:
    """Return for each of `count` slots whether its bit is set."""
    # numpy's own padding of no bytes at all is not zero.
    octets = np.frombuffer(bits.ljust((count + 7) // 8, b"\0"), np.uint8)
    return np.unpackbits(octets, count=count, bitorder="little").view(np.bool_)

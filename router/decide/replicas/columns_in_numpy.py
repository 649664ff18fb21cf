"""The columns of slot_columns.py in numpy, for routers without the compiled request path."""

from math import inf
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_EMPTY_ROW: Final = (0.0, 0.0, 0.0, -1.0)
_ROOM_MIN: Final = 16


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


class ColumnsInNumpy:
    """See SlotColumns."""

    def __init__(self, rows: Floats | None = None) -> None:
        """Start empty, or with these rows."""
        self._rows: Floats = np.empty((4, 0)) if rows is None else rows
        """Columns by slot: time of readiness, least wait, ms per token and free tokens."""
        self._count: int = self._rows.shape[1]

    def __len__(self) -> int:
        """Return the number of slots."""
        return self._count

    def append(self) -> None:
        """See SlotColumns."""
        if self._count == self._rows.shape[1]:
            grown = np.empty((4, max(_ROOM_MIN, 2 * self._count)))
            grown[:, : self._count] = self._rows
            self._rows = grown
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
        self._rows[:, slot] = (ready_at_ms, wait_min_ms, ms_per_token, free_tokens)

    def copy(self) -> "ColumnsInNumpy":
        """See SlotColumns."""
        return ColumnsInNumpy(self._rows[:, : self._count].copy())

    def costs(self, now_ms: float, work: float, needed_tokens: float) -> ValuesInNumpy:
        """See SlotColumns."""
        ready_at_ms, wait_min_ms, ms_per_token, free_tokens = self._rows[:, : self._count]
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
        costs.lower(bits, self._rows[2], saved)


def _is_set(bits: bytes, count: int) -> NDArray[np.bool_]:
    """Return for each of `count` slots whether its bit is set."""
    # numpy's own padding of no bytes at all is not zero.
    octets = np.frombuffer(bits.ljust((count + 7) // 8, b"\0"), np.uint8)
    return np.unpackbits(octets, count=count, bitorder="little").view(np.bool_)

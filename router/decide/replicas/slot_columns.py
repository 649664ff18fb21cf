"""The figures of all replicas of a deployment that ranking compares, and the costs of a request.

A request looks at all replicas, so there are columns of numbers rather than an object for each. The
compiled request path has them in C (`column_scan.c`), others in numpy (`columns_in_numpy.py`), with
the same results to the last bit.
"""

import importlib
from collections.abc import Callable
from typing import Protocol


class SlotValues(Protocol):
    """A number for each slot, infinite for one that must not be chosen."""

    def __len__(self) -> int:
        """Return the number of slots."""

    def __getitem__(self, slot: int) -> float:
        """Return the value of a slot."""

    def __setitem__(self, slot: int, value: float) -> None:
        """Change the value of a slot."""

    def append(self, value: float) -> None:
        """Add a slot."""

    def best_two(self) -> tuple[int, float]:
        """Return the first slot of lowest value, -1 if all are infinite, and the second value."""

    def count_up_to(self, limit: float) -> int:
        """Return how many slots have at most this value."""

    def nth_up_to(self, limit: float, n: int) -> int:
        """Return the slot that has `n` others of at most this value before it."""

    def up_to(self, limit: float) -> list[int]:
        """Return the slots of at most this value, in their order."""

    def add_outside(self, bits: bytes, added: float) -> None:
        """Add to the values of all slots without a bit. The first eight bits are in byte 0."""


class SlotColumns(Protocol):
    """For each slot the time of readiness, the least wait, the time per token, and what fits.

    The fields are those of ReplicaEstimate. Nothing fits into a new slot.
    """

    def __len__(self) -> int:
        """Return the number of slots."""

    def append(self) -> None:
        """Add a slot without a replica."""

    def replace(
        self,
        slot: int,
        ready_at_ms: float,
        wait_min_ms: float,
        ms_per_token: float,
        free_tokens: float,
    ) -> None:
        """Change the figures of a slot."""

    def copy(self) -> "SlotColumns":
        """Return a copy that later changes do not change."""

    def costs(self, now_ms: float, work: float, needed_tokens: float) -> SlotValues:
        """Return the time that each slot takes for some work; infinite where it does not fit."""

    def save(self, costs: SlotValues, bits: bytes, saved: float) -> None:
        """Lower the costs of the slots with a bit by the time for `saved` work."""


new_slot_columns: Callable[[], SlotColumns]
new_slot_values: Callable[[], SlotValues]

try:
    _in_c = importlib.import_module("router.decide.replicas.column_scan")
except ImportError:
    _in_numpy = importlib.import_module("router.decide.replicas.columns_in_numpy")
    new_slot_columns, new_slot_values = _in_numpy.ColumnsInNumpy, _in_numpy.ValuesInNumpy
else:
    new_slot_columns, new_slot_values = _in_c.SlotColumns, _in_c.SlotValues

"""The row counts for which decode graphs are captured, and why a model has no graphs.

A graph is captured for a number of rows. It serves every step that has only decodes, and at most
that many: the other rows are padding, and their output is cut off.
"""

from collections.abc import Sequence
from typing import Final

_DOUBLE_UNTIL_ROWS: Final = 16
"""Up to this size each bucket is twice the one before; above it, at most 15 rows are padding."""
_COARSE_FROM_ROWS: Final = 256
"""From this size on, buckets lie further apart, and at most a quarter of the rows are padding."""
_COARSE_STEP_ROWS: Final = 64


def graph_buckets(rows_max: int) -> tuple[int, ...]:
    """Return the row counts to capture; the largest is at least `rows_max`."""
    buckets = [1]
    while buckets[-1] < rows_max:
        last = buckets[-1]
        if last < _DOUBLE_UNTIL_ROWS:
            buckets.append(2 * last)
        else:
            step = _DOUBLE_UNTIL_ROWS if last < _COARSE_FROM_ROWS else _COARSE_STEP_ROWS
            buckets.append(last + step)
    return tuple(buckets)


def bucket_of(rows: int, captured: Sequence[int]) -> int | None:
    """Return the smallest of `captured` that is at least `rows`, or None."""
    return min((bucket for bucket in captured if bucket >= rows > 0), default=None)


def why_no_graphs(*, device: str, paged_kernels: bool, experts: int, records_states: bool) -> str:
    """Return why decode steps of a model are not captured; empty where they are."""
    if not device.startswith("cuda"):
        return f"{device} has no graphs"
    if not paged_kernels:
        return "attention over pages needs Triton, which is not available"
    if experts:
        return "the host chooses which experts a step computes"
    if records_states:
        return "a draft head records hidden states in each step"
    return ""

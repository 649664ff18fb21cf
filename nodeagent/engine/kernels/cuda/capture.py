"""Which steps run as a captured graph, of how many rows, and how a device is filled by few rows.

A graph is captured for a number of rows and serves every step of decodes alone that has at most so
many: rows of padding write nowhere, see nothing, and what they answer is cut off.
"""

from collections.abc import Sequence
from typing import Final

_FINE_ROWS: Final = 16
"""Up to here each bucket is twice the one before; above, a step computes fifteen rows in vain at
most, and from the coarse ones on a quarter of them."""
_COARSE_ROWS: Final = 256
_COARSE_STEP_ROWS: Final = 64
SPLITS_MAX: Final = 64
_WAVES: Final = 2
"""Parts of attention for each processor: some end early, and the next one begins."""


def buckets(rows_max: int) -> tuple[int, ...]:
    """Return for how many rows graphs are captured; the largest has room for `rows_max`."""
    found = [1]
    while found[-1] < rows_max:
        last = found[-1]
        if last < _FINE_ROWS:
            found.append(2 * last)
        else:
            found.append(last + (_FINE_ROWS if last < _COARSE_ROWS else _COARSE_STEP_ROWS))
    return tuple(found)


def bucket_of(rows: int, captured: Sequence[int]) -> int | None:
    """Return the least of `captured` that has room for `rows`; None where none has."""
    return min((one for one in captured if one >= rows > 0), default=None)


def splits_of(rows: int, kv_heads: int, context_tokens: int, processors: int, tile: int) -> int:
    """Return into how many parts a row's tokens are split: a power of two that fills the device."""
    wanted = min(_WAVES * processors // max(rows * kv_heads, 1), context_tokens // tile)
    splits = 1
    while 2 * splits <= min(wanted, SPLITS_MAX):
        splits *= 2
    return splits


def why_not(*, device: str, kernels: bool, experts: int, heard: bool) -> str:
    """Say why no step of a model is captured; nothing where steps are."""
    if not device.startswith("cuda"):
        return f"{device} has none"
    if not kernels:
        return "attention over pages needs Triton, which is not here"
    if experts:
        return "which experts a step needs is known on the host only"
    if heard:
        return "what drafts listens to each step, layer by layer"
    return ""

"""The host tier: KV blocks in host memory, evicted least recently used first.

Rule 1: its memory is bounded by its size at construction, and is touched only as it fills.
Rule 2: one thread writes; any thread may ask whether a digest is here.
Rule 3: no device copies from or to this memory: blocks move through staging memory, which is small
enough to be page-locked.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor


class HostTier:
    """Stores at most `total` blocks of `shape` each, by digest."""

    def __init__(self, total: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.total = total
        self.block_bytes = prod(shape) * dtype.itemsize
        self._rows = torch.empty(total, *shape, dtype=dtype)
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(total))

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, digest: object) -> bool:
        return digest in self._row_of

    @property
    def free_rows(self) -> int:
        """How many more blocks fit before one is evicted."""
        return len(self._free)

    def put(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Store `contents` [blocks, ...] so that the first block is evicted last."""
        stored = list(enumerate(digests[: self.total]))
        # In reverse, so that a prefix outlives what follows it.
        for index, digest in reversed(stored):
            if digest not in self._row_of:
                self._row_of[digest] = self._take_row()
                self._rows[self._row_of[digest]] = contents[index]
            self._row_of.move_to_end(digest)

    def discard(self, digests: Sequence[bytes]) -> None:
        """Forget those of the blocks that are here."""
        for digest in digests:
            row = self._row_of.pop(digest, None)
            if row is not None:
                self._free.append(row)

    def check(self, digests: Sequence[bytes], contents: Tensor) -> None:
        """Raise ValueError unless `contents` has one block of this tier's shape per digest."""
        if contents.dtype != self._rows.dtype or contents.shape[1:] != self._rows.shape[1:]:
            raise ValueError(
                f"cannot take KV blocks of {tuple(contents.shape[1:])} {contents.dtype}: those here"
                f" are {tuple(self._rows.shape[1:])} {self._rows.dtype}"
            )
        if len(contents) != len(digests):
            raise ValueError(f"cannot take {len(contents)} KV blocks as {len(digests)}")

    def get(self, digests: Sequence[bytes], out: Tensor | None = None) -> Tensor:
        """Return copies of the blocks [blocks, ...], in `out` if it is given; every digest must be
        here."""
        rows = torch.tensor([self._row_of[digest] for digest in digests], dtype=torch.int64)
        contents = self._rows.new_empty(len(rows), *self._rows.shape[1:]) if out is None else out
        # As bytes: not every operation knows every dtype.
        torch.index_select(_as_bytes(self._rows), 0, rows, out=_as_bytes(contents))
        return contents

    def use(self, digests: Sequence[bytes]) -> None:
        """Have the blocks evicted after all others, the first of them last."""
        for digest in reversed(digests):
            self._row_of.move_to_end(digest)

    def shaped(self, memory: np.ndarray) -> Tensor:
        """Return memory [bytes] as that of some blocks [blocks, ...]."""
        return torch.from_numpy(memory).view(self._rows.dtype).view(-1, *self._rows.shape[1:])

    def as_block(self, content: bytearray) -> Tensor:
        """Return the bytes of one block as a tensor of this tier's block shape."""
        flat = torch.frombuffer(content, dtype=self._rows.dtype)
        return flat.view(self._rows.shape[1:])

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        _, row = self._row_of.popitem(last=False)
        return row


def _as_bytes(blocks: Tensor) -> Tensor:
    return blocks.view(len(blocks), -1).view(torch.uint8)

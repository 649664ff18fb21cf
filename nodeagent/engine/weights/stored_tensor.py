"""Locates tensors in files, and reads them without the safetensors package.

That package has opened the file before, and has checked all lengths and offsets.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from nodeagent.engine.architecture.errors import CheckpointError

_LENGTH: Final = struct.Struct("<Q")
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies contiguously in a file, in row-major order."""

    path: Path
    start: int
    shape: tuple[int, ...]
    kind: str
    """The dtype, by its safetensors name."""
    head_rows: int = 0
    """Not 0: within each `head_rows` rows the file interleaves the first and the second half."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return _DTYPES[self.kind]

    def rows(self, first: int, end: int) -> "StoredTensor":
        """Return rows [first, end) of it."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        start, shape = self.start + first * row_bytes, (end - first, *self.shape[1:])
        return StoredTensor(self.path, start, shape, self.kind, self.head_rows)

    def read(self, file: int) -> Tensor:
        """Read it from its open file."""
        packed = torch.empty(math.prod(self.shape) * self.dtype.itemsize, dtype=torch.uint8)
        read_into(packed.numpy().data, file, self.start, self.path)
        return packed.view(self.dtype).view(self.shape)


def check_regular_file(path: Path) -> None:
    """Raise CheckpointError unless `path` is a regular file: opening a pipe would block forever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"cannot read {path}: it is not a regular file")


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a safetensors file, by name."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    found: dict[str, StoredTensor] = {}
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=_Entry)
        start = _LENGTH.size + length + entry.data_offsets[0]
        found[name] = StoredTensor(path, start, entry.shape, entry.dtype)
    return found


def read_into(left: memoryview, file: int, start: int, path: Path) -> None:
    """Fill `left` from offset `start` on, in several reads: each returns at most 2 GiB.

    Raises CheckpointError where the file ends too early.
    """
    while left:
        try:
            taken = os.preadv(file, [left], start)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if taken == 0:
            raise CheckpointError(f"cannot read {path}: it ends at byte {start}")
        left, start = left[taken:], start + taken

"""Where in a file each weight lies, and reading it from there.

What the safetensors package has opened is sound: it holds lengths and offsets against the file.
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

from nodeagent.engine.model.shape import CheckpointError

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
class Stored:
    """Where a weight lies, in one piece and row behind row."""

    path: Path
    start: int
    shape: tuple[int, ...]
    kind: str
    """What safetensors calls its numbers."""
    head_rows: int = 0
    """Of so many rows, the first half and the second are filed as neighbours; 0 where none are."""

    @property
    def dtype(self) -> torch.dtype:
        """What torch calls its numbers."""
        return _DTYPES[self.kind]

    def rows(self, first: int, end: int) -> "Stored":
        """Return some of its rows."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        start, shape = self.start + first * row_bytes, (end - first, *self.shape[1:])
        return Stored(self.path, start, shape, self.kind, self.head_rows)

    def read(self, file: int) -> Tensor:
        """Read it from its open file, as it lies there."""
        packed = torch.empty(math.prod(self.shape) * self.dtype.itemsize, dtype=torch.uint8)
        read_into(packed.numpy().data, file, self.start, self.path)
        return packed.view(self.dtype).view(self.shape)


def check_plain(path: Path) -> None:
    """Raise CheckpointError where `path` is no plain file: opening a pipe waits without end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"cannot read {path}: it is no plain file")


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def places(path: Path) -> dict[str, Stored]:
    """Return where each weight of a safetensors file lies."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=_Entry)
        start = _LENGTH.size + length + entry.data_offsets[0]
        found[name] = Stored(path, start, entry.shape, entry.dtype)
    return found


def read_into(left: memoryview, file: int, start: int, path: Path) -> None:
    """Fill `left` from `start` on; the system gives two GiB at a time at most."""
    while left:
        try:
            taken = os.preadv(file, [left], start)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        if taken == 0:
            raise CheckpointError(f"cannot read {path}: it ends at byte {start}")
        left, start = left[taken:], start + taken

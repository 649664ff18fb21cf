"""Where in a safetensors file each weight lies, for who reads the file itself.

What the safetensors package has opened is sound: it holds lengths and offsets against the file.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch

_LENGTH: Final = struct.Struct("<Q")
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a weight lies, in one piece and row behind row."""

    path: Path
    start: int
    dtype: torch.dtype


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def places(path: Path) -> dict[str, Stored]:
    """Return where each weight of the file lies, those of kinds that are no floats left out."""
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    start = _LENGTH.size + length
    found: dict[str, Stored] = {}
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=_Entry)
        if entry.dtype in _DTYPES:
            found[name] = Stored(path, start + entry.data_offsets[0], _DTYPES[entry.dtype])
    return found

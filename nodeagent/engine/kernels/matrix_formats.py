"""Formats in which a model file hands a matrix to a linear backend.

Floats come as tensors or as `RowsInFile`. Quantised matrices come as `QuantisedGroups` (numbers,
scales and offsets, whatever the file format was) or as `GgufBlocks` (the bytes of a GGUF file).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

GROUP_WEIGHTS: Final = 32
"""Neighbouring weights of a row that share a scale."""
PANEL_ROWS: Final = 16
"""The C kernels keep matrices in panels of this many rows."""

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
"""The float formats of rows that the C kernels read."""
RowFormat = torch.dtype | str
"""The format of rows in a file: floats, or blocks by their GGUF name ("Q4_0")."""


@dataclass(frozen=True, slots=True)
class RowsInFile:
    """Consecutive rows of a matrix, not read yet."""

    path: Path
    start: int
    """Offset of the first row in bytes."""
    shape: tuple[int, int]
    """Rows and columns."""
    layout: RowFormat
    head_rows: int
    """Not 0: within each `head_rows` rows the file interleaves the two halves that are rotated
    together; the matrix wants one half after the other."""
    read: Callable[[], Tensor]
    """Reads the rows in the order that the matrix wants. Raises CheckpointError."""

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class QuantisedGroups:
    """A matrix in groups of 32 weights along a row: each weight is `number * scale + offset`."""

    numbers: Tensor
    """[rows, columns], uint8; below 16 where `bits` is four."""
    scales: Tensor
    """[rows, columns / 32], fp32."""
    offsets: Tensor
    """[rows, columns / 32], fp32."""
    bits: int = 4
    """Four or eight."""

    def dequantise(self) -> Tensor:
        """Return the weights in fp32."""
        rows, columns = self.numbers.shape
        grouped = self.numbers.view(rows, -1, GROUP_WEIGHTS).float()
        return (
            grouped.mul_(self.scales[..., None]).add_(self.offsets[..., None]).view(rows, columns)
        )


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A matrix as the quantisation blocks of a GGUF file, which the C kernels read directly."""

    parts: tuple[Tensor | RowsInFile, ...]
    """[rows, bytes of a row] each, stacked vertically."""
    columns: int
    layout: str
    """GGUF's name of the block type."""
    unpack: Callable[[Tensor], QuantisedGroups]

    def groups(self) -> QuantisedGroups:
        """Return the same matrix as groups; reads the parts that are still in the file."""
        read = [part.read() if isinstance(part, RowsInFile) else part for part in self.parts]
        return self.unpack(torch.cat(read))


QuantisedMatrix = QuantisedGroups | GgufBlocks


def stack_quantised(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Return one matrix of `parts`, stacked vertically; as blocks only if all have one layout."""
    first = parts[0]
    if len(parts) == 1:
        return first
    blocks = [part for part in parts if isinstance(part, GgufBlocks)]
    alike = len(blocks) == len(parts) and len({part.layout for part in blocks}) == 1
    if isinstance(first, GgufBlocks) and alike:
        return replace(first, parts=tuple(rows for part in blocks for rows in part.parts))
    groups = [part.groups() if isinstance(part, GgufBlocks) else part for part in parts]
    return QuantisedGroups(
        torch.cat([part.numbers for part in groups]),
        torch.cat([part.scales for part in groups]),
        torch.cat([part.offsets for part in groups]),
        max(part.bits for part in groups),
    )

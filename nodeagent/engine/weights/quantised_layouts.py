"""The published layouts of weights quantised alone, and how their bits become numbers again.

Each weight is (number - zero) * scale, with a zero and a scale for each row and group of columns.
The layouts differ in which way a matrix lies, in what order the numbers share a 32-bit word, and in
how zeros are counted:

- `compressed`: compressed-tensors' pack-quantized. Rows of words, lowest bits first; zeros, where
  there are any, packed along rows.
- `gptq`: columns of words, lowest bits first; each zero is stored less one, but in version 2.
  `g_idx` tells each column's group, which may be any.
- `awq`: packed along the rows of the answer, eight to a word in an order of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.matrix_layouts import GROUP_WEIGHTS
from nodeagent.engine.model.layers.linear import Groups

_WORD_BITS: Final = 32
_AWQ_ORDER: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word AWQ keeps the first to the eighth of eight numbers."""

Read = Callable[[str], Tensor]
"""Reads a module's tensor by its last name."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a model's matrices are packed."""

    layout: Literal["compressed", "gptq", "awq"]
    bits: int
    group: int
    """Columns that share a scale; 0 for whole rows."""
    zeros: bool = True
    """False where zero is in the middle of the numbers, and stored nowhere."""
    zeros_less_one: bool = False

    def __str__(self) -> str:
        columns = f"groups of {self.group}" if self.group else "whole rows"
        return f"{self.layout}, {self.bits} bits, {columns}"

    @property
    def mark(self) -> str:
        """The last name of the tensor that tells a packed matrix."""
        return "weight_packed" if self.layout == "compressed" else "qweight"

    def fits(self, rows: int, columns: int) -> bool:
        """True where such a matrix can be packed so."""
        along = {"compressed": (columns,), "gptq": (rows, columns), "awq": (rows,)}[self.layout]
        if self.zeros and self.layout == "compressed":
            along = (rows, columns)
        whole = all(size * self.bits % _WORD_BITS == 0 for size in along)
        return whole and columns % (self.group or columns) == 0

    def parts(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that keeps such a matrix, by its last name."""
        per_word, groups = _WORD_BITS // self.bits, columns // (self.group or columns)
        shapes: dict[str, tuple[int, ...]]
        if self.layout == "compressed":
            shapes = {"weight_packed": (rows, columns // per_word), "weight_scale": (rows, groups)}
            if self.zeros:
                shapes["weight_zero_point"] = (rows // per_word, groups)
            return shapes
        shapes = {
            "qweight": (columns, rows // per_word),
            "qzeros": (groups, rows // per_word),
            "scales": (groups, rows),
        }
        if self.layout == "gptq":
            shapes |= {"qweight": (columns // per_word, rows), "g_idx": (columns,)}
        return shapes

    def read(self, read: Read) -> "Packed":
        """Read one matrix."""
        if self.layout == "compressed":
            numbers, scales = _unpacked(read("weight_packed"), self.bits), read("weight_scale")
            middle = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.float32)
            zeros = middle
            if self.zeros:
                zeros = _unpacked(read("weight_zero_point").T, self.bits).T.float()
            return Packed(self.bits, numbers, zeros, scales.float(), None)
        scales = read("scales").float().T
        if self.layout == "awq":
            numbers, zeros = (_reordered(read(name)) for name in ("qweight", "qzeros"))
            return Packed(self.bits, numbers.T.contiguous(), zeros.T.float(), scales, None)
        numbers = _unpacked(read("qweight").T, self.bits)
        zeros = _unpacked(read("qzeros"), self.bits).T.float() + self.zeros_less_one
        group_of = read("g_idx").long()
        runs = torch.arange(len(group_of)) // (self.group or len(group_of))
        ordered = torch.equal(group_of, runs)
        return Packed(self.bits, numbers, zeros, scales, None if ordered else group_of)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix of numbers with the zeros and scales of its groups of columns."""

    bits: int
    numbers: Tensor
    """[rows, columns], uint8."""
    zeros: Tensor
    """[rows, groups], fp32."""
    scales: Tensor
    """[rows, groups], fp32."""
    group_of: Tensor | None
    """Which group each column is of; None where groups are columns side by side."""

    def wide(self) -> Tensor:
        """Return the weights in fp32."""
        if self.group_of is not None:
            zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
            return (self.numbers - zeros).mul_(scales)
        rows, groups = self.scales.shape
        grouped = self.numbers.view(rows, groups, -1).float()
        return grouped.sub_(self.zeros[..., None]).mul_(self.scales[..., None]).view(rows, -1)

    def groups(self) -> Groups | None:
        """Return the same in the groups that kernels know; None where they cannot be made."""
        columns, groups = self.numbers.shape[1], self.scales.shape[1]
        if self.group_of is not None or columns // groups % GROUP_WEIGHTS:
            return None
        repeats = columns // groups // GROUP_WEIGHTS
        offsets = (-self.zeros * self.scales).repeat_interleave(repeats, 1)
        scales = self.scales.repeat_interleave(repeats, 1)
        return Groups(self.numbers, scales, offsets, self.bits)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of 32-bit words [rows, words], lowest bits first: [rows, numbers]."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts).bitwise_and_((1 << bits) - 1)
    return numbers.to(torch.uint8).flatten(-2)


def _reordered(words: Tensor) -> Tensor:
    numbers = _unpacked(words, 4)
    return numbers.view(len(words), -1, 8)[..., _AWQ_ORDER].reshape(len(words), -1)

"""Unpacks the published layouts of weight-only quantisation.

Each weight is (number - zero) * scale, with a zero and a scale for each row and group of columns.
The layouts differ in the orientation of the matrix, in the order of the numbers in a 32-bit word,
and in the encoding of zeros:

- `compressed`: compressed-tensors' pack-quantized. Words along rows, lowest bits first; zeros are
  optional, and packed along the row dimension.
- `gptq`: words along columns, lowest bits first. Zeros are stored minus one, except in version 2.
  `g_idx` gives the group of each column, in any order.
- `awq`: words along the output rows, eight numbers to a word in an order of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from nodeagent.engine.kernels.matrix_formats import GROUP_WEIGHTS, QuantisedGroups

_WORD_BITS: Final = 32
_AWQ_ORDER: Final = [0, 4, 1, 5, 2, 6, 3, 7]
"""The position in a word of each of AWQ's eight numbers."""

ReadPart = Callable[[str], Tensor]
"""Reads a tensor of the module by the last part of its name."""


@dataclass(frozen=True, slots=True)
class PackingScheme:
    """The packing of a model's matrices."""

    layout: Literal["compressed", "gptq", "awq"]
    bits: int
    group: int
    """Columns that share a scale; 0 for all columns of a row."""
    zeros: bool = True
    """Whether zeros are stored; otherwise zero is the middle of the range."""
    zeros_less_one: bool = False
    """Whether zeros are stored minus one."""

    def __str__(self) -> str:
        columns = f"groups of {self.group}" if self.group else "whole rows"
        return f"{self.layout}, {self.bits} bits, {columns}"

    @property
    def packed_name(self) -> str:
        """The last part of the name of the tensor that holds the packed numbers."""
        return "weight_packed" if self.layout == "compressed" else "qweight"

    def fits(self, rows: int, columns: int) -> bool:
        """Return whether a matrix of this size can be packed so."""
        along = {"compressed": (columns,), "gptq": (rows, columns), "awq": (rows,)}[self.layout]
        if self.zeros and self.layout == "compressed":
            along = (rows, columns)
        whole = all(size * self.bits % _WORD_BITS == 0 for size in along)
        return whole and columns % (self.group or columns) == 0

    def parts(self, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of such a matrix, by the last part of their names."""
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

    def read(self, read: ReadPart) -> "PackedMatrix":
        """Read one matrix."""
        if self.layout == "compressed":
            numbers, scales = _unpacked(read("weight_packed"), self.bits), read("weight_scale")
            middle = torch.full_like(scales, 1 << (self.bits - 1), dtype=torch.float32)
            zeros = middle
            if self.zeros:
                zeros = _unpacked(read("weight_zero_point").T, self.bits).T.float()
            return PackedMatrix(self.bits, numbers, zeros, scales.float(), None)
        scales = read("scales").float().T
        if self.layout == "awq":
            numbers, zeros = (_unpacked_awq(read(name)) for name in ("qweight", "qzeros"))
            return PackedMatrix(self.bits, numbers.T.contiguous(), zeros.T.float(), scales, None)
        numbers = _unpacked(read("qweight").T, self.bits)
        zeros = _unpacked(read("qzeros"), self.bits).T.float() + self.zeros_less_one
        group_of = read("g_idx").long()
        runs = torch.arange(len(group_of)) // (self.group or len(group_of))
        ordered = torch.equal(group_of, runs)
        return PackedMatrix(self.bits, numbers, zeros, scales, None if ordered else group_of)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Unpacked numbers with the zeros and scales of their groups of columns."""

    bits: int
    numbers: Tensor
    """[rows, columns], uint8."""
    zeros: Tensor
    """[rows, groups], fp32."""
    scales: Tensor
    """[rows, groups], fp32."""
    group_of: Tensor | None
    """The group of each column; None where groups are neighbouring columns."""

    def dequantise(self) -> Tensor:
        """Return the weights in fp32."""
        if self.group_of is not None:
            zeros, scales = self.zeros[:, self.group_of], self.scales[:, self.group_of]
            return (self.numbers - zeros).mul_(scales)
        rows, groups = self.scales.shape
        grouped = self.numbers.view(rows, groups, -1).float()
        return grouped.sub_(self.zeros[..., None]).mul_(self.scales[..., None]).view(rows, -1)

    def groups(self) -> QuantisedGroups | None:
        """Return the matrix in groups of 32; None where its groups are no multiple of that."""
        columns, groups = self.numbers.shape[1], self.scales.shape[1]
        if self.group_of is not None or columns // groups % GROUP_WEIGHTS:
            return None
        repeats = columns // groups // GROUP_WEIGHTS
        offsets = (-self.zeros * self.scales).repeat_interleave(repeats, 1)
        scales = self.scales.repeat_interleave(repeats, 1)
        return QuantisedGroups(self.numbers, scales, offsets, self.bits)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack 32-bit words [rows, words], lowest bits first: [rows, numbers]."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts).bitwise_and_((1 << bits) - 1)
    return numbers.to(torch.uint8).flatten(-2)


def _unpacked_awq(words: Tensor) -> Tensor:
    """Unpack words of eight 4-bit numbers in AWQ's order."""
    numbers = _unpacked(words, 4)
    return numbers.view(len(words), -1, 8)[..., _AWQ_ORDER].reshape(len(words), -1)

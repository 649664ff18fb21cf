"""Matrix products, and how a matrix is kept: as whatever this device multiplies by fastest.

A model asks `Weights` for a `Linear` and never sees a layout. The kinds, with what they cost
(measured side by side: ops/bench/linear.md):

- `Plain`: the rows as they are; any device, and matrices too small to matter.
- `Blocked`: oneDNN's layout of a float matrix, made once, where torch would otherwise rearrange
  the matrix in every step. In fp32 the same products in another order of summation.
- `Half`: fp16 rows, multiplied in fp32 by FBGEMM: half the bytes of fp32 at an error of 2^-11.
- `Native`: by our own kernels, where those can be built. The four or eight bits, scales and offsets
  of a GGUF file, with an error of 2^-16: no second copy, and a third of `FourBit`'s time. Floats as
  their file has them, exactly where full weights are asked for or the processor has a matrix
  unit, else rounded to 14 bits in groups: products are then twice as fast, with an error of 2^-14.
- `FourBit`: the same four bits by torch's kernel. For few rows they are multiplied as they lie; for
  more, a bf16 copy is faster and is kept beside them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from isochrone.wire.engine import Quantisation
from nodeagent.engine.kernels.cpu.file_reads import Fetch, InFile
from nodeagent.engine.kernels.cpu.kernels import kernels
from nodeagent.engine.kernels.cpu.matrix_layouts import GROUP_WEIGHTS, TILE_ROWS, Native

_FOUR_BIT_ROWS_MAX: Final = 4
"""Above so many rows, reading bf16 once costs less than unpacking four bits for each row."""
_FOUR_BIT_MULTIPLE: Final = 16
_ROWS_TYPICAL: Final = 8
"""oneDNN picks its blocks for a number of rows; these serve one row and hundreds alike."""
_BLOCKED_BYTES_MIN: Final = 64 * 1024


class Keeping(StrEnum):
    """How a model's matrices are kept."""

    PLAIN = "plain"
    BLOCKED = "blocked"
    PACKED = "packed"
    NATIVE = "native"
    TILED = "tiled"

    @property
    def as_filed(self) -> bool:
        """True where matrices stay as their file packs them."""
        return self in (Keeping.PACKED, Keeping.NATIVE)


@dataclass(frozen=True, slots=True)
class Groups:
    """A matrix in groups of 32 weights along a row: each weight is `number * scale + offset`."""

    numbers: Tensor
    """[rows, columns], uint8; below 16 where `bits` is four."""
    scales: Tensor
    """[rows, columns / 32], fp32."""
    offsets: Tensor
    """[rows, columns / 32], fp32."""
    bits: int = 4
    """Four or eight."""

    def wide(self) -> Tensor:
        """Return the weights in fp32."""
        rows, columns = self.numbers.shape
        grouped = self.numbers.view(rows, -1, GROUP_WEIGHTS).float()
        return (
            grouped.mul_(self.scales[..., None]).add_(self.offsets[..., None]).view(rows, columns)
        )


@dataclass(frozen=True, slots=True)
class Filed:
    """The same as the blocks of a GGUF file, which our own kernels take as they are."""

    parts: tuple[Tensor | InFile, ...]
    """[rows, bytes of a row] each, one below the other."""
    columns: int
    layout: str
    """What GGUF calls its blocks."""
    unpack: Callable[[Tensor], Groups]

    def groups(self) -> Groups:
        """Return what is in the blocks."""
        read = [part.read() if isinstance(part, InFile) else part for part in self.parts]
        return self.unpack(torch.cat(read))


def join(parts: Sequence[Groups | Filed]) -> Groups | Filed:
    """Return `parts` one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    filed = [part for part in parts if isinstance(part, Filed)]
    alike = len(filed) == len(parts) and len({part.layout for part in filed}) == 1
    if isinstance(first, Filed) and alike:
        return replace(first, parts=tuple(one for part in filed for one in part.parts))
    groups = [part.groups() if isinstance(part, Filed) else part for part in parts]
    return Groups(
        torch.cat([part.numbers for part in groups]),
        torch.cat([part.scales for part in groups]),
        torch.cat([part.offsets for part in groups]),
        max(part.bits for part in groups),
    )


class Linear(Protocol):
    """Multiplies rows by a matrix."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [rows, columns in] times the matrix: [rows, columns out]."""
        ...


class Plain:
    """The matrix as it is."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return linear(x, self._weight)


class Blocked:
    """The matrix in oneDNN's layout, in its own dtype; `x` is brought to that and back."""

    def __init__(self, weight: Tensor) -> None:
        self._weight: Any = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_TYPICAL)
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default
        self._dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        answer: Tensor = self._multiply(x.to(self._dtype), self._weight, None, "none", [], "")
        return answer.to(x.dtype)


class Half:
    """The matrix in fp16, each product and sum in fp32."""

    def __init__(self, weight: Tensor) -> None:
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._multiply: Any = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        answer: Tensor = self._multiply(x, self._packed)
        return answer


class FourBit:
    """The file's own four bits for few rows, bf16 for many; sums in fp32, answers through bf16."""

    def __init__(self, groups: Groups) -> None:
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(groups.numbers.int(), 1)
        # The kernel counts from the middle of the sixteen: number 8 is zero.
        middles = groups.offsets + 8 * groups.scales
        parameters = torch.stack((groups.scales, middles), dim=-1).transpose(0, 1)
        self._parameters = parameters.bfloat16().contiguous()
        self._multiply: Any = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        self._many = Blocked(groups.wide().bfloat16())

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        if x.shape[0] > _FOUR_BIT_ROWS_MAX:
            return self._many(x)
        answer: Tensor = self._multiply(x.bfloat16(), self._packed, GROUP_WEIGHTS, self._parameters)
        return answer.to(x.dtype)


def choose(device: str, dtype: torch.dtype, quantisation: Quantisation) -> tuple[Keeping, str]:
    """Return how matrices are kept on `device`, and why, in words for the log."""
    if device != "cpu":
        return Keeping.PLAIN, "a device of its own multiplies by rows as they are"
    onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # Without AVX-512 oneDNN has no bf16.
    halves: bool = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not onednn or dtype not in (torch.float32, *([torch.bfloat16] if halves else [])):
        return Keeping.PLAIN, f"no kernel for another layout of {dtype} is here"
    if dtype is torch.float32 and kernels() is not None:
        if quantisation != "none":
            return Keeping.NATIVE, "our own kernels multiply by matrices as their file packs them"
        return Keeping.TILED, "our own kernels read floats as their file has them"
    fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    if quantisation == "file" and fbgemm and halves and dtype is torch.float32:
        return Keeping.PACKED, "torch has kernels for packed matrices here"
    return Keeping.BLOCKED, f"oneDNN's layout is the fastest for {dtype} on this processor"


def bytes_kept(keeping: Keeping, dtype: torch.dtype, filed_bits: int) -> float:
    """Return what a weight takes that its file has in so many bits.

    Four or eight in groups that our own kernels know, 16 as a float of that size, 32 for all else.
    """
    match keeping:
        case Keeping.NATIVE:
            # Each group has a scale and an offset of 16 bits, or a scale of 32.
            return min(filed_bits, 16) / 8 + 4 / GROUP_WEIGHTS
        case Keeping.PACKED:
            return 2 + 1 / 2 + 4 / GROUP_WEIGHTS if filed_bits == 4 else 2
        case Keeping.TILED:
            return 2 if filed_bits == 16 else 4
        case Keeping.PLAIN | Keeping.BLOCKED:
            return dtype.itemsize


def keep(weight: Tensor, keeping: Keeping) -> Linear:
    """Return the product by `weight` [columns out, columns in], kept as `keeping` says."""
    if keeping is Keeping.PLAIN or weight.nbytes < _BLOCKED_BYTES_MIN:
        return Plain(weight)
    return Blocked(weight.bfloat16() if keeping.as_filed else weight)


def keep_groups(
    groups: Groups | Filed, keeping: Keeping, later: list[Fetch] | None = None
) -> Linear:
    """Return the product by a matrix whose file keeps it in groups; see `native`."""
    own = native(groups, keeping, later)
    if own is not None:
        return own
    if isinstance(groups, Filed):
        groups = groups.groups()
    if groups.bits != 4 or groups.numbers.shape[0] % _FOUR_BIT_MULTIPLE:
        return keep(groups.wide(), Keeping.PACKED)
    return FourBit(groups)


def native(
    groups: Groups | Filed, keeping: Keeping, later: list[Fetch] | None = None
) -> Native | None:
    """Return the product by our own kernel; None where that is not for this matrix.

    What must be read for it is put on `later`, where there is such a list.
    """
    own = kernels() if keeping is Keeping.NATIVE else None
    if own is None:
        return None
    if isinstance(groups, Filed):
        if any(len(part) % TILE_ROWS for part in groups.parts):
            return None
        return own.pack_blocks(groups.parts, groups.layout, groups.columns, later)
    if groups.numbers.shape[0] % TILE_ROWS:
        return None
    return own.pack(groups.bits, groups.numbers, groups.scales, groups.offsets)


def tiles(keeping: Keeping, rows: Iterable[int], columns: int) -> bool:
    """True where matrices of floats, of so many `rows` each, are kept in tiles of our own."""
    whole = columns % GROUP_WEIGHTS == 0 if keeping is Keeping.NATIVE else keeping is Keeping.TILED
    return whole and not any(count % TILE_ROWS for count in rows)


def tiled(
    parts: Sequence[Tensor | InFile], keeping: Keeping, later: list[Fetch] | None = None
) -> Native:
    """Return the product by `parts`, one below the other; `tiles` has said that it can be kept.

    What must be read for it is put on `later`, where there is such a list.
    """
    own = kernels()
    assert own is not None
    return own.tile(parts, keeping is Keeping.NATIVE, later)

"""Matrix products, and how a weight is kept: as whatever this device multiplies by fastest.

A model asks `Weights` for a `Linear` and never sees a layout. Three are kept (measured side by side
in ops/bench/linear.py):

- `Plain`: the rows as they are; on any device, and where a matrix is too small to matter.
- `Blocked`: oneDNN's blocked layout of a float matrix, made once, where torch would otherwise
  rearrange the matrix in every step. The same products in another order of summation.
- `Int8`: eight bits a weight with a scale for each row, and activations quantised on the way in.
  A quarter of fp32's bytes, and the processor's integer units; the answers differ a little.
"""

import warnings
from enum import StrEnum
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

_INT8_MAX: Final = 127
_ROWS_TYPICAL: Final = 8
"""oneDNN picks its blocks for a number of rows; these serve one row and hundreds alike."""
_BLOCKED_BYTES_MIN: Final = 64 * 1024


class Keeping(StrEnum):
    """How a model's matrices are kept."""

    PLAIN = "plain"
    BLOCKED = "blocked"
    INT8 = "int8"


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
    """The matrix in oneDNN's layout."""

    def __init__(self, weight: Tensor) -> None:
        self._weight: Any = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_TYPICAL)
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        answer: Tensor = self._multiply(x, self._weight, None, "none", [], "")
        return answer


class Int8:
    """Eight bits a weight; each row of `x` is quantised to eight bits as it comes in."""

    def __init__(self, weight: Tensor) -> None:
        wide = weight.float()
        scales = (wide.abs().amax(-1) / _INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (wide / scales[:, None]).round_().to(torch.int8)
        with warnings.catch_warnings():
            # torch announces an end of this tensor type; its kernels have no equal here so far,
            # and `choose` looks for them before it promises them.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_channel_quantized_tensor(
                rounded, scales.double(), torch.zeros(len(scales), dtype=torch.int64), 0
            )
        self._packed: Any = torch.ops.quantized.linear_prepack(quantised, None)
        self._multiply: Any = torch.ops.quantized.linear_dynamic.default
        self._dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        answer: Tensor = self._multiply(x, self._packed)
        return answer


def choose(device: str, dtype: torch.dtype, int8: bool) -> tuple[Keeping, str]:
    """Return how matrices are kept on `device`, and why, in words for the log."""
    if int8 and device == "cpu" and "x86" in torch.backends.quantized.supported_engines:
        return Keeping.INT8, "int8 was asked for, and this processor has its kernels"
    if device != "cpu":
        why = "int8 was asked for, but is for the CPU only" if int8 else "the device's own layout"
        return Keeping.PLAIN, why
    oned = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if oned and dtype in (torch.float32, torch.bfloat16):
        why = "int8 was asked for, but its kernels are not here" if int8 else "oneDNN is here"
        return Keeping.BLOCKED, why
    return Keeping.PLAIN, f"neither int8 nor oneDNN kernels for {dtype} are here"


def keep(weight: Tensor, keeping: Keeping) -> Linear:
    """Return the product by `weight` [columns out, columns in], kept as `keeping` says."""
    if keeping is Keeping.INT8:
        return Int8(weight)
    if keeping is Keeping.BLOCKED and weight.nbytes >= _BLOCKED_BYTES_MIN:
        return Blocked(weight)
    return Plain(weight)

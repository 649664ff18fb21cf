"""All layers of a dense model in one C call (fused_layers.c).

The result is the same as layer by layer, by the same kernels, without the time to enter and leave a
dozen calls for each layer. The caller takes the layers one by one in a step where an adapter
changes rows, or where hidden states are recorded between the layers.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.kernels import layer_count
from nodeagent.engine.kernels.attention_backend import AttentionLayout, LayerKV
from nodeagent.engine.kernels.cpu.attention import AttentionPieces
from nodeagent.engine.kernels.cpu.library import KV_FORMS, CpuKernels
from nodeagent.engine.kernels.cpu.native_matrix import NativeMatrix
from nodeagent.engine.kernels.linear_backend import DenseLayer, Linear
from nodeagent.engine.kernels.step_interrupt import StepInterrupt, StepInterrupted


class _MatrixStruct(Structure):
    """`struct matrix` of fused_layers.c."""

    _fields_ = (("packed", c_void_p), ("kind", c_int64), ("rows", c_int64), ("columns", c_int64))


_NORMS = ("attention_norm", "mlp_norm", "bias", "head_norms")
_MATRICES = ("query_key_value", "output", "gate_up", "down")
_STEP_TENSORS = ("x", "buffer", "cos", "sin", "slots", "tables", "pieces", "wanted")
_STEP_POINTERS = ("interrupt", *_STEP_TENSORS, "layers_computed")
_INTERRUPTED = 1
"""The value that `run_layers` returns if the step was interrupted."""
_STEP_SIZES = ("rows", "hidden", "heads", "kv_heads", "dim", "block_tokens", "table_width")
_STEP_COUNTS = ("pieces_count", "window", "wanted_count", "threads", "kv_form")


class _LayerStruct(Structure):
    """`struct layer` of fused_layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in _NORMS),
        *((name, _MatrixStruct) for name in _MATRICES),
        ("pages", c_void_p),
    )


class _StepStruct(Structure):
    """`struct step` of fused_layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in _STEP_POINTERS),
        *((name, c_int64) for name in (*_STEP_SIZES, *_STEP_COUNTS)),
        ("epsilon", c_float),
    )


class CpuFusedLayers:
    """The layers as the C function reads them. Implements `linear_backend.FusedLayers`."""

    def __init__(
        self,
        kernels: CpuKernels,
        layers: Sequence[DenseLayer],
        structs: list[_LayerStruct],
        shape: DecoderShape,
    ) -> None:
        # Keeps the tensors alive that the structs point to.
        self._layers = tuple(layers)
        self._structs = (_LayerStruct * len(structs))(*structs)
        self._shape = shape
        self._kv: list[LayerKV] = []
        self._run = kernels.library.run_layers
        self._run.argtypes = [POINTER(_LayerStruct), c_int64, POINTER(_StepStruct)]
        self._run.restype = c_int64
        layer = structs[0]
        attention = layer.query_key_value.rows + layer.output.columns
        mlp = layer.gate_up.rows + layer.down.columns
        self._buffer_per_row = 2 * shape.hidden + max(attention, mlp)

    def can_run(self, layout: AttentionLayout) -> bool:
        """Return whether attention of this step is computed by the C kernels too."""
        return isinstance(layout.plan, AttentionPieces)

    def run(
        self,
        x: Tensor,
        kv: list[LayerKV],
        cos: Tensor,
        sin: Tensor,
        layout: AttentionLayout,
        wanted: Tensor,
        interrupt: StepInterrupt | None = None,
    ) -> Tensor:
        """Take the rows of `x` through all layers, in place; return the rows `wanted`.

        Raises StepInterrupted if `interrupt` is set before the last layer.
        """
        plan, shape = layout.plan, self._shape
        assert isinstance(plan, AttentionPieces)
        if kv is not self._kv:
            for struct, layer_kv in zip(self._structs, kv, strict=True):
                struct.pages = layer_kv.pages.data_ptr()
            self._kv = kv
        buffer = torch.empty(len(x) * self._buffer_per_row)
        tensors = (x, buffer, cos, sin, layout.write_slots, plan.tables, plan.pieces, wanted)
        step = _StepStruct(
            None if interrupt is None else interrupt.address,
            *(tensor.data_ptr() for tensor in tensors),
            layer_count.ADDRESS,
            *(len(x), shape.hidden, shape.heads, shape.kv_heads, shape.head_dim),
            *(kv[0].pages.shape[1], plan.tables.shape[1], len(plan.pieces)),
            plan.window_tokens,
            len(wanted),
            torch.get_num_threads(),
            KV_FORMS[kv[0].pages.dtype],
            shape.rms_epsilon,
        )
        failed = self._run(self._structs, len(self._structs), byref(step))
        if failed == _INTERRUPTED:
            raise StepInterrupted
        if failed:
            raise MemoryError(f"cannot compute {len(x)} rows: no memory for their rounded copy")
        return x[: len(wanted)]


def fuse_layers(
    kernels: CpuKernels, layers: Sequence[DenseLayer | None], shape: DecoderShape
) -> CpuFusedLayers | None:
    """Return all `layers` as one call; None where the C kernels do not hold all their weights."""
    dense = [layer for layer in layers if layer is not None]
    if not dense or len(dense) < len(layers):
        return None
    structs: list[_LayerStruct] = []
    for layer in dense:
        matrices = [_matrix_struct(getattr(layer, name)) for name in _MATRICES]
        norms = [getattr(layer, name) for name in _NORMS]
        if None in matrices or not all(norm is None or _is_readable(norm) for norm in norms):
            return None
        addresses = (None if norm is None else norm.data_ptr() for norm in norms)
        structs.append(_LayerStruct(*addresses, *matrices))
    return CpuFusedLayers(kernels, dense, structs, shape)


def _is_readable(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_cpu and weight.is_contiguous()


def _matrix_struct(linear: Linear) -> _MatrixStruct | None:
    return _MatrixStruct(*linear.c_arguments) if isinstance(linear, NativeMatrix) else None

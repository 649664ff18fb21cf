"""All layers of a dense model in one call of our own kernels, where those hold all its matrices.

A step in which an adapter changes rows, or somebody listens to what goes into a layer, takes the
layers one by one instead: both ways compute the same by the same kernels.
"""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.kernels import kernels
from nodeagent.engine.kernels.cpu.matrix_layouts import Native
from nodeagent.engine.model.layers.attention import LayerKV, Layout, Listed
from nodeagent.engine.model.layers.linear import Linear
from nodeagent.engine.model.layers.lora import Adapted
from nodeagent.engine.model.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Dense:
    """What one layer consists of."""

    attention_norm: Tensor
    mlp_norm: Tensor
    bias: Tensor | None
    """Added to queries, keys and values."""
    head_norms: Tensor | None
    """A row for each head of queries and keys."""
    query_key_value: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class _Matrix(Structure):
    _fields_ = (("packed", c_void_p), ("kind", c_int64), ("rows", c_int64), ("columns", c_int64))


_NORMS = ("attention_norm", "mlp_norm", "bias", "head_norms")
_MATRICES = ("query_key_value", "output", "gate_up", "down")
_PLACES = ("x", "room", "cos", "sin", "slots", "tables", "pieces", "wanted")
_NUMBERS = ("rows", "hidden", "heads", "kv_heads", "dim", "block_tokens", "table_width")
_COUNTS = ("pieces_count", "window", "wanted_count", "threads")


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in _NORMS),
        *((name, _Matrix) for name in _MATRICES),
        ("pages", c_void_p),
    )


class _Step(Structure):
    _fields_ = (
        *((name, c_void_p) for name in _PLACES),
        *((name, c_int64) for name in (*_NUMBERS, *_COUNTS)),
        ("epsilon", c_float),
    )


class Whole:
    """The layers as `layers.c` reads them."""

    def __init__(
        self, library: ctypes.CDLL, layers: Sequence[Dense], table: list[_Layer], shape: ModelShape
    ) -> None:
        # What the table points to lives as long as it does.
        self._layers = tuple(layers)
        self._table = (_Layer * len(table))(*table)
        self._shape = shape
        self._kv: list[LayerKV] = []
        self._run = library.run_layers
        self._run.argtypes = [POINTER(_Layer), c_int64, POINTER(_Step)]
        self._run.restype = c_int64
        first = table[0]
        between = first.query_key_value.rows + first.output.columns
        self._room = 2 * shape.hidden + max(between, first.gate_up.rows + first.down.columns)

    def run(
        self,
        x: Tensor,
        kv: list[LayerKV],
        cos: Tensor,
        sin: Tensor,
        layout: Layout,
        wanted: Tensor,
    ) -> Tensor:
        """Bring the rows of `x` through all layers, in place; return those that are `wanted`."""
        listed, shape = layout.decodes, self._shape
        assert isinstance(listed, Listed)
        if kv is not self._kv:
            for layer, layer_kv in zip(self._table, kv, strict=True):
                layer.pages = layer_kv.pages.data_ptr()
            self._kv = kv
        room = torch.empty(len(x) * self._room)
        tensors = (x, room, cos, sin, layout.write_slots, listed.tables, listed.pieces, wanted)
        step = _Step(
            *(tensor.data_ptr() for tensor in tensors),
            *(len(x), shape.hidden, shape.heads, shape.kv_heads, shape.head_dim),
            *(kv[0].pages.shape[1], listed.tables.shape[1], len(listed.pieces)),
            listed.window_tokens,
            len(wanted),
            torch.get_num_threads(),
            shape.rms_epsilon,
        )
        if self._run(self._table, len(self._table), byref(step)):
            raise MemoryError(f"cannot compute {len(x)} rows: no memory to round them in")
        return x[: len(wanted)]


def whole(layers: Sequence[Dense | None], shape: ModelShape) -> Whole | None:
    """Return all `layers` as one; None where our own kernels do not hold all that is in them."""
    dense = [layer for layer in layers if layer is not None]
    if not dense or len(dense) < len(layers):
        return None
    table: list[_Layer] = []
    for layer in dense:
        matrices = [_matrix(getattr(layer, name)) for name in _MATRICES]
        norms = [getattr(layer, name) for name in _NORMS]
        fits = all(one is None or (one.is_contiguous() and _is_fp32(one)) for one in norms)
        if not fits or None in matrices:
            return None
        table.append(_Layer(*(None if one is None else one.data_ptr() for one in norms), *matrices))
    # Asked last: whoever has other matrices need not build them.
    own = kernels()
    return Whole(own.library, dense, table, shape) if own is not None else None


def _is_fp32(weight: Tensor) -> bool:
    return weight.dtype is torch.float32 and weight.is_cpu


def _matrix(linear: Linear) -> _Matrix | None:
    while isinstance(linear, Adapted):
        linear = linear.bare
    return _Matrix(*linear.arguments) if isinstance(linear, Native) else None

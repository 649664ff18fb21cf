"""The C kernels on tensors: loads the library, tests its products against torch, and calls it.

All tensors are contiguous, fp32 and on the CPU. Nothing here checks its arguments: callers do.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.kernels.cpu.build import KernelsUnavailable, kernels_library
from nodeagent.engine.kernels.cpu.file_reads import RowFetch
from nodeagent.engine.kernels.cpu.native_matrix import (
    BY_BYTES,
    FORMAT_CODES,
    ROUNDED_KIND,
    NativeMatrix,
)
from nodeagent.engine.kernels.huge_pages import HugePageArena
from nodeagent.engine.kernels.matrix_formats import (
    FLOATS,
    PANEL_ROWS,
    GgufBlocks,
    QuantisedGroups,
    RowFormat,
    RowsInFile,
)

log = logging.getLogger(__name__)

LANES: Final = 16
"""fp32 numbers in a vector register. Heads must be a multiple of it wide."""
HEAD_DIM_MAX: Final = 256
PIECE_TOKENS: Final = 64
"""Attention reads the keys once for up to this many neighbouring tokens, with all their heads."""
KV_FORMS: Final = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.uint8: 3}
"""`enum kv_form` of the C kernels, by the dtype of the pages."""
_TEST_ERROR_MAX: Final = 1e-3
_TEST_ERROR_OF_BYTES_MAX: Final = 2e-2
_TEST_ROWS: Final = (11, 61)
"""Few and many rows: different C functions multiply them."""
_C_TYPES: Final = {"p": c_void_p, "n": c_int64, "f": c_float}
_ARGUMENTS: Final = {
    "rms_norm": "pppfnnnp",
    "silu_gate": "pnnnp",
    "rotate": "pnnnppnn",
    "store_kv": "pnnppnnn",
    "attend": "pnpnnnnpnpnnnnp",
    "pack_groups": "pppnnnnp",
    "pack_rows": "pnnnnnp",
    "panel_bytes": "nn",
    "read_and_pack": "pnn",
    "unpack_rows": "pnnnpnp",
    "multiply": "pnnnpnnp",
    "allow_amx": "n",
}
"""The parameters of each C function: p a pointer, n an int64, f a float."""
_RETURNING: Final = ("panel_bytes", "allow_amx", "read_and_pack", "multiply", "unpack_rows")
"""Functions that return an int64: a size, a flag, or 0 for success. All others return nothing."""


class CpuKernels:
    """The loaded library. It implements `kernels.row_ops.RowOps`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._arena = HugePageArena()
        for name, parameters in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [_C_TYPES[parameter] for parameter in parameters]
            function.restype = c_int64 if name in _RETURNING else None
        self.has_amx = bool(library.allow_amx(1))
        """Whether the processor has a matrix unit (AMX) that multiplies many rows."""
        self._test_products()

    def weight_regions(self) -> list[Tensor]:
        """Return the memory of all packed matrices of this process."""
        return self._arena.regions()

    def pack_groups(self, groups: QuantisedGroups, by_bytes: bool = False) -> NativeMatrix:
        """Pack a matrix in quantised groups; its rows are whole panels.

        With `by_bytes` products round rows to bytes instead of 16 bits.
        """
        kind = groups.bits + BY_BYTES * by_bytes
        matrix = NativeMatrix(self.library, self._arena, kind, *groups.numbers.shape)
        matrix.fill_groups(groups)
        return matrix

    def pack_blocks(
        self,
        blocks: GgufBlocks,
        fetches: list[RowFetch] | None,
        by_bytes: bool,
    ) -> NativeMatrix:
        """Pack a matrix in GGUF blocks, each part of which is whole panels.

        With `by_bytes` products round rows to bytes instead of 16 bits.

        Parts that are still in a file are appended to `fetches`; without that list they are read.
        """
        kind = (8 if blocks.layout == "Q8_0" else 4) + BY_BYTES * by_bytes
        parts = [(part, blocks.layout) for part in blocks.parts]
        return self._pack_parts(kind, parts, blocks.columns, fetches)

    def pack_floats(
        self,
        parts: Sequence[Tensor | RowsInFile],
        rounded: bool,
        fetches: list[RowFetch] | None = None,
    ) -> NativeMatrix:
        """Pack float matrices [whole panels of rows, columns], stacked vertically.

        They keep their dtype if all have the same, else they become fp32. With `rounded` they are
        rounded to 14 bits in groups of 32 columns, and products are twice as fast. AMX is faster
        still by 16-bit floats, which are then not rounded.

        Parts that are still in a file are appended to `fetches`; without that list they are read.
        """
        with_formats = [_with_format(part) for part in parts]
        first_format, *others = {row_format for _, row_format in with_formats}
        dtype = torch.float32 if others else first_format
        rounds = rounded and not (self.has_amx and dtype is not torch.float32)
        kind = ROUNDED_KIND if rounds else FORMAT_CODES[dtype]
        return self._pack_parts(kind, with_formats, parts[0].shape[1], fetches)

    def pack_floats_as_bytes(
        self, parts: Sequence[Tensor | RowsInFile], fetches: list[RowFetch] | None = None
    ) -> NativeMatrix:
        """Pack float matrices as `pack_floats`, rounded to 8 bits in groups of 32 columns.

        Products round rows to bytes, too.
        """
        with_formats = [_with_format(part) for part in parts]
        return self._pack_parts(8 + BY_BYTES, with_formats, parts[0].shape[1], fetches)

    def _pack_parts(
        self,
        kind: int,
        parts: Sequence[tuple[Tensor | RowsInFile, RowFormat]],
        columns: int,
        fetches: list[RowFetch] | None,
    ) -> NativeMatrix:
        first_row = 0
        rows = sum(len(part) for part, _ in parts)
        matrix = NativeMatrix(self.library, self._arena, kind, rows, columns)
        for part, row_format in parts:
            if not isinstance(part, RowsInFile):
                matrix.fill_rows(first_row, part, row_format)
            elif fetches is None:
                matrix.fill_rows(first_row, part.read(), row_format)
            else:
                fetches.append(RowFetch(matrix, first_row, part))
            first_row += len(part)
        return matrix

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Divide each row of `x` by its root mean square, and scale it by `weight`."""
        x = x.contiguous()
        normed = torch.empty_like(x)
        rows, columns = x.shape
        self.library.rms_norm(
            x.data_ptr(),
            None,
            weight.data_ptr(),
            epsilon,
            rows,
            columns,
            torch.get_num_threads(),
            normed.data_ptr(),
        )
        return normed

    def add_rms_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Return `x + added`, and its `rms_norm`."""
        x = x + added
        return x, self.rms_norm(x, weight, epsilon)

    def silu_gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        rows, columns = x.shape
        product = torch.empty(rows, columns // 2)
        threads = torch.get_num_threads()
        self.library.silu_gate(x.data_ptr(), rows, columns // 2, threads, product.data_ptr())
        return product

    def rotate_(self, x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Rotate the first `heads` of `x` [tokens, heads, head_dim] in place."""
        rows, stride, head_dim = x.shape[0], x.stride(0), x.shape[2]
        threads = torch.get_num_threads()
        self.library.rotate(
            x.data_ptr(), stride, heads, head_dim, cos.data_ptr(), sin.data_ptr(), rows, threads
        )

    def store_kv(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        """Store keys and values, which follow the `heads` of queries, in `slots` of `pages`."""
        self.library.store_kv(
            mixed.data_ptr(),
            len(mixed),
            heads,
            slots.data_ptr(),
            pages.data_ptr(),
            pages.shape[2] // 2,
            mixed.shape[2],
            KV_FORMS[pages.dtype],
        )

    def attend(
        self,
        mixed: Tensor,
        heads: int,
        pages: Tensor,
        tables: Tensor,
        pieces: Tensor,
        window: int,
        allow_amx: bool = False,
    ) -> Tensor:
        """Attend from the queries of `mixed`; `cpu.attention.AttentionPieces` describes the pieces.

        Without `allow_amx`, the output of a row is bit-identical whatever it is batched with.
        """
        _, block_tokens, keys_and_values, _ = pages.shape
        head_dim = mixed.shape[2]
        output = torch.empty(len(mixed), heads, head_dim)
        self.library.attend(
            mixed.data_ptr(),
            heads,
            pages.data_ptr(),
            block_tokens,
            keys_and_values // 2,
            head_dim,
            KV_FORMS[pages.dtype],
            tables.data_ptr(),
            tables.shape[1],
            pieces.data_ptr(),
            len(pieces),
            window,
            allow_amx,
            torch.get_num_threads(),
            output.data_ptr(),
        )
        return output

    def _test_products(self) -> None:
        """Raise KernelsUnavailable unless products by every kind of matrix are torch's."""
        random = torch.Generator().manual_seed(1)
        x = torch.randn(max(_TEST_ROWS), 64, generator=random)
        for bits in (4, 8):
            numbers = torch.randint(
                0, 2**bits, (2 * PANEL_ROWS, 64), generator=random, dtype=torch.uint8
            )
            scales, offsets = torch.rand(2, 2 * PANEL_ROWS, 2, generator=random).half().float()
            groups = QuantisedGroups(numbers, scales, offsets, bits)
            _compare(f"{bits} bits", self.pack_groups(groups), x, groups.dequantise())
            _compare(
                f"{bits} bits with bytes",
                self.pack_groups(groups, by_bytes=True),
                x,
                groups.dequantise(),
                _TEST_ERROR_OF_BYTES_MAX,
            )
        for dtype in FLOATS:
            weight = torch.randn(3 * PANEL_ROWS, 64, generator=random).to(dtype)
            _compare(str(dtype), self.pack_floats([weight], rounded=False), x, weight.float())
            _compare(
                f"rounded {dtype}", self.pack_floats([weight], rounded=True), x, weight.float()
            )
            as_bytes = self.pack_floats_as_bytes([weight])
            _compare(f"{dtype} as bytes", as_bytes, x, weight.float(), _TEST_ERROR_OF_BYTES_MAX)


def _with_format(part: Tensor | RowsInFile) -> tuple[Tensor | RowsInFile, RowFormat]:
    """Return rows of floats with their format; tensors of other dtypes become fp32."""
    if isinstance(part, RowsInFile):
        return part, part.layout
    part = part if part.dtype in FLOATS else part.float()
    return part, part.dtype


def _compare(
    kind: str, matrix: NativeMatrix, x: Tensor, weight: Tensor, error_max: float = _TEST_ERROR_MAX
) -> None:
    """Raise KernelsUnavailable where the product by `matrix` is not torch's by `weight`."""
    expected = x @ weight.T
    for rows in _TEST_ROWS:
        error = float((matrix(x[:rows]) - expected[:rows]).norm() / expected[:rows].norm())
        # Written so that NaN fails too.
        if not error < error_max:
            raise KernelsUnavailable(
                f"cannot use the C kernels: products by {kind} are wrong by {error:.2g}"
            )


@functools.cache
def cpu_kernels() -> CpuKernels | None:
    """Return this process's C kernels, built and tested at the first call, or None.

    The log has which it is, and why.
    """
    started_s = time.monotonic()
    try:
        path = kernels_library()
        kernels = CpuKernels(ctypes.CDLL(str(path)))
    except (KernelsUnavailable, OSError, AttributeError) as error:
        log.info("no C kernels", extra={"fields": {"because": str(error)}})
        return None
    took_s = round(time.monotonic() - started_s, 3)
    fields = {"library": path.name, "amx": kernels.has_amx, "took_s": took_s}
    log.info("C kernels", extra={"fields": fields})
    return kernels

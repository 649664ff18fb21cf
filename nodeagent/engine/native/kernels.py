"""The functions of `kernels.c` on tensors. They check nothing: their callers in `layers` do.

Each takes fp32 tensors on the CPU that lie row behind row. A library is used only once its products
have been held against torch's.
"""

import ctypes
import functools
import logging
import time
from ctypes import c_float, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.cuda.kernels import DeviceKernels, device_kernels
from nodeagent.engine.native.building import NoKernels, built

log = logging.getLogger(__name__)

TILE_ROWS: Final = 16
GROUP_WEIGHTS: Final = 32
LANES: Final = 16
"""Heads are whole numbers of these."""
_ERROR_MAX: Final = 1e-3
_TYPES: Final = {"p": c_void_p, "n": c_int64, "f": c_float}
_ARGUMENTS: Final = {
    "can_multiply": "",
    "normalise": "ppfnnnp",
    "gate": "pnnnp",
    "turn": "pnnnppnn",
    "keep": "pnnppnn",
    "attend": "pnnpnnnpnpnp",
}
_OF_PRODUCTS: Final = {"pack": "pppnnnnp", "read_rows": "pnnnpnp", "multiply": "pnnnpnnp"}
"""What each function takes: pointers, numbers (int64), a float."""


class PackedMatrix:
    """A matrix of four-bit or eight-bit numbers in groups of 32, as `multiply` reads it."""

    def __init__(self, library: ctypes.CDLL, bits: int, rows: int, columns: int) -> None:
        group_bytes = GROUP_WEIGHTS * TILE_ROWS * bits // 8 + 4 * TILE_ROWS
        self.rows = rows
        self._library = library
        self.packed = torch.empty(
            rows // TILE_ROWS * (columns // GROUP_WEIGHTS) * group_bytes, dtype=torch.uint8
        )
        self._arguments = (self.packed.data_ptr(), bits, rows, columns)

    def fill(self, numbers: Tensor, scales: Tensor, offsets: Tensor) -> None:
        """Take the numbers, scales and offsets of all rows."""
        parts = (numbers.contiguous(), scales.contiguous(), offsets.contiguous())
        _, bits, rows, columns = self._arguments
        self._library.pack(
            *(part.data_ptr() for part in parts),
            bits,
            rows,
            columns,
            torch.get_num_threads(),
            self.packed.data_ptr(),
        )

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x` [count, columns] times the matrix."""
        x = x.contiguous()
        count = x.shape[0]
        answer = torch.empty(count, self.rows)
        if self._library.multiply(
            *self._arguments, x.data_ptr(), count, torch.get_num_threads(), answer.data_ptr()
        ):
            raise MemoryError(f"cannot multiply {count} rows: no memory to round them in")
        return answer

    def read(self, rows: Tensor) -> Tensor:
        """Return these rows of the matrix as numbers: [count, columns]."""
        answer = torch.empty(len(rows), self._arguments[3])
        if self._library.read_rows(
            *self._arguments, rows.contiguous().data_ptr(), len(rows), answer.data_ptr()
        ):
            raise IndexError(f"cannot read rows {rows.tolist()}: there are {self.rows}")
        return answer


class Kernels:
    """The library, and whether its products are of use on this processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = [_TYPES[kind] for kind in kinds]
            function.restype = None
        library.can_multiply.restype = c_int64
        self.multiplies = bool(library.can_multiply())
        if self.multiplies:
            for name, kinds in _OF_PRODUCTS.items():
                getattr(library, name).argtypes = [_TYPES[kind] for kind in kinds]
            library.multiply.restype = library.read_rows.restype = c_int64
            self._try()

    def pack(self, bits: int, numbers: Tensor, scales: Tensor, offsets: Tensor) -> PackedMatrix:
        """Return the matrix of `numbers` [rows, columns], a scale and an offset for each group."""
        matrix = PackedMatrix(self.library, bits, *numbers.shape)
        matrix.fill(numbers, scales, offsets)
        return matrix

    def normalise(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the rows of `x` by their root mean square, scaled by `weight`."""
        x = x.contiguous()
        answer = torch.empty_like(x)
        rows, columns = x.shape
        self.library.normalise(
            x.data_ptr(),
            weight.data_ptr(),
            epsilon,
            rows,
            columns,
            torch.get_num_threads(),
            answer.data_ptr(),
        )
        return answer

    def gate(self, x: Tensor) -> Tensor:
        """Return silu of the first half of each row of `x`, times the second half."""
        rows, columns = x.shape
        answer = torch.empty(rows, columns // 2)
        threads = torch.get_num_threads()
        self.library.gate(x.data_ptr(), rows, columns // 2, threads, answer.data_ptr())
        return answer

    def turn(self, mixed: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """Turn the first `heads` of `mixed` [tokens, all heads, dim] in place."""
        rows, stride, dim = mixed.shape[0], mixed.stride(0), mixed.shape[2]
        threads = torch.get_num_threads()
        self.library.turn(
            mixed.data_ptr(), stride, heads, dim, cos.data_ptr(), sin.data_ptr(), rows, threads
        )

    def keep(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        """Put keys and values, which follow the `heads` of queries, into `slots` of `pages`."""
        rows, kv_heads, dim = mixed.shape[0], pages.shape[2] // 2, pages.shape[3]
        self.library.keep(
            mixed.data_ptr(), rows, heads, slots.data_ptr(), pages.data_ptr(), kv_heads, dim
        )

    def attend(
        self, mixed: Tensor, heads: int, pages: Tensor, tables: Tensor, spans: Tensor
    ) -> Tensor:
        """Answer the queries of the first rows of `mixed`, as many as there are `spans`."""
        rows, (_, block_tokens, both, dim) = len(spans), pages.shape
        answer = torch.empty(rows, heads, dim)
        self.library.attend(
            mixed.data_ptr(),
            rows,
            heads,
            pages.data_ptr(),
            block_tokens,
            both // 2,
            dim,
            tables.data_ptr(),
            tables.shape[1],
            spans.data_ptr(),
            torch.get_num_threads(),
            answer.data_ptr(),
        )
        return answer

    def _try(self) -> None:
        chance = torch.Generator().manual_seed(1)
        for bits in (4, 8):
            numbers = torch.randint(
                0, 2**bits, (2 * TILE_ROWS, 64), generator=chance, dtype=torch.uint8
            )
            scales, offsets = torch.rand(2, 2 * TILE_ROWS, 2, generator=chance).half().float()
            x = torch.randn(11, 64, generator=chance)
            groups = numbers.view(len(numbers), -1, GROUP_WEIGHTS)
            wide = (groups * scales[..., None] + offsets[..., None]).view(numbers.shape)
            wanted = x @ wide.T
            found = self.pack(bits, numbers, scales, offsets).multiply(x)
            error = float((found - wanted).norm() / wanted.norm())
            if not error < _ERROR_MAX:
                raise NoKernels(f"cannot use the kernels: {bits} bits are wrong by {error:.2g}")


@functools.cache
def kernels() -> Kernels | None:
    """Return this process's kernels, built and tried at the first call; None where there are none.

    Which it is, and why, is logged.
    """
    started_s = time.monotonic()
    try:
        path = built()
        # torch's OpenMP was loaded with it: by its name the library finds the same one.
        found = Kernels(ctypes.CDLL(str(path)))
    except (NoKernels, OSError, AttributeError) as error:
        log.info("no kernels of our own", extra={"fields": {"because": str(error)}})
        return None
    took_s = round(time.monotonic() - started_s, 3)
    fields = {"library": path.name, "products": found.multiplies, "took_s": took_s}
    log.info("kernels", extra={"fields": fields})
    return found


def kernels_for(x: Tensor) -> Kernels | DeviceKernels | None:
    """Return the kernels that compute on what `x` is: fp32 numbers on the CPU, or a device's."""
    own = device_kernels(x)
    if own is not None:
        return own
    return kernels() if x.dtype is torch.float32 and x.is_cpu else None

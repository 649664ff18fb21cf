"""Brings a model's weights to its device, and hands its matrices to the linear backend.

Matrices of the same input (queries, keys and values; gate and up) are stacked into one product.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Final

import torch
from torch import Tensor

from nodeagent.engine.distributed.collectives import SINGLE_RANK, Communicator
from nodeagent.engine.distributed.shards import ModelShard, WeightSlice
from nodeagent.engine.kernels.linear_backend import EmbeddingTable, Linear, LinearBackend
from nodeagent.engine.kernels.matrix_formats import (
    FLOATS,
    QuantisedMatrix,
    RowsInFile,
    stack_quantised,
)
from nodeagent.engine.kernels.row_ops import RowOps
from nodeagent.engine.kernels.selection import choose_row_ops
from nodeagent.engine.kernels.torch.linear import PlainBackend
from nodeagent.engine.model.lora import ActiveAdapters, LoraLinear
from nodeagent.engine.weights.device_staging import staging_for
from nodeagent.engine.weights.weight_source import WeightSource

_STAGED_NUMBERS_MIN: Final = 1024 * 1024
"""A smaller weight that is needed at once is read directly."""


class WeightLoader:
    """Reads from `source` onto a device; of each weight only the slice that `shard` holds.

    All shapes and row counts given to its methods are those of the slice.
    """

    def __init__(
        self,
        source: WeightSource,
        device: str,
        dtype: torch.dtype,
        linear_backend: LinearBackend | None = None,
        shard: ModelShard | None = None,
        communicator: Communicator = SINGLE_RANK,
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self.linear_backend = linear_backend or PlainBackend()
        self.communicator = communicator
        self.shard = shard
        self.adapters: ActiveAdapters | None = ActiveAdapters()
        """The modules that adapters can change; None for a loader whose matrices take none."""
        self._staging = staging_for(device)

    @cached_property
    def row_ops(self) -> RowOps:
        """The row operations for this device and dtype."""
        return choose_row_ops(self.device, self.dtype)

    def without_adapters(self) -> "WeightLoader":
        """Return a loader for matrices that take no adapters, and whose products are not summed.

        Adapters name rows of the batch, so they cannot change a module that sees other rows.
        """
        loader = WeightLoader(self.source, self.device, self.dtype, self.linear_backend, self.shard)
        loader.adapters, loader._staging = None, self._staging
        return loader

    def read(self, name: str, *shape: int) -> Tensor:
        """Read one weight now."""
        if self._staging is not None and math.prod(shape) >= _STAGED_NUMBERS_MIN:
            weight = torch.empty(shape, device=self.device, dtype=self.dtype)
            pieces = self._start_staging(weight, name, shape)
            for piece in pieces or ():
                piece.result()
            if pieces:
                return weight
        return self._tensor(name, shape).to(self.device, self.dtype)

    def start_reads(self) -> Callable[[], None]:
        """Start to read the matrices that are still in files, in the background.

        The returned function waits for them, and raises CheckpointError. Call it before the first
        product, and before the files are closed.
        """
        wait_for_rows = self.linear_backend.start_reads()
        staging = self._staging

        def wait() -> None:
            if staging is not None:
                staging.finish()
            wait_for_rows()

        return wait

    def linear(self, name: str, *shape: int) -> Linear:
        """Read a matrix that ranks split by columns: their products are summed."""
        rows, columns = shape
        return self.communicator.row_parallel(self.linear_stack("", {name: rows}, columns))

    def linear_stack(self, prefix: str, part_rows: dict[str, int], columns: int) -> Linear:
        """Read the matrices `prefix` + name as one product; ranks split them by rows."""
        backend = self.linear_backend
        linear = self._quantised_stack(prefix, part_rows, columns)
        if linear is None and backend.takes_rows(part_rows.values(), columns):
            linear = backend.from_rows(
                [self._rows(f"{prefix}{name}", rows, columns) for name, rows in part_rows.items()]
            )
        if linear is None:
            linear = backend.from_tensor(self.stack(prefix, part_rows, columns))
        if self.adapters is None:
            return linear
        return LoraLinear(linear, prefix, part_rows, columns, self.adapters)

    def embedding(self, name: str, rows: int, columns: int) -> EmbeddingTable:
        """Read a table of embeddings."""
        backend = self.linear_backend
        if backend.takes_quantised:
            groups = self.source.groups(name, *self._slice_of(name, (rows, columns)))
            table = None if groups is None else backend.quantised_table(groups)
            if table is not None:
                return table
        if backend.takes_rows([rows], columns):
            return backend.rows_table(self._rows(name, rows, columns))
        return backend.table(self.read(name, rows, columns))

    def head(self, table: EmbeddingTable) -> Linear:
        """Return the product by the output embeddings."""
        return self.linear_backend.head(table)

    def stack(self, prefix: str, part_rows: dict[str, int], *columns: int) -> Tensor:
        """Read the weights `prefix` + name into one tensor, stacked, without a second copy."""
        rows = sum(part_rows.values())
        stacked = torch.empty(rows, *columns, device=self.device, dtype=self.dtype)
        first = 0
        for name, count in part_rows.items():
            part, shape = stacked[first : first + count], (count, *columns)
            if self._start_staging(part, f"{prefix}{name}", shape) is None:
                part.copy_(self._tensor(f"{prefix}{name}", shape))
            first += count
        return stacked

    def _start_staging(
        self, target: Tensor, name: str, shape: tuple[int, ...]
    ) -> list[Future[None]] | None:
        """Start to fill `target` in the background; None where the weight cannot be staged."""
        if self._staging is None:
            return None
        stored = self.source.stored(name, *self._slice_of(name, shape))
        if stored is None or stored.head_rows:
            return None
        return self._staging.start(target, stored)

    def _quantised_stack(
        self, prefix: str, part_rows: dict[str, int], columns: int
    ) -> Linear | None:
        """Return the product as the file quantises it; None unless every part is quantised."""
        if not self.linear_backend.takes_quantised:
            return None
        parts: list[QuantisedMatrix] = []
        for name, rows in part_rows.items():
            full_name = f"{prefix}{name}"
            part = self.source.groups(full_name, *self._slice_of(full_name, (rows, columns)))
            if part is None:
                return None
            parts.append(part)
        return self.linear_backend.from_quantised(stack_quantised(parts))

    def _rows(self, name: str, rows: int, columns: int) -> Tensor | RowsInFile:
        """Return the rows of a float matrix, or where they lie in a file, to be read later."""
        shape, cut = self._slice_of(name, (rows, columns))
        stored = self.source.stored(name, shape, cut)
        read = partial(self.source.tensor, name, shape, cut)
        if stored is None or stored.dtype not in FLOATS:
            return read()
        return RowsInFile(
            stored.path, stored.start, (rows, columns), stored.dtype, stored.head_rows, read
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.source.tensor(name, *self._slice_of(name, shape))

    def _slice_of(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[tuple[int, ...], WeightSlice | None]:
        """Return the shape of the whole weight, and which slice of it is read."""
        cut = self.shard.slice_of(name, shape) if self.shard is not None else None
        return (cut.whole if cut else shape), cut

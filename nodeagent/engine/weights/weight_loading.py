"""How a model's weights come to its device: in its dtype, and fused where one product serves."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from nodeagent.engine.distributed.collectives import ALONE, Ranks
from nodeagent.engine.distributed.shards import Cut, Share
from nodeagent.engine.kernels.cpu.file_reads import Fetch, InFile, fetch
from nodeagent.engine.kernels.cpu.matrix_layouts import LAYOUTS, Native
from nodeagent.engine.kernels.cuda.weight_staging import staging_for
from nodeagent.engine.model.layers.linear import (
    Filed,
    Groups,
    Half,
    Keeping,
    Linear,
    Plain,
    join,
    keep,
    keep_groups,
    native,
    tiled,
    tiles,
)
from nodeagent.engine.model.layers.lora import Adapted, Adding
from nodeagent.engine.weights.stored_tensor import Stored

_STAGED_NUMBERS_MIN: Final = 1024 * 1024
"""A smaller weight that is waited for comes as fast by itself."""

Table = Tensor | Native
"""Rows by their number: `table[tokens]`."""


class WeightSource(Protocol):
    """Weights by their Hugging Face name, checked against the shape that the model expects.

    Where a `cut` of that shape is given, only that part is read.
    """

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Read one weight in the dtype it is stored in, or fp32 where it is stored quantised."""
        ...

    def stored(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Stored | None:
        """Return where in a file one weight lies in one piece; None where it does not."""
        return None

    def groups(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None
    ) -> Groups | Filed | None:
        """Read one matrix as its file quantises it; None where that is not in groups of 32."""
        return None

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
        """Raise CheckpointError where `tensor` would, judging by the files' headers alone."""
        ...

    def has(self, name: str) -> bool:
        """True where the files hold `name`."""
        ...


class Weights:
    """Reads from `source` onto a device: of each weight what `share` says, no more.

    Shapes and rows are those of the share itself.
    """

    def __init__(
        self,
        source: WeightSource,
        device: str,
        dtype: torch.dtype,
        keeping: Keeping,
        share: Share | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self.keeping = keeping
        self.ranks = ranks
        self.share = share
        self.adding: Adding | None = Adding()
        self.staging = staging_for(device)
        """What brings matrices while others are still read; none where they stay on the host."""
        self._later: list[Fetch] = []

    def bare(self) -> "Weights":
        """Return the same for matrices that no adapter changes and no product of which is summed.

        Adapters name rows of the flat batch; what sees other rows than those cannot take them.
        """
        bare = Weights(self.source, self.device, self.dtype, self.keeping, self.share)
        bare.adding, bare.staging, bare._later = None, self.staging, self._later
        return bare

    def read(self, name: str, *shape: int) -> Tensor:
        """Read the weight `name`."""
        if self.staging is not None and math.prod(shape) >= _STAGED_NUMBERS_MIN:
            weight = torch.empty(shape, device=self.device, dtype=self.dtype)
            pieces = self._bring(weight, name, shape)
            for piece in pieces or ():
                piece.result()
            if pieces:
                return weight
        return self._tensor(name, shape).to(self.device, self.dtype)

    def begin(self) -> Callable[[], None]:
        """Begin to bring what is still in the files, beside whatever else is done.

        What is returned waits for it: before the first product, and before the files are closed.
        """
        fetched = fetch(self._later) if self._later else None
        staging = self.staging

        def arrived() -> None:
            if staging is not None:
                staging.finish()
            if fetched is not None:
                fetched.result()

        return arrived

    def _bring(
        self, target: Tensor, name: str, shape: tuple[int, ...]
    ) -> list[Future[None]] | None:
        """Begin to fill `target`; None where nobody brings it."""
        if self.staging is None:
            return None
        stored = self.source.stored(name, *self._place(name, shape))
        if stored is None or stored.head_rows:
            return None
        return self.staging.bring(target, stored)

    def linear(self, name: str, *shape: int) -> Linear:
        """Read the matrix `name` to multiply by; ranks hold its columns, and sum their answers."""
        rows, columns = shape
        return self.ranks.summed(self.linear_stack("", {name: rows}, columns))

    def embedding(self, name: str, rows: int, columns: int) -> Table:
        """Read the table of embeddings: as matrices are kept, or in fp16 where they stay packed."""
        shape = (rows, columns)
        if self.keeping is Keeping.NATIVE:
            groups = self.source.groups(name, *self._place(name, shape))
            table = None if groups is None else native(groups, self.keeping, self._later)
            if table is not None:
                return table
        if tiles(self.keeping, [rows], columns):
            return tiled([self._rows(name, shape)], self.keeping, self._later)
        wide = self.read(name, *shape)
        return wide.half() if self.keeping.as_filed else wide

    def head(self, table: Table) -> Linear:
        """Return the product by the last matrix, which few rows reach: those that are sampled."""
        if isinstance(table, Native):
            return table
        return Half(table) if self.keeping.as_filed else Plain(table)

    def linear_stack(self, prefix: str, parts: dict[str, int], columns: int) -> Linear:
        """Read the matrices `parts` as one to multiply by; ranks hold their rows."""
        kept = self._packed(prefix, parts, columns)
        if kept is None and tiles(self.keeping, parts.values(), columns):
            filed = [self._rows(f"{prefix}{name}", (rows, columns)) for name, rows in parts.items()]
            kept = tiled(filed, self.keeping, self._later)
        if kept is None:
            kept = keep(self.stack(prefix, parts, columns), self.keeping)
        return Adapted(kept, prefix, parts, columns, self.adding) if self.adding else kept

    def _packed(self, prefix: str, parts: dict[str, int], columns: int) -> Linear | None:
        """Return the product as the file packs it; None where not all of it is packed alike."""
        if not self.keeping.as_filed:
            return None
        groups: list[Groups | Filed] = []
        for name, rows in parts.items():
            name = f"{prefix}{name}"
            part = self.source.groups(name, *self._place(name, (rows, columns)))
            if part is None:
                return None
            groups.append(part)
        return keep_groups(join(groups), self.keeping, self._later)

    def stack(self, prefix: str, parts: dict[str, int], *columns: int) -> Tensor:
        """Read `parts` (name below `prefix`: rows) one below the other, with no second copy."""
        rows = sum(parts.values())
        stacked = torch.empty(rows, *columns, device=self.device, dtype=self.dtype)
        at = 0
        for name, count in parts.items():
            part, shape = stacked[at : at + count], (count, *columns)
            if self._bring(part, f"{prefix}{name}", shape) is None:
                part.copy_(self._tensor(f"{prefix}{name}", shape))
            at += count
        return stacked

    def _rows(self, name: str, shape: tuple[int, int]) -> Tensor | InFile:
        """Return the rows of a matrix of floats, or where they lie, to be read with others."""
        place = self._place(name, shape)
        stored, read = self.source.stored(name, *place), partial(self.source.tensor, name, *place)
        if stored is None or stored.dtype not in LAYOUTS:
            return read()
        return InFile(stored.path, stored.start, shape, stored.dtype, stored.head_rows, read)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.source.tensor(name, *self._place(name, shape))

    def _place(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Cut | None]:
        """Return the shape of a whole weight, and which part of it is read."""
        cut = self.share.cut(name, shape) if self.share is not None else None
        return (cut.whole if cut else shape), cut


class Survey(WeightSource):
    """A source that reads no weights, only checks that each could be read.

    A model built from it on the meta device takes no memory, and what its files lack is known
    before any is spent.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Check the weight; return one of its shape that takes no memory."""
        self.check(name, shape, cut)
        return torch.ones(1).expand(cut.shape if cut else shape)

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
        """Ask the source."""
        self._source.check(name, shape, cut)

    def has(self, name: str) -> bool:
        """Ask the source."""
        return self._source.has(name)

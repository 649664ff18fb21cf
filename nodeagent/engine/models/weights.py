"""How a model's weights come to its device: in its dtype, and fused where one product serves."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from nodeagent.engine.layers.linear import (
    TILE_ROWS,
    Filed,
    Groups,
    Half,
    Keeping,
    Linear,
    Native,
    Plain,
    join,
    keep,
    keep_groups,
    native,
    tiled,
)
from nodeagent.engine.layers.lora import Adapted, Adding
from nodeagent.engine.parallel.ranks import ALONE, Ranks
from nodeagent.engine.parallel.share import Cut

Table = Tensor | Native
"""Rows by their number: `table[tokens]`."""


class WeightSource(Protocol):
    """Weights by their Hugging Face name, checked against the shape that the model expects.

    Where a `cut` of that shape is given, only that part is read.
    """

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Read one weight in the dtype it is stored in, or fp32 where it is stored quantised."""
        ...

    def groups(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None
    ) -> Groups | Filed | None:
        """Read one matrix as its file quantises it; None where that is not in groups of 32."""
        ...

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
        """Raise CheckpointError where `tensor` would, judging by the files' headers alone."""
        ...

    def has(self, name: str) -> bool:
        """True where the files hold `name`."""
        ...


class Weights:
    """Reads from `source` onto a device."""

    def __init__(
        self,
        source: WeightSource,
        device: str,
        dtype: torch.dtype,
        keeping: Keeping,
        ranks: Ranks = ALONE,
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self.keeping = keeping
        self.ranks = ranks
        self.adding: Adding | None = Adding()

    def bare(self) -> "Weights":
        """Return the same for matrices that no adapter changes and no product of which is summed.

        Adapters name rows of the flat batch; what sees other rows than those cannot take them.
        """
        bare = Weights(self.source, self.device, self.dtype, self.keeping)
        bare.adding = None
        return bare

    def read(self, name: str, *shape: int) -> Tensor:
        """Read the weight `name`."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def linear(self, name: str, *shape: int) -> Linear:
        """Read the matrix `name` to multiply by; ranks hold its columns, and sum their answers."""
        rows, columns = shape
        return self.ranks.summed(self.linear_stack("", {name: rows}, columns))

    def embedding(self, name: str, *shape: int) -> Table:
        """Read the table of embeddings: as matrices are kept, or in fp16 where they stay packed."""
        if self.keeping is Keeping.NATIVE:
            groups = self.source.groups(name, shape)
            table = None if groups is None else native(groups, self.keeping)
            if table is not None:
                return table
        if self._tiles(shape[:1]):
            return tiled([self.source.tensor(name, shape)])
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
        if kept is None and self._tiles(parts.values()):
            shapes = {f"{prefix}{name}": (rows, columns) for name, rows in parts.items()}
            kept = tiled([self.source.tensor(name, shape) for name, shape in shapes.items()])
        if kept is None:
            kept = keep(self.stack(prefix, parts, columns), self.keeping)
        return self._adapted(kept, prefix, parts, columns)

    def _tiles(self, rows: Iterable[int]) -> bool:
        """True where matrices of so many rows are kept in tiles of our own."""
        return self.keeping is Keeping.TILED and not any(count % TILE_ROWS for count in rows)

    def _packed(self, prefix: str, parts: dict[str, int], columns: int) -> Linear | None:
        """Return the product as the file packs it; None where not all of it is packed alike."""
        if not self.keeping.as_filed:
            return None
        groups: list[Groups | Filed] = []
        for name, rows in parts.items():
            part = self.source.groups(f"{prefix}{name}", (rows, columns))
            if part is None:
                return None
            groups.append(part)
        return keep_groups(join(groups), self.keeping)

    def _adapted(self, kept: Linear, prefix: str, parts: dict[str, int], columns: int) -> Linear:
        if self.adding is None:
            return kept
        return Adapted(kept, prefix, parts, columns, self.adding)

    def stack(self, prefix: str, parts: dict[str, int], *columns: int) -> Tensor:
        """Read `parts` (name below `prefix`: rows) one below the other, with no second copy."""
        rows = sum(parts.values())
        stacked = torch.empty(rows, *columns, device=self.device, dtype=self.dtype)
        at = 0
        for name, count in parts.items():
            stacked[at : at + count] = self.source.tensor(f"{prefix}{name}", (count, *columns))
            at += count
        return stacked


class Survey:
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

    def groups(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None
    ) -> Groups | Filed | None:
        """Nothing is packed without memory."""
        return None

    def has(self, name: str) -> bool:
        """Ask the source."""
        return self._source.has(name)

"""Stores a model's matrices and multiplies by them: one backend for each model.

The model loader asks the backend which formats it takes, hands each matrix over in one of them, and
gets a `Linear` back. Layers call the `Linear` and never see its memory layout.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.kernels.attention_backend import AttentionLayout, LayerKV
from nodeagent.engine.kernels.matrix_formats import QuantisedMatrix, RowsInFile
from nodeagent.engine.kernels.step_interrupt import StepInterrupt


class Linear(Protocol):
    """Multiplies rows by a matrix."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [rows, columns in] times the matrix: [rows, columns out]."""
        ...


class EmbeddingTable(Protocol):
    """Rows of a matrix by their index: a tensor, or a matrix that the C kernels keep packed."""

    def __getitem__(self, rows: Tensor, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The weights of one transformer layer with a dense MLP."""

    attention_norm: Tensor
    mlp_norm: Tensor
    bias: Tensor | None
    """Added to queries, keys and values."""
    head_norms: Tensor | None
    """[heads + kv_heads, head_dim]: norm weights of each query and key head."""
    query_key_value: Linear
    output: Linear
    gate_up: Linear
    down: Linear


class FusedLayers(Protocol):
    """Runs all layers of a model in one call."""

    def can_run(self, layout: AttentionLayout) -> bool:
        """Return whether the step's attention layout is of the kind that these layers read."""
        ...

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
        ...


class LinearBackend(ABC):
    """Keeps the matrices of one model. An instance serves one model only: it holds its reads."""

    name: ClassVar[str]
    """The name in logs."""
    takes_quantised: ClassVar[bool] = False
    """Whether matrices are handed over quantised where their file has them so."""

    @abstractmethod
    def bytes_per_weight(self, dtype: torch.dtype, file_bits: int) -> float:
        """Return the memory for a weight that the file stores in `file_bits`.

        4 and 8 stand for quantised groups, 16 for a float of that size, 32 for everything else.
        """

    @abstractmethod
    def from_tensor(self, weight: Tensor) -> Linear:
        """Keep `weight` [columns out, columns in]."""

    @abstractmethod
    def head(self, table: EmbeddingTable) -> Linear:
        """Return the product by the output embeddings; few rows reach it, the sampled ones."""

    def from_quantised(self, matrix: QuantisedMatrix) -> Linear:
        """Keep a quantised matrix. Called only where `takes_quantised`."""
        raise TypeError(f"cannot keep a quantised matrix: backend {self.name!r} takes none")

    def takes_rows(self, part_rows: Iterable[int], columns: int) -> bool:
        """Return whether `from_rows` can keep float matrices of these sizes."""
        return False

    def from_rows(self, parts: Sequence[Tensor | RowsInFile]) -> Linear:
        """Keep float matrices, stacked vertically; those in files are read by `start_reads`."""
        raise TypeError(f"cannot keep rows of a file: backend {self.name!r} takes none")

    def quantised_table(self, matrix: QuantisedMatrix) -> EmbeddingTable | None:
        """Keep quantised embeddings; None if they must be handed over as floats."""
        return None

    def rows_table(self, part: Tensor | RowsInFile) -> EmbeddingTable:
        """Keep float embeddings. Called only where `takes_rows`."""
        raise TypeError(f"cannot keep a table of a file: backend {self.name!r} takes none")

    def table(self, weight: Tensor) -> EmbeddingTable:
        """Keep float embeddings."""
        return weight

    def start_reads(self) -> Callable[[], None]:
        """Start to read the rows that are still in files, in the background.

        The returned function waits for them, and raises CheckpointError. Call it before the first
        product, and before the files are closed.
        """
        return lambda: None

    def weight_regions(self) -> list[Tensor]:
        """Return the memory of all matrices, as bytes from a page on; empty where it is torch's."""
        return []

    def fuse(self, layers: Sequence[DenseLayer | None], shape: DecoderShape) -> FusedLayers | None:
        """Return all `layers` as one call, or None if this backend cannot.

        A layer is None where its MLP is not dense.
        """
        return None

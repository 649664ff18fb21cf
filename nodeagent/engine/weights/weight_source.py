"""The interface between a model and its weight files, independent of their format."""

from typing import Protocol

import torch
from torch import Tensor

from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.kernels.matrix_formats import QuantisedMatrix
from nodeagent.engine.weights.stored_tensor import StoredTensor


class WeightSource(Protocol):
    """Reads weights by their Hugging Face names.

    Every method checks the weight against the `shape` that the model expects and raises
    CheckpointError. With `cut`, only that slice of the weight is read.
    """

    def tensor(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> Tensor:
        """Read one weight in the dtype it is stored in, or in fp32 where it is quantised."""
        ...

    def stored(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> StoredTensor | None:
        """Return where a float weight lies in a file; None where it is not contiguous there."""
        return None

    def groups(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> QuantisedMatrix | None:
        """Return a matrix as its file quantises it; None unless that is in groups of 32."""
        return None

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        """Raise CheckpointError where `tensor` would, from the headers of the files alone."""
        ...

    def has(self, name: str) -> bool:
        """Return whether the files hold `name`."""
        ...


class HeaderOnlySource(WeightSource):
    """A source that only checks: it returns tensors of the right shape that take no memory.

    A model built from it on the meta device shows what its files lack before memory is spent.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def tensor(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> Tensor:
        """Check the weight; return an expanded scalar of its shape."""
        self.check(name, shape, cut)
        return torch.ones(1).expand(cut.shape if cut else shape)

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        """Check the weight in the files."""
        self._source.check(name, shape, cut)

    def has(self, name: str) -> bool:
        """Return whether the files hold `name`."""
        return self._source.has(name)

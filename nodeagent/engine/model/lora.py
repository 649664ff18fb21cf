"""Adds LoRA adapters to a model's products, row by row of the batch.

A step without adapters only checks an empty tuple for each product.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nodeagent.engine.kernels.linear_backend import Linear
from nodeagent.engine.weights.lora_adapter import LoraAdapter


class ActiveAdapters:
    """The modules of a model that adapters can change, and the adapters of the current step."""

    def __init__(self) -> None:
        self.modules: dict[str, tuple[int, int]] = {}
        """The (rows, columns) of every module that can be adapted, by name."""
        self.current: tuple[tuple[LoraAdapter, Tensor], ...] = ()
        """The adapters of the current step, each with the rows of the batch that it changes."""


@dataclass(frozen=True, slots=True)
class _OutputSlice:
    """The columns [start, end) of the product that one module gives."""

    module: str
    start: int
    end: int


class LoraLinear:
    """The product of one module, or of several stacked ones, plus what adapters add."""

    def __init__(
        self,
        base: Linear,
        prefix: str,
        part_rows: Mapping[str, int],
        columns: int,
        adapters: ActiveAdapters,
    ) -> None:
        """Register the modules `prefix` + name of `part_rows` in `adapters`."""
        self.base = base
        self._adapters = adapters
        self._slices: list[_OutputSlice] = []
        start = 0
        for name, rows in part_rows.items():
            module = f"{prefix}{name}".removesuffix(".weight")
            adapters.modules[module] = (rows, columns)
            self._slices.append(_OutputSlice(module, start, start + rows))
            start += rows

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, and add the low-rank products."""
        product = self.base(x)
        for adapter, rows in self._adapters.current:
            for output in self._slices:
                pair = adapter.pairs.get(output.module)
                if pair is not None:
                    down, up = pair
                    product[rows, output.start : output.end] += (x[rows] @ down.T) @ up.T
        return product

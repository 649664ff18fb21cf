"""Low-rank adapters added to a model's products, row by row of the flat batch.

Rule 1: an adapter never changes once it is made. Whoever runs with it holds it, so forgetting it
elsewhere disturbs nobody, and making another needs no lock.
Rule 2: a step without adapters pays one look at an empty tuple for each product.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nodeagent.engine.model.layers.linear import Linear


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """What is added to each module that it changes: `up` times `down` times the module's input."""

    name: str
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """(down [rank, columns], up [rows, rank] with the scale in it), by the module's name."""
    digest: bytes
    """Tells this adapter's KV from that of others."""
    size_bytes: int

    def __repr__(self) -> str:
        return f"Adapter({self.name!r}, modules={len(self.pairs)}, size_bytes={self.size_bytes})"


def salted(salt: bytes, adapter: Adapter | None) -> bytes:
    """Return the salt of the prefix cache for sequences that run with `adapter`."""
    if adapter is None:
        return salt
    return hashlib.sha256(b"adapter" + adapter.digest + salt).digest()


class Adding:
    """Which rows each adapter changes in the step that runs; one for each model."""

    def __init__(self) -> None:
        self.modules: dict[str, tuple[int, int]] = {}
        """The (rows, columns) of every module that can be adapted, by its name."""
        self.current: tuple[tuple[Adapter, Tensor], ...] = ()


class Adapted:
    """A product of one module, or of several one below the other, with what adapters add."""

    def __init__(
        self, linear: Linear, prefix: str, parts: Mapping[str, int], columns: int, adding: Adding
    ) -> None:
        self.bare = linear
        self._adding = adding
        self._places: list[tuple[str, int, int]] = []
        at = 0
        for name, rows in parts.items():
            module = f"{prefix}{name}".removesuffix(".weight")
            adding.modules[module] = (rows, columns)
            self._places.append((module, at, at + rows))
            at += rows

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply, and add."""
        answer = self.bare(x)
        for adapter, rows in self._adding.current:
            for module, start, end in self._places:
                pair = adapter.pairs.get(module)
                if pair is not None:
                    down, up = pair
                    answer[rows, start:end] += (x[rows] @ down.T) @ up.T
        return answer

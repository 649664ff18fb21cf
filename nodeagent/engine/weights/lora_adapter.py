"""A LoRA adapter in memory, and how it separates the prefix cache."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """Low-rank updates: `up` times `down` times a module's input is added to its output.

    An adapter never changes once made. A running sequence holds a reference to its adapter, so that
    unloading it elsewhere needs no lock.
    """

    name: str
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """(down [rank, columns], up [rows, rank] with the scale included), by module name."""
    digest: bytes
    """Identifies the adapter's weights, and with them its KV blocks."""
    size_bytes: int

    def __repr__(self) -> str:
        return f"LoraAdapter({self.name!r}, {len(self.pairs)} modules, {self.size_bytes} bytes)"


def prefix_cache_salt(salt: bytes, adapter: LoraAdapter | None) -> bytes:
    """Return the prefix cache salt of sequences that run with `adapter`."""
    if adapter is None:
        return salt
    return hashlib.sha256(b"adapter" + adapter.digest + salt).digest()

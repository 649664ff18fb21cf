"""What the front tells the other ranks: what to compute, and which KV blocks to move.

Rule: a message is whole. Nobody remembers an earlier one, so that no rank can come to believe
something else than the front; but for adapters, which are given once, and named by their digest.
"""

from collections.abc import Sequence

import msgspec

from nodeagent.engine.core.model_step import Piece, Work
from nodeagent.engine.model.layers.lora import Adapter


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load your share: the model's files are sound."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Meet the others: all have loaded. The front hears what goes into the layers `heard`."""

    heard: tuple[int, ...] = ()


class Told(msgspec.Struct, frozen=True, array_like=True):
    """Part of a step, as `decide.batching.Chunk` has it."""

    blocks: list[int]
    start: int
    tokens: int
    ids: list[int]
    drafts: tuple[int, ...]
    samples: bool
    adapter: bytes | None = None
    """The digest of the adapter that it runs with."""


class Run(msgspec.Struct, frozen=True, tag="run"):
    """Compute one step."""

    decodes: tuple[Told, ...]
    segments: tuple[Told, ...]

    @property
    def chunks(self) -> tuple[Told, ...]:
        """Decodes, then what has several tokens."""
        return self.decodes + self.segments


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Zero KV blocks."""

    blocks: Sequence[int]


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """Copy KV blocks, each (from, to)."""

    pairs: Sequence[tuple[int, int]]


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Say what your share of KV blocks holds."""

    blocks: Sequence[int]


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Fill your share of KV blocks: the bytes of [blocks, layers, tokens, heads, head_dim]."""

    blocks: Sequence[int]
    contents: bytes


class Adapt(msgspec.Struct, frozen=True, tag="adapt"):
    """Keep your part of an adapter: the bytes of `down` and `up`, and their rank, by module."""

    name: str
    digest: bytes
    dtype: str
    parts: dict[str, tuple[bytes, bytes, int]]


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody runs with this adapter any more."""

    digest: bytes


Order = Load | Join | Run | Clear | Copy | Read | Write | Adapt | Forget


class Done(msgspec.Struct, frozen=True, tag="done"):
    """What was ordered is done; `contents` where something was asked."""

    contents: bytes = b""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The share cannot be loaded."""

    why: str


Word = Done | Refused


def told(work: Work) -> Run:
    """Return the step as it is told."""
    return Run(_told(work.decodes), _told(work.segments))


def _told(pieces: Sequence[Piece]) -> tuple[Told, ...]:
    return tuple(
        Told(
            piece.blocks,
            piece.start,
            piece.tokens,
            piece.ids,
            piece.drafts,
            piece.samples,
            piece.adapter.digest if isinstance(piece.adapter, Adapter) else None,
        )
        for piece in pieces
    )

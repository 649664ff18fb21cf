"""What the front tells the other ranks: what to compute, and which KV blocks to move.

Rule: a message is whole. Nobody remembers an earlier one, so that no rank can come to believe
something else than the front; but for adapters, which are given once, and named by their digest.
"""

from collections.abc import Sequence

import msgspec

from nodeagent.engine.scheduler.forward_batch import ForwardBatch, ForwardChunk
from nodeagent.engine.weights.lora_adapter import LoraAdapter


class LoadShard(msgspec.Struct, frozen=True, tag="load"):
    """Load your share: the model's files are sound."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join"):
    """Meet the others: all have loaded. The front hears what goes into the layers `heard`."""

    heard: tuple[int, ...] = ()


class ChunkCommand(msgspec.Struct, frozen=True, array_like=True):
    """Part of a step, as `decide.batching.Chunk` has it."""

    blocks: list[int]
    start: int
    tokens: int
    ids: list[int]
    drafts: tuple[int, ...]
    samples: bool
    adapter: bytes | None = None
    """The digest of the adapter that it runs with."""


class RunStep(msgspec.Struct, frozen=True, tag="run"):
    """Compute one step."""

    decodes: tuple[ChunkCommand, ...]
    segments: tuple[ChunkCommand, ...]

    @property
    def chunks(self) -> tuple[ChunkCommand, ...]:
        """Decodes, then what has several tokens."""
        return self.decodes + self.segments


class ClearBlocks(msgspec.Struct, frozen=True, tag="clear"):
    """Zero KV blocks."""

    blocks: Sequence[int]


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy"):
    """Copy KV blocks, each (from, to)."""

    pairs: Sequence[tuple[int, int]]


class ReadBlocks(msgspec.Struct, frozen=True, tag="read"):
    """Say what your share of KV blocks holds."""

    blocks: Sequence[int]


class WriteBlocks(msgspec.Struct, frozen=True, tag="write"):
    """Fill your share of KV blocks: the bytes of [blocks, layers, tokens, heads, head_dim]."""

    blocks: Sequence[int]
    contents: bytes


class AddAdapter(msgspec.Struct, frozen=True, tag="adapt"):
    """Keep your part of an adapter: the bytes of `down` and `up`, and their rank, by module."""

    name: str
    digest: bytes
    dtype: str
    parts: dict[str, tuple[bytes, bytes, int]]


class RemoveAdapter(msgspec.Struct, frozen=True, tag="forget"):
    """Nobody runs with this adapter any more."""

    digest: bytes


Command = (
    LoadShard
    | JoinGroup
    | RunStep
    | ClearBlocks
    | CopyBlocks
    | ReadBlocks
    | WriteBlocks
    | AddAdapter
    | RemoveAdapter
)


class CommandDone(msgspec.Struct, frozen=True, tag="done"):
    """What was ordered is done; `contents` where something was asked."""

    contents: bytes = b""


class ShardRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The share cannot be loaded."""

    why: str


WorkerReply = CommandDone | ShardRefused


def run_step_command(work: ForwardBatch) -> RunStep:
    """Return the step as it is told."""
    return RunStep(_chunk_commands(work.decodes), _chunk_commands(work.segments))


def _chunk_commands(pieces: Sequence[ForwardChunk]) -> tuple[ChunkCommand, ...]:
    return tuple(
        ChunkCommand(
            piece.blocks,
            piece.start,
            piece.tokens,
            piece.ids,
            piece.drafts,
            piece.samples,
            piece.adapter.digest if isinstance(piece.adapter, LoraAdapter) else None,
        )
        for piece in pieces
    )

"""Commands from rank 0 to the workers: what to compute, and which KV blocks to move.

Rule: a command is complete and does not depend on earlier ones, so that a worker cannot diverge
from rank 0. Adapters are the exception: they are sent once and then named by their digests.
"""

from collections.abc import Sequence

import msgspec

from nodeagent.engine.scheduler.batch import BlockCopy
from nodeagent.engine.scheduler.forward_batch import ForwardBatch, ForwardChunk
from nodeagent.engine.weights.lora_adapter import LoraAdapter


class LoadShard(msgspec.Struct, frozen=True, tag="load"):
    """Load the worker's shard: rank 0 has checked the files of the model."""


class JoinGroup(msgspec.Struct, frozen=True, tag="join"):
    """Connect to the other ranks: all have loaded."""

    layer_inputs: tuple[int, ...] = msgspec.field(default=(), name="heard")
    """The layers whose inputs are sent to rank 0."""


class ChunkCommand(msgspec.Struct, frozen=True, array_like=True):
    """Part of a step: a `BatchChunk` of the scheduler as a message."""

    blocks: list[int]
    start: int
    tokens: int
    ids: list[int]
    drafts: tuple[int, ...]
    samples: bool
    adapter: bytes | None = None
    """The digest of the adapter of its sequence."""


class RunStep(msgspec.Struct, frozen=True, tag="run"):
    """Compute one step."""

    decodes: tuple[ChunkCommand, ...]
    segments: tuple[ChunkCommand, ...]

    @property
    def chunks(self) -> tuple[ChunkCommand, ...]:
        """All chunks: decodes, then those of several tokens."""
        return self.decodes + self.segments


class ClearBlocks(msgspec.Struct, frozen=True, tag="clear"):
    """Zero KV blocks."""

    blocks: Sequence[int]


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy"):
    """Copy KV blocks."""

    pairs: Sequence[BlockCopy]


class ReadBlocks(msgspec.Struct, frozen=True, tag="read"):
    """Reply with the worker's shard of KV blocks."""

    blocks: Sequence[int]


class WriteBlocks(msgspec.Struct, frozen=True, tag="write"):
    """Fill the worker's shard of KV blocks.

    `contents` are the bytes of a tensor [blocks, layers, tokens, heads, head_dim].
    """

    blocks: Sequence[int]
    contents: bytes


class AddAdapter(msgspec.Struct, frozen=True, tag="adapt"):
    """Keep the worker's shard of an adapter.

    `parts` has by module the bytes of the whole `down` and `up` matrices, and their LoRA rank.
    """

    name: str
    digest: bytes
    dtype: str
    parts: dict[str, tuple[bytes, bytes, int]]


class RemoveAdapter(msgspec.Struct, frozen=True, tag="forget"):
    """Forget an adapter that no sequence uses any more."""

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
    """The command was executed; `contents` is the reply to `ReadBlocks`."""

    contents: bytes = b""


class ShardRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The shard cannot be loaded."""

    reason: str = msgspec.field(name="why")


WorkerReply = CommandDone | ShardRefused


def run_step_command(batch: ForwardBatch) -> RunStep:
    """Return the command to compute `batch`."""
    return RunStep(_chunk_commands(batch.decodes), _chunk_commands(batch.segments))


def _chunk_commands(chunks: Sequence[ForwardChunk]) -> tuple[ChunkCommand, ...]:
    return tuple(
        ChunkCommand(
            chunk.blocks,
            chunk.start,
            chunk.tokens,
            chunk.ids,
            chunk.drafts,
            chunk.samples,
            chunk.adapter.digest if isinstance(chunk.adapter, LoraAdapter) else None,
        )
        for chunk in chunks
    )

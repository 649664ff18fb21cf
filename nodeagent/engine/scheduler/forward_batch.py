"""A step as the model runner sees it: decided by the scheduler here, or received from rank 0."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS


class ForwardChunk(Protocol):
    """Part of a step: a `BatchChunk` of the scheduler, or a `ChunkCommand` sent by rank 0."""

    @property
    def blocks(self) -> list[int]:
        """The KV blocks of the sequence."""
        ...

    @property
    def adapter(self) -> object | None:
        """The LoRA adapter of the sequence, or its digest."""
        ...

    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def ids(self) -> list[int]: ...
    @property
    def drafts(self) -> tuple[int, ...]: ...
    @property
    def samples(self) -> bool: ...


class ForwardBatch(Protocol):
    """One step: a `Batch` of the scheduler, or a `RunStep` sent by rank 0."""

    @property
    def decodes(self) -> Sequence[ForwardChunk]: ...
    @property
    def segments(self) -> Sequence[ForwardChunk]: ...
    @property
    def chunks(self) -> Sequence[ForwardChunk]: ...


class FlatRows(NamedTuple):
    """The rows of a flat batch: one row for each token."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    """The KV slot of each row: block * BLOCK_TOKENS + offset."""
    sampled: list[int]
    """The rows whose logits are needed."""


def flatten_rows(batch: ForwardBatch) -> FlatRows:
    """Return the rows of `batch`, in the order of its chunks."""
    rows = FlatRows([], [], [], [])
    tokens, positions, slots, sampled = rows
    for chunk in batch.chunks:
        blocks, span = chunk.blocks, range(chunk.start, chunk.start + chunk.tokens)
        tokens += chunk.ids
        positions += span
        slots += [blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in span]
        if chunk.samples:
            sampled += range(len(tokens) - 1 - len(chunk.drafts), len(tokens))
    return rows


def block_count(chunk: ForwardChunk) -> int:
    """Return how many blocks hold the tokens up to the last of `chunk`."""
    return -(-(chunk.start + chunk.tokens) // BLOCK_TOKENS)


def first_visible_token(chunk: ForwardChunk, window_tokens: int | None) -> int:
    """Return the first token that the first token of `chunk` attends to."""
    return 0 if window_tokens is None else max(0, chunk.start + 1 - window_tokens)

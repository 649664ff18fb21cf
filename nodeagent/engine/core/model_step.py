"""A step to compute, as a runner sees it: what was decided here, or told by the front."""

from collections.abc import Sequence
from typing import Protocol

from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS


class Piece(Protocol):
    """Part of a step: `decide.batching.Chunk`, or what another rank was told of one."""

    @property
    def blocks(self) -> list[int]:
        """The KV blocks of its sequence."""
        ...

    @property
    def adapter(self) -> object | None:
        """What is added to the model for it."""
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


class Work(Protocol):
    """One step: `decide.batching.Batch`, or what another rank was told of one."""

    @property
    def decodes(self) -> Sequence[Piece]: ...
    @property
    def segments(self) -> Sequence[Piece]: ...
    @property
    def chunks(self) -> Sequence[Piece]: ...


def rows_of(work: Work) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return each row's token, position and KV slot; and the rows whose logits are wanted."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sampled: list[int] = []
    for piece in work.chunks:
        blocks, places = piece.blocks, range(piece.start, piece.start + piece.tokens)
        tokens += piece.ids
        positions += places
        slots += [blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in places]
        if piece.samples:
            sampled += range(len(tokens) - 1 - len(piece.drafts), len(tokens))
    return tokens, positions, slots, sampled


def blocks_of(piece: Piece) -> int:
    """Return how many blocks hold the tokens up to the piece's last."""
    return -(-(piece.start + piece.tokens) // BLOCK_TOKENS)


def first_seen(piece: Piece, window_tokens: int | None) -> int:
    """Return the first token that the piece's first one sees."""
    return 0 if window_tokens is None else max(0, piece.start + 1 - window_tokens)

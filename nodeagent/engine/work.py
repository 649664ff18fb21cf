"""A step to compute, as a runner sees it: what was decided here, or told by the front."""

from collections.abc import Sequence
from typing import Protocol


class Placed(Protocol):
    """A sequence, as far as running it goes."""

    @property
    def blocks(self) -> list[int]:
        """Its KV blocks."""
        ...

    @property
    def adapter(self) -> object | None:
        """What is added to the model for it."""
        ...


class Piece(Protocol):
    """Part of a step: `decide.batching.Chunk`, or what another rank was told of one."""

    @property
    def sequence(self) -> Placed: ...
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

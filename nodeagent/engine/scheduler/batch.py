"""The batch of one engine step: the chunks it computes and the KV blocks that move before it."""

from dataclasses import dataclass
from typing import NamedTuple

from nodeagent.engine.kvcache.block_pool import CachedBlock
from nodeagent.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size limits of one step."""

    batch_tokens_max: int
    sequences_max: int

    def __post_init__(self) -> None:
        if self.sequences_max < 1 or self.batch_tokens_max <= self.sequences_max:
            raise ValueError(
                f"cannot batch {self.batch_tokens_max} tokens for {self.sequences_max} sequences:"
                " batch_tokens_max must exceed sequences_max, and that must be at least 1"
            )


class BlockCopy(NamedTuple):
    """A copy of one KV block to another on the device."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Part of a step: compute tokens [start, start + tokens) of one sequence.

    The last `len(drafts)` of them are drafted tokens, which follow the sequence's known tokens.
    """

    sequence: Sequence
    start: int
    tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[int]:
        """The KV blocks of the sequence."""
        return self.sequence.blocks

    @property
    def adapter(self) -> object | None:
        """The LoRA adapter of the sequence."""
        return self.sequence.adapter

    @property
    def samples(self) -> bool:
        """True if the chunk reaches the last known token, so that the next one is sampled."""
        return self.start + self.tokens - len(self.drafts) == len(self.sequence.tokens)

    @property
    def ids(self) -> list[int]:
        """The token ids to compute."""
        return [*self.sequence.tokens[self.start : self.start + self.tokens], *self.drafts]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: decodes (one token each), decodes with drafts, and prompt chunks.

    The KV blocks move before the step in this order: save `evicted`, do `copies`, load `restores`.
    """

    decodes: tuple[BatchChunk, ...]
    prefills: tuple[BatchChunk, ...]
    late: tuple[Sequence, ...] = ()
    """Sequences dropped because their deadlines passed before their first tokens."""
    evicted: tuple[CachedBlock, ...] = ()
    """Cached contents that this step overwrites, which are lost unless they are saved first."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies on write: the step writes to the destinations."""
    restores: tuple[CachedBlock, ...] = ()
    """Blocks to fill from the lower KV tiers."""
    verifies: tuple[BatchChunk, ...] = ()
    """Decodes with drafts."""

    @property
    def chunks(self) -> tuple[BatchChunk, ...]:
        """All chunks in the row order of the flat batch: decodes, then segments."""
        return self.decodes + self.segments

    @property
    def segments(self) -> tuple[BatchChunk, ...]:
        """The chunks of several tokens: decodes with drafts, then prefills."""
        return self.verifies + self.prefills

    @property
    def may_be_interrupted(self) -> bool:
        """True if it computes sequences that yield, and no prompt of others."""
        return any(chunk.sequence.yields for chunk in self.chunks) and all(
            chunk.sequence.yields for chunk in self.prefills
        )

    @property
    def tokens(self) -> int:
        """The number of tokens that the step computes."""
        return len(self.decodes) + sum(chunk.tokens for chunk in self.segments)

    @property
    def prefill_tokens(self) -> int:
        """The number of prompt tokens that the step computes."""
        return sum(chunk.tokens for chunk in self.prefills)

"""One sequence: its tokens, how many of them have KV, its KV blocks, and when it ends.

Rule 1: `computed_tokens` counts the tokens whose KV is in `blocks`; it is at most len(tokens).
Rule 2: a preempted sequence keeps its tokens and loses its blocks; its output continues later.
Rule 3: the chain of block digests starts with the salt of the request, so that no tenant can find
out from timing what prompts another tenant sent.
Rule 4: of several sequences with the same prompt only the first computes it. The others are its
`forks`: they start from its KV once the prompt is computed.
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.scheduler.fair_queue import PRIORITY_LOWEST, SchedulingParams


class FinishReason(StrEnum):
    """The reason why a sequence ended, with OpenAI's names where they exist."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    LATE = "late"
    """Its deadline passed before its first token."""
    INVALID = "invalid"
    """The request itself cannot be served: its grammar exceeds a limit."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The token limit and the stop tokens of a sequence."""

    tokens_max: int
    stop_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the tokens generated after it."""

    number: int
    tokens: list[int]
    stop_conditions: StopConditions
    salt: bytes = b""
    adapter: object | None = None
    """The LoRA adapter, opaque to the scheduler. KV depends on it: the caller adds it to `salt`."""
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    virtual_start: int = 0
    """The position in the fair queue, lowest first. Assigned when the sequence is submitted."""
    queue_number: int = field(init=False)
    """Orders equal positions: its number, or that of the sequence it exchanged positions with."""
    prompt_tokens: int = field(init=False)
    computed_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first admitted."""
    restored_tokens: int = 0
    """How many of the cached tokens were in the tiers below the device."""
    file_tokens: int = 0
    """Prompt tokens that were read from files before the sequence was queued."""
    was_admitted: bool = False
    began_s: float = 0.0
    """The time of the step that first computed a part of it, on the clock of the steps."""
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    published_blocks: int = 0
    """The first blocks of this sequence that are already in the prefix cache."""
    forks: "list[Sequence]" = field(default_factory=list)
    """Sequences with the same prompt that wait until this one has computed it."""
    drafts: tuple[int, ...] = ()
    """Draft tokens for the next step to verify."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("cannot make a sequence of no tokens")
        self.prompt_tokens = len(self.tokens)
        self.queue_number = self.number

    @property
    def pending_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.stop_conditions.tokens_max - self.output_tokens

    @property
    def yields(self) -> bool:
        """True if it has the lowest priority: it gives way to the prompts of all others."""
        return self.scheduling.priority <= PRIORITY_LOWEST

    @property
    def is_decoding(self) -> bool:
        """True if only the last token is to be computed before the next one is sampled."""
        return self.pending_tokens == 1 and self.computed_tokens > 0

    def blocks_needed(self) -> int:
        """Return the number of blocks that hold all known tokens."""
        return -(-len(self.tokens) // BLOCK_TOKENS)

    def block_digests(self, blocks: int) -> list[bytes]:
        """Return the digests of the first `blocks` full blocks.

        Each digest is the SHA-256 of the digest before it and the block's token ids.
        """
        while len(self.digests) < blocks:
            start = len(self.digests) * BLOCK_TOKENS
            parent = self.digests[-1] if self.digests else b"salt:" + self.salt
            tokens = array("q", self.tokens[start : start + BLOCK_TOKENS]).tobytes()
            self.digests.append(hashlib.sha256(parent + tokens).digest())
        return self.digests[:blocks]

    def append(self, token: int) -> FinishReason | None:
        """Append the sampled `token`; return the reason if it ends the sequence.

        A stop token is not appended: it is not part of the output.
        """
        if token in self.stop_conditions.stop_ids:
            return FinishReason.STOP
        self.tokens.append(token)
        at_limit = self.output_tokens >= self.stop_conditions.tokens_max
        return FinishReason.LENGTH if at_limit else None


def queue_order(sequence: Sequence) -> tuple[int, int]:
    """Sort key of sequences: first in the fair queue first, then in order of arrival."""
    return sequence.virtual_start, sequence.queue_number


def sequence_count(sequences: Iterable[Sequence]) -> int:
    """Return the number of `sequences` and their forks."""
    return sum(1 + len(sequence.forks) for sequence in sequences)

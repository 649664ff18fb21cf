"""One request's life inside the engine: its tokens, how far its KV reaches, why it ends.

Rule 1: `computed` counts the tokens whose KV lies in `blocks`; it never exceeds len(tokens).
Rule 2: a preempted sequence keeps its tokens and loses its blocks; its output goes on unbroken.
Rule 3: the chain of block digests starts from the request's salt, so that no tenant can find out
by timing what another tenant asked.
Rule 4: of several sequences of one prompt the first alone computes it. The others are its followers
until then; then they go on from its KV, each by itself.
"""

import hashlib
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from nodeagent.engine.scheduler.fair_queue import Standing

BLOCK_TOKENS: Final = 16


class Finish(StrEnum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    LATE = "late"
    """Its deadline passed before its first token."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends a sequence besides its caller."""

    tokens_max: int
    stop_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated after it."""

    number: int
    tokens: list[int]
    ending: Ending
    salt: bytes = b""
    adapter: object | None = None
    """What is added to the model for this sequence; nothing here looks into it. Its KV is another
    than the bare model's, so whoever sets it makes it part of the salt."""
    standing: Standing = field(default_factory=Standing)
    turn: int = 0
    """Its place in the queue, the least first; given when it is submitted."""
    prompt_tokens: int = field(init=False)
    computed: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held when the sequence was first admitted."""
    admitted: bool = False
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    """Blocks of this sequence already offered to the prefix cache."""
    followers: "list[Sequence]" = field(default_factory=list)
    """Sequences of the same prompt that wait for this one to compute it."""
    drafts: tuple[int, ...] = ()
    """Tokens that may come next, to be verified in the coming step."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("cannot make a sequence of no tokens")
        self.prompt_tokens = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.ending.tokens_max - self.output_tokens

    @property
    def decoding(self) -> bool:
        """True where one more token leads to the next sample."""
        return self.pending == 1 and self.computed > 0

    def blocks_needed(self) -> int:
        """Blocks that hold all tokens known so far."""
        return -(-len(self.tokens) // BLOCK_TOKENS)

    def chain(self, blocks: int) -> list[bytes]:
        """Return the digests of the first `blocks` whole blocks."""
        while len(self.digests) < blocks:
            start = len(self.digests) * BLOCK_TOKENS
            parent = self.digests[-1] if self.digests else b"salt:" + self.salt
            tokens = array("q", self.tokens[start : start + BLOCK_TOKENS]).tobytes()
            self.digests.append(hashlib.sha256(parent + tokens).digest())
        return self.digests[:blocks]

    def append(self, token: int) -> Finish | None:
        """Take the sampled `token`; return why the sequence ends here, if it does.

        A stop token is not kept: it is no part of the output.
        """
        if token in self.ending.stop_ids:
            return Finish.STOP
        self.tokens.append(token)
        return Finish.LENGTH if self.output_tokens >= self.ending.tokens_max else None

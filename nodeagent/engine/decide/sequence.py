"""One generation inside the engine, and what was asked of it."""

from enum import StrEnum
from typing import Final

import msgspec

TOP_LOGPROBS_MAX: Final = 20


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. `temperature` 0 is greedy; 0 or 1 switches a filter off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Say whether the largest logit is the answer, with nothing to add to it first."""
        return (
            self.temperature == 0.0
            and not self.logit_bias
            and not self.penalises
            and self.logprobs is None
        )

    @property
    def penalises(self) -> bool:
        """Say whether tokens already seen weigh on the next."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class Sequence:
    """A prompt and the tokens generated after it, and how many of them have their KV computed."""

    __slots__ = (
        "arrived",
        "block_ids",
        "cached_tokens",
        "computed",
        "finish_reason",
        "ignore_eos",
        "max_tokens",
        "number",
        "prompt_tokens",
        "salt",
        "sampling",
        "sealed_blocks",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        number: int,
        prompt: list[int],
        *,
        max_tokens: int,
        sampling: Sampling,
        stop_token_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
        salt: bytes = b"",
    ) -> None:
        """Take a prompt of at least one token. `number` orders sequences by arrival."""
        self.number = number
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.ignore_eos = ignore_eos
        self.salt = salt
        self.computed = 0
        self.cached_tokens = 0
        self.block_ids: list[int] = []
        self.sealed_blocks = 0
        self.finish_reason: FinishReason | None = None
        self.arrived = 0.0

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.number}: {self.prompt_tokens}+{self.output_tokens} tokens, "
            f"{self.computed} computed, {len(self.block_ids)} blocks>"
        )

    @property
    def output_tokens(self) -> int:
        """Return how many tokens were generated."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Return how many tokens still need their KV before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def is_decoding(self) -> bool:
        """Say whether one more token of KV gives one more token of output."""
        return self.pending == 1 and self.output_tokens > 0

    def append(self, token: int) -> FinishReason | None:
        """Take a sampled token and return why the sequence is over, if it is."""
        self.tokens.append(token)
        if token in self.stop_token_ids and not self.ignore_eos:
            self.finish_reason = FinishReason.STOP
        elif self.output_tokens >= self.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason

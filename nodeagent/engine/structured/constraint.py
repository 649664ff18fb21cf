"""One output's grammar in motion: which tokens may come next, and what came.

Rule 1: only the step thread touches a constraint once its generation is submitted.
Rule 2: a constraint moves only along what was truly sampled; looking ahead leaves no trace.
"""

from collections.abc import Callable

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

_WORD_BITS = 32


class BrokenConstraint(Exception):
    """The grammar ran over a limit, or met a token that it forbids."""


class Constraint:
    """A compiled grammar and how far the output has come in it."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, stop_token: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._stop_token = stop_token
        self._bits = np.zeros(-(-vocabulary // _WORD_BITS), dtype=np.uint32)

    def copy(self) -> "Constraint":
        """Return another at the same place, which moves by itself."""
        return Constraint(self._matcher.deep_copy(), self._vocabulary, self._stop_token)

    def apply(self, logits: Tensor) -> None:
        """Forbid in `logits` [vocabulary or wider] whatever the grammar does not allow next."""
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.zeros(logits.shape[-1], dtype=np.bool_)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        allowed[: self._vocabulary] = bits[: self._vocabulary]
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Take the sampled `token`."""
        self._matcher.consume_token(token)
        self._check()

    def look_ahead(
        self, count: int, propose: Callable[[list[int]], int | None]
    ) -> tuple[list[int], list[bool]]:
        """Draft up to `count` tokens that the grammar allows; say of each if it must come.

        Where the grammar leaves a choice, `propose` is asked what may follow the draft so far.
        Nothing moves: every token is taken back.
        """
        draft: list[int] = []
        must: list[bool] = []
        taken = 0
        while len(draft) < count and not self._matcher.is_stopped():
            forced = self._matcher.compute_ff_tokens()[: count - len(draft)]
            proposed = None if forced else propose(draft)
            found = forced if proposed is None else [proposed]
            if not found or self._stop_token in found:
                break
            held = self._matcher.try_consume_tokens(found)
            taken += held
            draft += found[:held]
            must += [bool(forced)] * held
            if held < len(found):
                break
        if len(draft) < count and self._matcher.is_stopped():
            draft.append(self._stop_token)
            must.append(True)
        if taken:
            self._matcher.rollback(taken)
        return draft, must

    def allowed(self, tokens: list[int]) -> int:
        """Return how many of `tokens` the grammar would take, one after the other."""
        return int(self._matcher.validate_tokens(tokens)) if tokens else 0

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BrokenConstraint(
                f"cannot go on with this grammar: {first_line(self._matcher.get_error())}"
            )


def first_line(error: str) -> str:
    """Return what an error of the matcher says, without the state it prints below."""
    line = error.strip().partition("\n")[0]
    return line[:300]

"""The state of one output in its compiled grammar: which tokens may come next.

Rule 1: after its generation is submitted, only the step thread uses a constraint.
Rule 2: only sampled tokens advance a constraint; looking ahead leaves it unchanged.
"""

from collections.abc import Callable

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

_WORD_BITS = 32


class ConstraintError(Exception):
    """The grammar exceeded a limit, or received a token that it forbids."""


class Constraint:
    """A compiled grammar and the position of one output in it."""

    def __init__(self, matcher: LLMatcher, vocabulary_size: int, stop_token: int) -> None:
        self._matcher = matcher
        self._vocabulary_size = vocabulary_size
        self._stop_token = stop_token
        self._bits = np.zeros(-(-vocabulary_size // _WORD_BITS), dtype=np.uint32)

    def copy(self) -> "Constraint":
        """Return an independent constraint at the same position."""
        return Constraint(self._matcher.deep_copy(), self._vocabulary_size, self._stop_token)

    def apply(self, logits: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf; `logits` is [vocabulary or wider].

        Raises ConstraintError.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        allowed = np.zeros(logits.shape[-1], dtype=np.bool_)
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little")
        allowed[: self._vocabulary_size] = bits[: self._vocabulary_size]
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        """Advance by the sampled `token`, or raise ConstraintError."""
        self._matcher.consume_token(token)
        self._check()

    def look_ahead(
        self, count: int, propose: Callable[[list[int]], int | None]
    ) -> tuple[list[int], list[bool]]:
        """Draft up to `count` allowed tokens; return them and whether each one is forced.

        Where the grammar allows several tokens, `propose` may choose one, given the draft so far.
        The constraint itself does not advance.
        """
        draft: list[int] = []
        forced: list[bool] = []
        consumed = 0
        while len(draft) < count and not self._matcher.is_stopped():
            forced_tokens = self._matcher.compute_ff_tokens()[: count - len(draft)]
            proposed = None if forced_tokens else propose(draft)
            tokens = forced_tokens if proposed is None else [proposed]
            if not tokens or self._stop_token in tokens:
                break
            accepted = self._matcher.try_consume_tokens(tokens)
            consumed += accepted
            draft += tokens[:accepted]
            forced += [bool(forced_tokens)] * accepted
            if accepted < len(tokens):
                break
        if len(draft) < count and self._matcher.is_stopped():
            draft.append(self._stop_token)
            forced.append(True)
        if consumed:
            self._matcher.rollback(consumed)
        return draft, forced

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(
                f"cannot continue with this grammar: {first_line(self._matcher.get_error())}"
            )


def first_line(error: str) -> str:
    """Return the first line of a matcher's error, without the state printed below it."""
    line = error.strip().partition("\n")[0]
    return line[:300]

"""What may come next, read off what came before: the longest earlier match of the last tokens.

Outputs that copy (a tool's arguments out of a question, JSON out of a document, code out of code)
repeat runs of their own prompt. No model drafts here, so a draft costs microseconds.
"""

from collections.abc import Sequence as Ordered
from typing import Final

import numpy as np
from numpy.typing import NDArray

MATCH_MIN: Final = 2
MATCH_MAX: Final = 8
REACH_TOKENS: Final = 16_384
"""How far back a match is looked for."""


class Lookup:
    """The tokens of one sequence, to be searched."""

    def __init__(self, predicted: Ordered[int] = ()) -> None:
        """Begin; `predicted` is text that the caller expects to be much of the output."""
        self._tokens: NDArray[np.int64] = np.array(predicted, dtype=np.int64)
        self._predicted = len(self._tokens)
        self._length = self._predicted

    def follow(self, tokens: Ordered[int]) -> None:
        """Take what is new in `tokens`, the sequence so far: prompt and output."""
        known = self._length - self._predicted
        fresh = np.array(tokens[known:], dtype=np.int64)
        length = self._length + len(fresh)
        if length > len(self._tokens):
            grown = np.empty(max(2 * length, 256), dtype=np.int64)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = fresh
        self._length = length

    def propose(self, count: int, after: Ordered[int] = ()) -> tuple[list[int], int]:
        """Return up to `count` tokens that may come after `after`, and how long the match is."""
        text = self._tokens[max(self._length - REACH_TOKENS, 0) : self._length]
        if after:
            text = np.concatenate((text, np.array(after, dtype=np.int64)))
        ends, matched = _longest(text)
        if count < 1 or matched < MATCH_MIN:
            return [], 0
        begin = int(ends[-1]) + 1
        period = len(text) - begin
        # Where the match reaches the end, what is being repeated goes on repeating.
        return [int(text[begin + index % period]) for index in range(count)], matched


def _longest(text: NDArray[np.int64]) -> tuple[NDArray[np.intp], int]:
    """Return where the longest earlier matches of the end of `text` end, and how long they are."""
    length = len(text)
    if length < MATCH_MIN + 1:
        return np.empty(0, dtype=np.intp), 0
    ends = np.flatnonzero(text[:-1] == text[-1])
    matched = 1 if len(ends) else 0
    while matched and matched < min(MATCH_MAX, length - 1):
        longer = ends[ends >= matched]
        longer = longer[text[longer - matched] == text[length - 1 - matched]]
        if not len(longer):
            break
        ends = longer
        matched += 1
    return ends, matched

"""Drafts by prompt lookup: the tokens after the longest earlier match of the latest tokens.

Outputs that copy (a tool's arguments from a question, JSON from a document, code from code) repeat
runs of their own prompt. No model is involved, so a draft costs microseconds.
"""

from collections.abc import Sequence as Ordered
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MATCH_MIN: Final = 2
MATCH_MAX: Final = 8
"""Tokens in a match: a longer match is not searched for."""
LOOKBACK_TOKENS: Final = 16_384
"""The most tokens back that a match is searched for."""


class NgramDraft(NamedTuple):
    """Drafted tokens, and the length of the match that they follow."""

    tokens: list[int]
    matched: int


class _Match(NamedTuple):
    ends: NDArray[np.intp]
    """The positions of the last tokens of all earlier matches."""
    length: int


class NgramProposer:
    """The searchable tokens of one sequence."""

    def __init__(self, predicted: Ordered[int] = ()) -> None:
        """Start with `predicted`, text that the client expects in the output."""
        self._tokens: NDArray[np.int64] = np.array(predicted, dtype=np.int64)
        self._predicted = len(self._tokens)
        self._length = self._predicted

    def follow(self, tokens: Ordered[int]) -> None:
        """Append the new part of `tokens`, which are the sequence's prompt and output so far."""
        known = self._length - self._predicted
        new = np.array(tokens[known:], dtype=np.int64)
        length = self._length + len(new)
        if length > len(self._tokens):
            grown = np.empty(max(2 * length, 256), dtype=np.int64)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : length] = new
        self._length = length

    def propose(self, count: int, after: Ordered[int] = ()) -> NgramDraft:
        """Draft up to `count` tokens to come after the sequence and `after`."""
        text = self._tokens[max(self._length - LOOKBACK_TOKENS, 0) : self._length]
        if after:
            text = np.concatenate((text, np.array(after, dtype=np.int64)))
        match = _longest_match(text)
        if count < 1 or match.length < MATCH_MIN:
            return NgramDraft([], 0)
        start = int(match.ends[-1]) + 1
        period = len(text) - start
        # A draft that reaches the end of the text continues with the repetition.
        return NgramDraft(
            [int(text[start + index % period]) for index in range(count)], match.length
        )


def _longest_match(text: NDArray[np.int64]) -> _Match:
    """Find the longest suffix of `text`, up to MATCH_MAX tokens, that also occurs earlier."""
    size = len(text)
    if size < MATCH_MIN + 1:
        return _Match(np.empty(0, dtype=np.intp), 0)
    ends = np.flatnonzero(text[:-1] == text[-1])
    length = 1 if len(ends) else 0
    while length and length < min(MATCH_MAX, size - 1):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[size - 1 - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    return _Match(ends, length)

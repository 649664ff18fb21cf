"""Streaming text from tokens: only whole characters, and no part of a stop string.

Rule 1: bytes that do not complete a character are held back; an output that ends inside a character
drops them.
Rule 2: text that may begin a stop string is held back until the next text decides. Text that comes
before `min_tokens` cannot end the output, so it is never part of a stop string.
"""

import codecs
from collections.abc import Mapping

from nodeagent.engine.tokenizer.partial_match import partial_match_chars
from nodeagent.engine.tokenizer.vocabulary import Vocabulary


class StreamDetokenizer:
    """Turns one sequence's tokens into text, token by token."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        visible_special: Mapping[int, str] | None = None,
        *,
        continues_text: bool = False,
    ) -> None:
        """Decode with `vocabulary`.

        `visible_special` are special tokens that appear in the text, with their spelling; all other
        special tokens produce no text. `continues_text` says that the output continues a text that
        the client already has, so the space before its first word is kept.
        """
        self._vocabulary = vocabulary
        self._visible_special = {
            token: text.encode() for token, text in (visible_special or {}).items()
        }
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # SentencePiece adds a space before the first word of a text; decoding removes it.
        self._strip_first = not vocabulary.byte_level and not continues_text

    def feed(self, token: int) -> str:
        """Return the text that `token` completes; empty while a character is incomplete."""
        raw = self._visible_special.get(token) or self._vocabulary.token_bytes(token)
        text = self._decoder.decode(raw)
        if self._strip_first and text:
            self._strip_first = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Finds stop strings in streamed text and holds back text that may begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held_back = ""
        self.matched = ""

    def feed(self, text: str, *, early: bool = False) -> str:
        """Return what may be emitted after `text`; set `matched` to the first complete stop string.

        `early` marks text from before `min_tokens`: it is emitted without a search.
        """
        if early or not self._stops:
            return text
        self._held_back += text
        starts = {stop: start for stop in self._stops if (start := self._held_back.find(stop)) >= 0}
        if starts:
            self.matched = min(starts, key=starts.__getitem__)
            emitted, self._held_back = self._held_back[: starts[self.matched]], ""
            return emitted
        keep = max(partial_match_chars(self._held_back, stop) for stop in self._stops)
        emitted = self._held_back[: len(self._held_back) - keep]
        self._held_back = self._held_back[len(self._held_back) - keep :]
        return emitted

    def flush(self) -> str:
        """Return the text held back, once the output has ended without completing a stop string."""
        held_back, self._held_back = self._held_back, ""
        return held_back

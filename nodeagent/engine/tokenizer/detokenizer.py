"""Text out of tokens as they come: whole characters only, and nothing of a stop string.

Rule 1: bytes that do not yet make a character wait; an output cut inside a character drops them.
Rule 2: text that may be the beginning of a stop string waits until it is known not to be; what
comes too early to end the output is no part of one.
"""

import codecs
from collections.abc import Mapping

from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.tools.call_scanner import beginning


class TokenText:
    """Decodes one sequence's tokens as they come."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        shown: Mapping[int, str] | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """Decode by `vocabulary`; `shown` are special tokens that count as text here.

        What `goes_on` does so from text before it, else it begins one.
        """
        self._vocabulary = vocabulary
        self._shown = {token: text.encode() for token, text in (shown or {}).items()}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # SentencePiece spells the space before the first word; decoding drops it.
        self._strip_first = not vocabulary.byte_level and not goes_on

    def feed(self, token: int) -> str:
        """Return the text that is complete with `token`."""
        spelled = self._shown.get(token) or self._vocabulary.token_bytes(token)
        text = self._decoder.decode(spelled)
        if self._strip_first and text:
            self._strip_first = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Holds back what may begin a stop string, and says when one is whole."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = False

    def feed(self, text: str, *, early: bool = False) -> str:
        """Return what may be emitted after `text`; sets `matched` where a stop string is whole."""
        if early or not self._stops:
            return text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            emitted, self._held = self._held[: min(found)], ""
            return emitted
        keep = max(beginning(self._held, stop) for stop in self._stops)
        emitted = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return emitted

    def flush(self) -> str:
        """Return what was held back: the output ended and it was no stop string after all."""
        held, self._held = self._held, ""
        return held

"""Ends a text at the first of its stop strings, which may lie across several tokens."""

from collections.abc import Sequence


class MockStopStrings:
    """The stop strings of one answer, and the text held back because one may have begun in it."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [text for text in strings if text]
        self._held = ""
        self.is_reached = False

    def add(self, text: str, *, is_last: bool) -> str:
        """Return what may be sent after `text` was generated, which is not a part of any stop.

        With the last token nothing is held back.
        """
        text = self._held + text
        self._held = ""
        found = [
            position
            for position in (text.find(string) for string in self._strings)
            if position >= 0
        ]
        if found:
            self.is_reached = True
            return text[: min(found)]
        unsent = (
            0 if is_last else max((_overlap(text, string) for string in self._strings), default=0)
        )
        self._held = text[len(text) - unsent :]
        return text[: len(text) - unsent]


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest end of `text` that a stop string begins with."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)

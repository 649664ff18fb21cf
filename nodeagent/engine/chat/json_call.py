"""Scanner for a call written as one JSON object: `{"name": ..., "arguments": {...}}`."""

import json
from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.chat.call_scanner import WHITESPACE, CallScanner, JsonNesting

_ARGUMENTS_KEYS: Final = ("arguments", "parameters")


@dataclass(slots=True)
class JsonCallScanner(CallScanner):
    """Follows one JSON object letter by letter and finds its name and its arguments."""

    _letters: list[str] = field(default_factory=list)
    _nesting: JsonNesting = field(default_factory=JsonNesting)
    _key: str | None = None
    """The top-level key whose value is being read."""
    _start: int = -1
    """The start in `_letters` of the current top-level key or value; -1 between them."""

    def scanned_text(self) -> str:
        """Return the object as far as it was read."""
        return "".join(self._letters)

    def feed(self, text: str) -> int:
        """Scan `text`; return how many of its characters belong to the object."""
        for used, letter in enumerate(text):
            if self.is_complete or self.is_not_a_call:
                return used
            self._take(letter)
        return len(text)

    def _take(self, letter: str) -> None:
        position = len(self._letters)
        self._letters.append(letter)
        nesting = self._nesting
        was_nested = nesting.depth > 1 or nesting.quoted
        nesting.feed(letter)
        is_nested = nesting.depth > 1 or nesting.quoted
        if not was_nested and self._start < 0 and letter not in WHITESPACE + ",:" and nesting.depth:
            # The object's own brace, at position 0, starts neither a key nor a value.
            self._start = position if position > 0 else -1
        if not is_nested and not was_nested and letter in ",:}":
            self._end_item(letter, position)
        elif self._key in _ARGUMENTS_KEYS and self._start >= 0 and (is_nested or was_nested):
            self._take_argument(letter)
        self.is_complete = nesting.depth <= 0
        if self.is_complete and not self.arguments_started:
            self.arguments_started = True
            self._new_arguments.append("{}")

    def _take_argument(self, letter: str) -> None:
        """Take a letter of the arguments if they are an object."""
        if self._letters[self._start] == "{":
            self._new_arguments.append(letter)
            self.arguments_started = True

    def _end_item(self, letter: str, position: int) -> None:
        """Store the top-level key or value that ends before `letter`."""
        text = "".join(self._letters[self._start : position]) if self._start >= 0 else ""
        self._start = -1
        if letter == ":" and self._key is None:
            self._key = _json_string(text)
            return
        key, self._key = self._key, None
        if key == "name":
            self.name = _json_string(text)
        elif key in _ARGUMENTS_KEYS and not self.arguments_started:
            # Some models write the arguments as a string that contains JSON.
            arguments = _json_string(text) or ""
            self.arguments_started = arguments.startswith("{")
            self._new_arguments.append(arguments)
            self.is_malformed = not self.arguments_started


def _json_string(text: str) -> str | None:
    """Return the string that `text` is in JSON; None if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None

"""Scanner for a call written as its name and its arguments: `NAME[ARGS]{...}` (Mistral)."""

import re
from dataclasses import dataclass, field
from typing import Final

from nodeagent.engine.chat.call_scanner import HEAD_CHARS_MAX, CallScanner, JsonNesting


def _prefix_pattern(mark: str) -> str:
    """Return a pattern that matches every prefix of `mark`, from empty to complete."""
    pattern = ""
    for letter in reversed(mark):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return pattern


_NAME: Final = r"([\w.:/-]+)"
_CALL_ID: Final = r"\[CALL_ID\]\w*"
_HEAD: Final = re.compile(rf"{_NAME}(?:{_CALL_ID})?(?:\[ARGS\])?\s*", re.ASCII)
"""Everything before the arguments: the name, an optional call id and the mark."""
_HEAD_PREFIX: Final = re.compile(
    rf"{_NAME}(?:{_prefix_pattern('[CALL_ID]')}"
    rf"|(?:{_CALL_ID})?{_prefix_pattern('[ARGS]')}\s*)",
    re.ASCII,
)


@dataclass(slots=True)
class NamedCallScanner(CallScanner):
    """Follows `NAME[ARGS]{...}`, with an optional `[CALL_ID]...` after the name."""

    _head: str = ""
    _nesting: JsonNesting = field(default_factory=JsonNesting)

    def scanned_text(self) -> str:
        """Return the text before the arguments."""
        return self._head

    def feed(self, text: str) -> int:
        """Scan `text`; return how many of its characters belong to the call."""
        start = 0 if self.arguments_started else self._read_head(text)
        if not self.can_announce:
            return start
        end = start
        while end < len(text) and not self.is_complete:
            self._nesting.feed(text[end])
            self.is_complete = self._nesting.depth == 0
            end += 1
        self._new_arguments.append(text[start:end])
        return end

    def _read_head(self, text: str) -> int:
        """Read up to the opening brace; return how many characters of `text` come before it."""
        for used, letter in enumerate(text):
            head = _HEAD.fullmatch(self._head) if letter == "{" else None
            if head is not None:
                self.name, self.arguments_started = head[1], True
                return used
            self._head += letter
            is_prefix = _HEAD_PREFIX.fullmatch(self._head) is not None
            self.is_malformed = not is_prefix or len(self._head) > HEAD_CHARS_MAX
            if self.is_malformed:
                return used + 1
        return len(text)

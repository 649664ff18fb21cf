"""Scanner for a call written as tags (Qwen3-Coder).

`<function=NAME><parameter=KEY>VALUE</parameter></function>`: a value is text between line breaks,
and the tool's schema says which JSON type it has.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from nodeagent.engine.chat.call_format import FUNCTION_TAG, PARAMETER_TAG
from nodeagent.engine.chat.call_scanner import HEAD_CHARS_MAX, WHITESPACE, CallScanner
from nodeagent.engine.chat.parameter_values import is_string_parameter, parameter_json
from nodeagent.engine.tokenizer.partial_match import partial_match_chars

_CALL_ENDS: Final = ("</function>", "</tool_call>")
_VALUE_ENDS: Final = ("</parameter>", PARAMETER_TAG, "</function>")
"""Marks that end a value. Models sometimes omit `</parameter>`, so the next tag ends it too."""


@dataclass(slots=True)
class TaggedCallScanner(CallScanner):
    """Follows one `<function=NAME>` and writes its parameters as a JSON object."""

    _scanned: str = ""
    """The text read before the call was announced."""
    _pending: str = ""
    """Text that is not interpreted yet."""
    _parameters: int = 0
    _key: str | None = None
    """The parameter whose value is being read."""
    _value: str | None = None
    """The value so far, if its JSON type depends on all of it; None for a string parameter."""
    _value_started: bool = False

    def scanned_text(self) -> str:
        """Return the text read before the call was announced."""
        return self._scanned

    def feed(self, text: str) -> int:
        """Scan `text`; return how many of its characters belong to the call."""
        self._pending += text
        while not self.is_complete and self._advance():
            pass
        # The mark that ends or breaks a call is completed by a letter of `text`, so whatever is
        # still pending is a suffix of `text`.
        is_over = self.is_complete or self.is_not_a_call
        used = len(text) - len(self._pending) if is_over else len(text)
        if not self.is_announced:
            self._scanned += text[:used]
        return used

    def _advance(self) -> bool:
        """Interpret one more part of the pending text; False if more text is needed."""
        if self.name is None:
            self.name = self._take_tag(FUNCTION_TAG)
            self.arguments_started = self.name is not None
            return self.can_announce
        return self._read_between() if self._key is None else self._read_value()

    def _take_tag(self, tag: str) -> str | None:
        """Remove the tag from the pending text and return its name; None if it is incomplete."""
        head, closed, _ = self._pending[:HEAD_CHARS_MAX].partition(">")
        if not closed and len(self._pending) < HEAD_CHARS_MAX:
            return None
        self._pending = self._pending[len(head + closed) :]
        return head.removeprefix(tag).strip(WHITESPACE)

    def _read_between(self) -> bool:
        """Find the next parameter or the end of the call; skip everything else."""
        pending = self._pending = "".join(self._pending.partition("<")[1:])
        if pending.startswith(PARAMETER_TAG):
            self._key = self._take_tag(PARAMETER_TAG)
            if self._key is None:
                return False
            separator = ", " if self._parameters else "{"
            self._new_arguments.append(f"{separator}{json.dumps(self._key)}: ")
            self._parameters += 1
            self._value_started, self._value = False, ""
            if is_string_parameter(self._schema, self._key):
                self._value = None
                self._new_arguments.append('"')
            return True
        for end in _CALL_ENDS:
            if pending.startswith(end):
                self._pending = pending.removeprefix(end)
                self._new_arguments.append("}" if self._parameters else "{}")
                self.is_complete = True
                return False
        if not pending or any(mark.startswith(pending) for mark in (PARAMETER_TAG, *_CALL_ENDS)):
            return False
        self._pending = pending[1:]
        return True

    def _read_value(self) -> bool:
        """Take the part of the pending text that certainly belongs to the value."""
        ends = [start for end in _VALUE_ENDS if (start := self._pending.find(end)) >= 0]
        held_back = max(partial_match_chars(self._pending, end) for end in _VALUE_ENDS)
        cut = min(ends, default=len(self._pending) - held_back)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        if not self._value_started and text:
            self._value_started, text = True, text.removeprefix("\n")
        if ends:
            text, self._pending = (
                text.removesuffix("\n"),
                self._pending.removeprefix(_VALUE_ENDS[0]),
            )
        elif text.endswith("\n"):
            # The line break may be the one before the closing tag.
            text, self._pending = text[:-1], f"\n{self._pending}"
        if self._value is not None:
            self._value += text
        else:
            self._new_arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
        if not ends:
            return False
        value, key = self._value, self._key or ""
        self._new_arguments.append(
            '"' if value is None else parameter_json(self._schema, key, value)
        )
        self._key = None
        return True

    @property
    def _schema(self) -> Mapping[str, Any]:
        return self.tools[self.name or ""]

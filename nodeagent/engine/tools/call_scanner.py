"""One call of a tool, followed letter by letter in whichever way it is written.

A scan knows when there is enough to tell a call by its name, gives its arguments as they come, and
keeps what it read for the case that it is no call.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nodeagent.engine.tools.call_format import FUNCTION, PARAMETER
from nodeagent.engine.tools.parameter_values import is_text, value_of

SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")
_HEAD_CHARS_MAX: Final = 256
"""What stands before a call's arguments, at most."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Tools' names, and the JSON schema of what each takes."""


@dataclass(slots=True)
class Scan(ABC):
    """What reads one call."""

    tools: Schemas
    prefix: str
    """What stood before it."""
    name: str | None = None
    begun: bool = False
    """Whether the arguments have: from then on it can be told."""
    odd: bool = False
    """Whether it goes on as no call does."""
    done: bool = False
    told: bool = False
    index: int = 0
    _arguments: list[str] = field(default_factory=list)
    """Arguments found and not yet taken."""

    @property
    def is_call(self) -> bool:
        """True where enough is known to tell a call."""
        return self.name in self.tools and self.begun and not self.odd

    @property
    def is_none(self) -> bool:
        """True where this cannot be a call any more."""
        return self.odd or (self.name is not None and self.name not in self.tools)

    def take(self) -> str:
        """Return the arguments found since the last time."""
        found, self._arguments = "".join(self._arguments), []
        return found

    @abstractmethod
    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the call."""

    @abstractmethod
    def text(self) -> str:
        """Return what was read as it came, until it is known to be a call."""


@dataclass(slots=True)
class _Nesting:
    """How deep in a JSON text its last letter lies."""

    depth: int = 0
    quoted: bool = False
    _escaped: bool = False

    def follow(self, letter: str) -> None:
        """Take the next letter."""
        if self._escaped:
            self._escaped = False
        elif self.quoted:
            self._escaped = letter == "\\"
            self.quoted = letter != '"'
        elif letter == '"':
            self.quoted = True
        elif letter in "{[":
            self.depth += 1
        elif letter in "}]":
            self.depth -= 1


@dataclass(slots=True)
class ObjectScan(Scan):
    """Follows one JSON object letter by letter; knows its name and where its arguments lie."""

    _letters: list[str] = field(default_factory=list)
    _nesting: _Nesting = field(default_factory=_Nesting)
    _key: str | None = None
    _begin: int = -1
    """Where the top level's key or value at hand begins in the letters."""

    def text(self) -> str:
        """Return the object as far as it is known."""
        return "".join(self._letters)

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the object."""
        for used, letter in enumerate(text):
            if self.done or self.is_none:
                return used
            self._follow(letter)
        return len(text)

    def _follow(self, letter: str) -> None:
        at = len(self._letters)
        self._letters.append(letter)
        nesting = self._nesting
        was_within = nesting.depth > 1 or nesting.quoted
        nesting.follow(letter)
        within = nesting.depth > 1 or nesting.quoted
        if not was_within and self._begin < 0 and letter not in SPACE + ",:" and nesting.depth:
            # The object's own brace begins nothing.
            self._begin = at if at > 0 else -1
        if not within and not was_within and letter in ",:}":
            self._end(letter, at)
        elif self._key in _ARGUMENTS and self._begin >= 0 and (within or was_within):
            self._argue(letter)
        self.done = nesting.depth <= 0
        if self.done and not self.begun:
            self.begun = True
            self._arguments.append("{}")

    def _argue(self, letter: str) -> None:
        """Take a letter of the arguments, where they are an object."""
        if self._letters[self._begin] == "{":
            self._arguments.append(letter)
            self.begun = True

    def _end(self, letter: str, at: int) -> None:
        """Note a key or a value of the top level that is whole."""
        text = "".join(self._letters[self._begin : at]) if self._begin >= 0 else ""
        self._begin = -1
        if letter == ":" and self._key is None:
            self._key = _string(text)
            return
        key, self._key = self._key, None
        if key == "name":
            self.name = _string(text)
        elif key in _ARGUMENTS and not self.begun:
            # Some models write the arguments as a string that holds JSON.
            held = _string(text) or ""
            self.begun = held.startswith("{")
            self._arguments.append(held)
            self.odd = not self.begun


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _begun(mark: str) -> str:
    """Return a pattern of whatever `mark` may begin with, nothing and all of it included."""
    pattern = ""
    for letter in reversed(mark):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return pattern


_NAME: Final = r"([\w.:/-]+)"
_CALL_ID: Final = r"\[CALL_ID\]\w*"
_NAMED: Final = re.compile(rf"{_NAME}(?:{_CALL_ID})?(?:\[ARGS\])?\s*", re.ASCII)
_NAMED_SO_FAR: Final = re.compile(
    rf"{_NAME}(?:{_begun('[CALL_ID]')}|(?:{_CALL_ID})?{_begun('[ARGS]')}\s*)", re.ASCII
)


@dataclass(slots=True)
class NamedScan(Scan):
    """Follows `name[ARGS]{...}`, as newer models of Mistral write; `[CALL_ID]...` may be there."""

    _head: str = ""
    _nesting: _Nesting = field(default_factory=_Nesting)

    def text(self) -> str:
        """Return what came before the arguments."""
        return self._head

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the call."""
        start = 0 if self.begun else self._read_head(text)
        if not self.is_call:
            return start
        end = start
        while end < len(text) and not self.done:
            self._nesting.follow(text[end])
            self.done = self._nesting.depth == 0
            end += 1
        self._arguments.append(text[start:end])
        return end

    def _read_head(self, text: str) -> int:
        """Read up to the arguments' brace; return how many letters of `text` come before it."""
        for used, letter in enumerate(text):
            found = _NAMED.fullmatch(self._head) if letter == "{" else None
            if found is not None:
                self.name, self.begun = found[1], True
                return used
            self._head += letter
            so_far = _NAMED_SO_FAR.fullmatch(self._head)
            self.odd = so_far is None or len(self._head) > _HEAD_CHARS_MAX
            if self.odd:
                return used + 1
        return len(text)


_ENDS: Final = ("</function>", "</tool_call>")
_VALUE_ENDS: Final = ("</parameter>", PARAMETER, "</function>")
"""Models forget to close a parameter now and then: what follows it ends it too."""


@dataclass(slots=True)
class TagScan(Scan):
    """Follows `<function=name><parameter=key>value</parameter></function>`, as Qwen3-Coder writes.

    A value is text, set off by line breaks; the tool's schema says what it is as JSON.
    """

    _read: str = ""
    _left: str = ""
    """What is still to be understood."""
    _parameters: int = 0
    _key: str | None = None
    """The parameter whose value is being read."""
    _value: str | None = None
    """The value so far, where all of it is needed to say what it is."""
    _value_begun: bool = False
    """Whether a letter of the value was read."""

    def text(self) -> str:
        """Return what was read before the name was."""
        return self._read

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the call."""
        self._left += text
        while not self.done and self._move():
            pass
        # What ends a call, or shows that it is none, is whole only with a letter of this text.
        used = len(text) - len(self._left) if self.done or self.is_none else len(text)
        if not self.told:
            self._read += text[:used]
        return used

    def _move(self) -> bool:
        """Take one stride; False where more text is needed."""
        if self.name is None:
            self.name = self._opened(FUNCTION)
            self.begun = self.name is not None
            return self.is_call
        return self._between() if self._key is None else self._in_value()

    def _opened(self, mark: str) -> str | None:
        """Take the tag that begins with `mark` off what is left, once whole; return its name."""
        head, closed, _ = self._left[:_HEAD_CHARS_MAX].partition(">")
        if not closed and len(self._left) < _HEAD_CHARS_MAX:
            return None
        self._left = self._left[len(head + closed) :]
        return head.removeprefix(mark).strip(SPACE)

    def _between(self) -> bool:
        """Find the next parameter or the end, and pass over what is neither."""
        left = self._left = "".join(self._left.partition("<")[1:])
        if left.startswith(PARAMETER):
            self._key = self._opened(PARAMETER)
            if self._key is None:
                return False
            self._arguments.append(f"{', ' if self._parameters else '{'}{json.dumps(self._key)}: ")
            self._parameters += 1
            self._value_begun, self._value = False, ""
            if is_text(self._schema, self._key):
                self._value = None
                self._arguments.append('"')
            return True
        for end in _ENDS:
            if left.startswith(end):
                self._left = left.removeprefix(end)
                self._arguments.append("}" if self._parameters else "{}")
                self.done = True
                return False
        if not left or any(mark.startswith(left) for mark in (PARAMETER, *_ENDS)):
            return False
        self._left = left[1:]
        return True

    def _in_value(self) -> bool:
        """Take of the value what is known to be of it."""
        found = [at for end in _VALUE_ENDS if (at := self._left.find(end)) >= 0]
        kept = len(self._left) - max(beginning(self._left, end) for end in _VALUE_ENDS)
        end = min(found, default=kept)
        text, self._left = self._left[:end], self._left[end:]
        if not self._value_begun and text:
            self._value_begun, text = True, text.removeprefix("\n")
        if found:
            text, self._left = text.removesuffix("\n"), self._left.removeprefix(_VALUE_ENDS[0])
        elif text.endswith("\n"):
            # The last one sets the end off.
            text, self._left = text[:-1], f"\n{self._left}"
        if self._value is not None:
            self._value += text
        else:
            self._arguments.append(json.dumps(text, ensure_ascii=False)[1:-1])
        if not found:
            return False
        value, key = self._value, self._key or ""
        self._arguments.append('"' if value is None else value_of(self._schema, key, value))
        self._key = None
        return True

    @property
    def _schema(self) -> Mapping[str, Any]:
        return self.tools[self.name or ""]


def beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

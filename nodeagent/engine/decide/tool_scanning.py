"""One call of a tool, followed letter by letter in whichever way it is written.

A scan knows when there is enough to tell a call by its name, gives its arguments as they come, and
keeps what it read for the case that it is no call.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from nodeagent.engine.decide.tool_format import FUNCTION, PARAMETER
from nodeagent.engine.decide.tool_values import is_text, value_of

SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")
_HEAD_CHARS_MAX: Final = 256
"""What stands before a call's arguments, at most."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Tools' names, and the JSON schema of what each takes."""


class Scan(Protocol):
    """What reads one call."""

    prefix: str
    """What stood before it, for the case that it is no call."""
    name: str | None
    done: bool
    told: bool
    index: int

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the call."""
        ...

    def is_call(self, tools: Schemas) -> bool:
        """Say whether enough is known to tell a call."""
        ...

    def is_none(self, tools: Schemas) -> bool:
        """Say whether this cannot be a call any more."""
        ...

    def take(self) -> str:
        """Return the arguments found since the last time."""
        ...

    def text(self) -> str:
        """Return all that was read, as it came."""
        ...


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
class ObjectScan:
    """Follows one JSON object letter by letter; knows its name and where its arguments lie."""

    prefix: str
    """What stood before the object, for the case that it is no call."""
    name: str | None = None
    done: bool = False
    told: bool = False
    index: int = 0
    _letters: list[str] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)
    """Arguments found and not yet taken."""
    _had_arguments: bool = False
    _odd: bool = False
    """True where the arguments are no object."""
    _nesting: _Nesting = field(default_factory=_Nesting)
    _key: str | None = None
    _begin: int = -1
    """Where the top level's key or value at hand begins in the letters."""

    def text(self) -> str:
        """Return the object as far as it is known."""
        return "".join(self._letters)

    def is_call(self, tools: Schemas) -> bool:
        """Say whether enough is known to tell a call."""
        return self.name in tools and not self._odd and (self._had_arguments or self.done)

    def is_none(self, tools: Schemas) -> bool:
        """Say whether this cannot be a call any more."""
        return self._odd or (self.name is not None and self.name not in tools)

    def take(self) -> str:
        """Return the arguments found since the last time."""
        if self.done and not self._had_arguments:
            self._had_arguments = True
            return "{}"
        found, self._arguments = "".join(self._arguments), []
        return found

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the object."""
        for used, letter in enumerate(text):
            if self.done:
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

    def _argue(self, letter: str) -> None:
        """Take a letter of the arguments, where they are an object."""
        if self._letters[self._begin] == "{":
            self._arguments.append(letter)
            self._had_arguments = True

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
        elif key in _ARGUMENTS and not self._had_arguments:
            # Some models write the arguments as a string that holds JSON.
            held = _string(text) or ""
            self._had_arguments = held.startswith("{")
            self._arguments.append(held)
            self._odd = not self._had_arguments


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


_NAMED: Final = re.compile(r"([\w.:/-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*", re.ASCII)
_NAMED_SO_FAR: Final = re.compile(r"[\w.:/-]+(?:\[[\w\[\]]*)?\s*", re.ASCII)


@dataclass(slots=True)
class NamedScan:
    """Follows `name[ARGS]{...}`, as newer models of Mistral write; `[CALL_ID]...` may be there."""

    prefix: str
    name: str | None = None
    done: bool = False
    told: bool = False
    index: int = 0
    _head: str = ""
    _arguments: str = ""
    _taken: int = 0
    _nesting: _Nesting = field(default_factory=_Nesting)
    _odd: bool = False

    def text(self) -> str:
        """Return all that was read, as it came."""
        return self._head + self._arguments

    def is_call(self, tools: Schemas) -> bool:
        """Say whether its arguments have begun, and of which tool."""
        return self.name in tools

    def is_none(self, tools: Schemas) -> bool:
        """Say whether this cannot be a call any more."""
        return self._odd or (self.name is not None and self.name not in tools)

    def take(self) -> str:
        """Return the arguments found since the last time."""
        found, self._taken = self._arguments[self._taken :], len(self._arguments)
        return found

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the call."""
        used = 0
        if self.name is None:
            head, brace, _ = text.partition("{")
            self._head += head
            named = _NAMED.fullmatch(self._head) if brace else None
            so_far = _NAMED_SO_FAR.fullmatch(self._head)
            self._odd = len(self._head) > _HEAD_CHARS_MAX or not (named if brace else so_far)
            if named is None:
                return len(head)
            self.name, used = named[1], len(head)
        for letter in text[used:]:
            self._nesting.follow(letter)
            used += 1
            self._arguments += letter
            if self._nesting.depth == 0:
                self.done = True
                break
        return used


_ENDS: Final = ("</function>", "</tool_call>")
_VALUE_ENDS: Final = ("</parameter>", PARAMETER, "</function>")
"""Models forget to close a parameter now and then: what follows it ends it too."""


@dataclass(slots=True)
class TagScan:
    """Follows `<function=name><parameter=key>value</parameter></function>`, as Qwen3-Coder writes.

    A value is text, set off by line breaks; the tool's schema says what it is as JSON.
    """

    prefix: str
    tools: Schemas
    name: str | None = None
    done: bool = False
    told: bool = False
    index: int = 0
    _read: str = ""
    _left: str = ""
    """What is still to be understood."""
    _arguments: str = ""
    """Arguments found and not yet taken."""
    _parameters: int = 0
    _key: str | None = None
    """The parameter whose value is being read."""
    _value: str | None = None
    """The value so far, where all of it is needed to say what it is."""
    _begun: bool = False
    """Whether a letter of the value was read."""

    def text(self) -> str:
        """Return all that was read, as it came."""
        return self._read

    def is_call(self, tools: Schemas) -> bool:
        """Say whether its name is known, and a tool's."""
        return self.name in tools

    def is_none(self, tools: Schemas) -> bool:
        """Say whether this cannot be a call any more."""
        if self.name is None:
            return len(self._left) > _HEAD_CHARS_MAX
        return self.name not in tools

    def take(self) -> str:
        """Return the arguments found since the last time."""
        found, self._arguments = self._arguments, ""
        return found

    def feed(self, text: str) -> int:
        """Follow `text`; return how many letters belong to the call."""
        self._left += text
        while not self.done and self._move():
            pass
        # What ends a call is whole only with a letter of this text.
        used = len(text) - len(self._left) if self.done else len(text)
        self._read += text[:used]
        return used

    def _move(self) -> bool:
        """Take one stride; False where more text is needed."""
        if self.name is None:
            self.name = self._opened(FUNCTION)
            return self.name in self.tools
        return self._between() if self._key is None else self._in_value()

    def _opened(self, mark: str) -> str | None:
        """Take the tag that begins with `mark` off what is left, once whole; return its name."""
        name, closed, rest = self._left.removeprefix(mark).partition(">")
        if not closed:
            return None
        self._left = rest
        return name.strip(SPACE)

    def _between(self) -> bool:
        """Find the next parameter or the end, and pass over what is neither."""
        left = self._left = "".join(self._left.partition("<")[1:])
        if left.startswith(PARAMETER):
            self._key = self._opened(PARAMETER)
            if self._key is None:
                return False
            self._arguments += f"{', ' if self._parameters else '{'}{json.dumps(self._key)}: "
            self._parameters += 1
            self._begun, self._value = False, ""
            if is_text(self.tools[self.name or ""], self._key):
                self._arguments, self._value = f'{self._arguments}"', None
            return True
        for end in _ENDS:
            if left.startswith(end):
                self._left = left.removeprefix(end)
                self._arguments += "}" if self._parameters else "{}"
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
        if not self._begun and text:
            self._begun, text = True, text.removeprefix("\n")
        if found:
            text, self._left = text.removesuffix("\n"), self._left.removeprefix(_VALUE_ENDS[0])
        elif text.endswith("\n"):
            # The last one sets the end off.
            text, self._left = text[:-1], f"\n{self._left}"
        if self._value is not None:
            self._value += text
        else:
            self._arguments += json.dumps(text, ensure_ascii=False)[1:-1]
        if not found:
            return False
        schema = self.tools[self.name or ""]
        whole = '"' if self._value is None else value_of(schema, self._key or "", self._value)
        self._arguments += whole
        self._key = None
        return True


def beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0

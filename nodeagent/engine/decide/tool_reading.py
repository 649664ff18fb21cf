"""Calls of tools read out of text as it comes: what is content, what is a call, piece by piece.

Rule 1: text that may be the beginning of a call waits until it is known what it is.
Rule 2: a call is told once its name is known to be a tool's; from then on its arguments are told
as they come, and nothing is taken back. What turns out to be no call is told as content, whole.
"""

import json
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from nodeagent.engine.decide.tool_format import ToolFormat

_ARGUMENTS: Final = ("arguments", "parameters")
_SPACE: Final = " \t\r\n"
_SEPARATORS: Final = _SPACE + ",;[]"


@dataclass(frozen=True, slots=True)
class Said:
    """Content: text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegan:
    """A call of the tool `name`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Said | CallBegan | CallPiece


class _Where(Enum):
    START = auto()
    TEXT = auto()
    SECTION = auto()
    OBJECT = auto()


@dataclass(slots=True)
class CallReader:
    """Reads one output in one format."""

    how: ToolFormat
    names: frozenset[str]
    single: bool = False
    """Whether nothing is told after the first call."""
    calls: int = 0
    _where: _Where = _Where.START
    _held: str = ""
    """What waits: not yet known to be content, or already part of a call."""
    _object: "_ObjectScan | None" = None
    _calls_before: int = 0
    """Calls before the section at hand."""

    def feed(self, text: str) -> list[Event]:
        """Return what is known after `text`."""
        self._held += text
        events: list[Event] = []
        moving = True
        while moving:
            moving = self._move(events)
        return _joined(events)

    def flush(self) -> list[Event]:
        """Return what was held back: the output has ended."""
        held, self._held = self._held, ""
        scan, self._object = self._object, None
        if scan is not None:
            return [] if scan.told else [Said(scan.prefix + scan.text())]
        # White space and half a closing mark behind a call are no content.
        over = self.calls and (self._where is _Where.SECTION or not held.strip(_SPACE))
        return [Said(held)] if held and not over else []

    def _move(self, events: list[Event]) -> bool:
        """Take one stride; False where more text is needed."""
        if self.single and self.calls and self._object is None:
            self._held = ""
            return False
        match self._where:
            case _Where.START:
                return self._start()
            case _Where.TEXT:
                return self._text(events)
            case _Where.SECTION:
                return self._section(events)
            case _Where.OBJECT:
                return self._read_object(events)

    def _start(self) -> bool:
        """Decide whether an output without an opening is a call from its first letter on."""
        if self.how.opening:
            self._where = _Where.TEXT
            return True
        begun = self._held.lstrip(_SPACE)
        mark = self.how.optional_opening
        if not begun or (mark.startswith(begun) and begun != mark):
            return False
        calls = begun.startswith("{") or begun.startswith(mark)
        self._where = _Where.SECTION if calls else _Where.TEXT
        return True

    def _text(self, events: list[Event]) -> bool:
        opening = self.how.opening
        at = self._held.find(opening) if opening else -1
        if at >= 0:
            # White space before a call sets it off; it is no content unless the call is none.
            known = self._held[:at].rstrip(_SPACE)
            if known:
                events.append(Said(known))
            self._held = self._held[len(known) :]
            self._where = _Where.SECTION
            self._calls_before = self.calls
            return True
        keep = beginning(self._held, opening) if opening else 0
        if self.calls and not self._held.strip(_SPACE):
            return False
        # Spaces wait too: a call may follow them.
        known = self._held[: len(self._held) - keep]
        known = known.rstrip(_SPACE) if opening else known
        if known:
            events.append(Said(known))
            self._held = self._held[len(known) :]
        return False

    def _section(self, events: list[Event]) -> bool:
        """Find the next object after an opening or after another object."""
        mark = self.how.opening or self.how.optional_opening
        rest = self._held.lstrip(_SPACE).removeprefix(mark).lstrip(_SEPARATORS)
        closing = self.how.closing
        if rest.startswith("{"):
            self._object = _ObjectScan(self._held[: len(self._held) - len(rest)])
            self._held = rest
            self._where = _Where.OBJECT
            return True
        if closing and rest.startswith(closing) and self.calls > self._calls_before:
            self._held = rest.removeprefix(closing)
            self._where = _Where.TEXT
            return True
        if not rest or (closing and closing.startswith(rest)) or mark.startswith(rest):
            return False
        return self._give_up(events, "")

    def _read_object(self, events: list[Event]) -> bool:
        scan = self._object
        assert scan is not None
        text, self._held = self._held, ""
        rest = text[scan.feed(text) :]
        if not scan.told and scan.is_call(self.names):
            scan.told = True
            scan.index = self.calls
            self.calls += 1
            events.append(CallBegan(scan.index, scan.name or ""))
        if scan.told:
            piece = scan.take()
            if piece:
                events.append(CallPiece(scan.index, piece))
        elif scan.done or scan.is_none(self.names):
            return self._give_up(events, scan.prefix + scan.text() + rest)
        if not scan.done:
            return False
        self._object = None
        self._held = rest
        self._where = _Where.SECTION
        return True

    def _give_up(self, events: list[Event], text: str) -> bool:
        """It is no call: tell it as content, and do not look for calls in it again."""
        text = text or self._held
        if text:
            events.append(Said(text))
        self._object = None
        self._held = ""
        self._where = _Where.TEXT
        return False


@dataclass(slots=True)
class _ObjectScan:
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
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False
    _key: str | None = None
    _begin: int = -1
    """Where the top level's key or value at hand begins in the letters."""

    def text(self) -> str:
        """Return the object as far as it is known."""
        return "".join(self._letters)

    def is_call(self, names: frozenset[str]) -> bool:
        """Say whether enough is known to tell a call."""
        return self.name in names and not self._odd and (self._had_arguments or self.done)

    def is_none(self, names: frozenset[str]) -> bool:
        """Say whether this cannot be a call any more."""
        return self._odd or (self.name is not None and self.name not in names)

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
        was_within = self._depth > 1 or self._quoted
        self._nest(letter)
        within = self._depth > 1 or self._quoted
        if not was_within and self._begin < 0 and letter not in _SPACE + ",:" and self._depth:
            # The object's own brace begins nothing.
            self._begin = at if at > 0 else -1
        if not within and not was_within and letter in ",:}":
            self._end(letter, at)
        elif self._key in _ARGUMENTS and self._begin >= 0 and (within or was_within):
            self._argue(letter)
        self.done = self._depth <= 0

    def _nest(self, letter: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = letter == "\\"
            self._quoted = letter != '"'
        elif letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1

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


def beginning(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _joined(events: list[Event]) -> list[Event]:
    """Join neighbouring pieces of content."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + event.text)
        else:
            joined.append(event)
    return joined

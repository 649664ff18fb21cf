"""Calls of tools read out of text as it comes: what is content, what is a call, piece by piece.

Rule 1: text that may be the beginning of a call waits until it is known what it is.
Rule 2: a call is told once its name is known to be a tool's; from then on its arguments are told
as they come, and nothing is taken back. What turns out to be no call is told as content, whole.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from nodeagent.engine.tools.call_format import FUNCTION, NAME, ToolFormat
from nodeagent.engine.tools.call_scanner import (
    SPACE,
    NamedScan,
    ObjectScan,
    Scan,
    Schemas,
    TagScan,
    beginning,
)

_SEPARATORS: Final = SPACE + ",;[]"


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
    CALL = auto()


@dataclass(slots=True)
class CallReader:
    """Reads one output in one format."""

    how: ToolFormat
    tools: Schemas
    single: bool = False
    """Whether nothing is told after the first call."""
    calls: int = 0
    _where: _Where = _Where.START
    _held: str = ""
    """What waits: not yet known to be content, or already part of a call."""
    _call: Scan | None = None
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
        scan, self._call = self._call, None
        if scan is not None:
            return [] if scan.told else [Said(scan.prefix + scan.text())]
        # White space and half a closing mark behind a call are no content.
        over = self.calls and (self._where is _Where.SECTION or not held.strip(SPACE))
        return [Said(held)] if held and not over else []

    def _move(self, events: list[Event]) -> bool:
        """Take one stride; False where more text is needed."""
        if self.single and self.calls and self._call is None:
            self._held = ""
            return False
        match self._where:
            case _Where.START:
                return self._start()
            case _Where.TEXT:
                return self._text(events)
            case _Where.SECTION:
                return self._section(events)
            case _Where.CALL:
                return self._read_call(events)

    def _start(self) -> bool:
        """Decide whether an output without an opening is a call from its first letter on."""
        if self.how.opening:
            self._where = _Where.TEXT
            return True
        begun = self._held.lstrip(SPACE)
        mark = self.how.optional_opening
        if not begun or (mark.startswith(begun) and begun != mark):
            return False
        calls = begun.startswith("{") or begun.startswith(mark)
        self._where = _Where.SECTION if calls else _Where.TEXT
        return True

    def _text(self, events: list[Event]) -> bool:
        openings = self.how.openings
        found = [at for opening in openings if (at := self._held.find(opening)) >= 0]
        if found:
            # White space before a call sets it off; it is no content unless the call is none.
            known = self._held[: min(found)].rstrip(SPACE)
            if known:
                events.append(Said(known))
            self._held = self._held[len(known) :]
            self._where = _Where.SECTION
            self._calls_before = self.calls
            return True
        keep = self._opening_begun(self._held)
        if self.calls and not self._held.strip(SPACE):
            return False
        # Spaces wait too: a call may follow them.
        known = self._held[: len(self._held) - keep]
        known = known.rstrip(SPACE) if openings or self.calls else known
        if known:
            events.append(Said(known))
            self._held = self._held[len(known) :]
        return False

    def _section(self, events: list[Event]) -> bool:
        """Find the next call after an opening or after another call."""
        mark = self.how.opening or self.how.optional_opening
        begun = self._held.lstrip(SPACE)
        if begun != mark and mark.startswith(begun):
            return False
        rest = begun.removeprefix(mark).lstrip(_SEPARATORS)
        closing = self.how.closing
        self._call = self._scan(self._held[: len(self._held) - len(rest)], rest)
        if self._call is not None:
            self._held = rest
            self._where = _Where.CALL
            return True
        if closing and rest.startswith(closing) and self.calls > self._calls_before:
            self._held = rest.removeprefix(closing)
            self._where = _Where.TEXT
            return True
        waited = (mark, closing, FUNCTION if self.how.tags else "")
        if any(one.startswith(rest) for one in waited):
            return False
        first = len(self._held) - len(rest) + 1
        return self._give_up(events, self._held[:first], rest[1:])

    def _scan(self, prefix: str, rest: str) -> Scan | None:
        """Return what reads the call that begins `rest`, if one does."""
        if rest.startswith("{"):
            return ObjectScan(self.tools, prefix)
        if self.how.tags and rest.startswith(FUNCTION):
            return TagScan(self.tools, prefix)
        if self.how.named and NAME.match(rest):
            return NamedScan(self.tools, prefix)
        return None

    def _read_call(self, events: list[Event]) -> bool:
        scan = self._call
        assert scan is not None
        text, self._held = self._held, ""
        rest = text[scan.feed(text) :]
        if not scan.told and scan.is_call:
            scan.told = True
            scan.index = self.calls
            self.calls += 1
            events.append(CallBegan(scan.index, scan.name or ""))
        if scan.told:
            piece = scan.take()
            if piece:
                events.append(CallPiece(scan.index, piece))
        elif scan.done or scan.is_none:
            return self._give_up(events, scan.prefix + scan.text(), rest)
        if not scan.done:
            return False
        self._call = None
        self._held = rest
        self._where = _Where.SECTION
        return True

    def _give_up(self, events: list[Event], text: str, rest: str) -> bool:
        """It is no call as far as `text`: tell that as content, and look for calls behind it."""
        known = len(text) - self._opening_begun(text)
        if known:
            events.append(Said(text[:known]))
        self._call = None
        self._held = text[known:] + rest
        self._where = _Where.TEXT
        return True

    def _opening_begun(self, text: str) -> int:
        """Return how much of the end of `text` may be the beginning of an opening."""
        return max((beginning(text, opening) for opening in self.how.openings), default=0)


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

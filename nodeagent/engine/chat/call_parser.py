"""Streaming parser for tool calls: splits the text of an output into content and calls.

Rule 1: text that may begin a call is held back until the following text decides.
Rule 2: a call is announced once its name is known to be a tool's. From then on its arguments are
emitted as they arrive, and nothing is taken back. Text that turns out not to be a call is emitted
as content, unchanged.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from nodeagent.engine.chat.call_format import FUNCTION_TAG, TOOL_NAME, ToolCallFormat
from nodeagent.engine.chat.call_scanner import WHITESPACE, CallScanner, ToolSchemas
from nodeagent.engine.chat.json_call import JsonCallScanner
from nodeagent.engine.chat.named_call import NamedCallScanner
from nodeagent.engine.chat.tagged_call import TaggedCallScanner
from nodeagent.engine.tokenizer.partial_match import partial_match_chars

_SEPARATORS: Final = WHITESPACE + ",;[]"


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of the tool `name`; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


OutputEvent = ContentText | CallStarted | CallArguments


class _State(Enum):
    START = auto()
    """Nothing but white space was read."""
    TEXT = auto()
    """In content, looking for an opening."""
    SECTION = auto()
    """After an opening or a call, looking for the next call."""
    CALL = auto()
    """Inside a call."""


@dataclass(slots=True)
class ToolCallParser:
    """Parses one output in one tool call format."""

    call_format: ToolCallFormat
    tools: ToolSchemas
    only_one: bool = False
    """Whether everything after the first call is dropped."""
    must_call: bool = False
    """Whether the output is constrained to calls, so that none of its text is content."""
    calls: int = 0
    """Calls announced so far."""
    _state: _State = _State.START
    _held_back: str = ""
    """Text that may be content or part of a call."""
    _scanner: CallScanner | None = None
    _calls_before_section: int = 0

    def feed(self, text: str) -> list[OutputEvent]:
        """Return the events that `text` makes certain."""
        self._held_back += text
        events: list[OutputEvent] = []
        while self._advance(events):
            pass
        return _join_content(events)

    def flush(self) -> list[OutputEvent]:
        """Return the text held back, now that the output has ended."""
        held_back, self._held_back = self._held_back, ""
        scanner, self._scanner = self._scanner, None
        if self.must_call:
            return self._cut_call(scanner, is_begun=bool(scanner or held_back.strip(WHITESPACE)))
        if scanner is not None:
            if scanner.is_announced:
                return []
            return [ContentText(scanner.prefix + scanner.scanned_text())]
        # White space and a partial closing mark after a call are not content.
        is_trailing = self.calls and (
            self._state is _State.SECTION or not held_back.strip(WHITESPACE)
        )
        return [ContentText(held_back)] if held_back and not is_trailing else []

    def _cut_call(self, scanner: CallScanner | None, *, is_begun: bool) -> list[OutputEvent]:
        """Announce the only call of an output that ended before its arguments.

        A later call, or one whose tool is not known, is dropped: a call needs a name.
        """
        name = scanner.name if scanner is not None else None
        if len(self.tools) == 1:
            name = next(iter(self.tools))
        if self.calls or not is_begun or name is None or name not in self.tools:
            return []
        self.calls = 1
        return [CallStarted(0, name)]

    def _advance(self, events: list[OutputEvent]) -> bool:
        """Take one step; return False if more text is needed."""
        if self.only_one and self.calls and self._scanner is None:
            self._held_back = ""
            return False
        match self._state:
            case _State.START:
                return self._read_start()
            case _State.TEXT:
                return self._read_text(events)
            case _State.SECTION:
                return self._read_section(events)
            case _State.CALL:
                return self._read_call(events)

    def _read_start(self) -> bool:
        """Decide by its first letter whether an output is a call, in a format without opening."""
        if self.call_format.opening:
            self._state = _State.TEXT
            return True
        stripped = self._held_back.lstrip(WHITESPACE)
        mark = self.call_format.optional_opening
        if not stripped or (mark.startswith(stripped) and stripped != mark):
            return False
        is_call = stripped.startswith("{") or stripped.startswith(mark)
        self._state = _State.SECTION if is_call else _State.TEXT
        return True

    def _read_text(self, events: list[OutputEvent]) -> bool:
        """Emit content up to the next opening."""
        openings = self.call_format.openings
        starts = [start for opening in openings if (start := self._held_back.find(opening)) >= 0]
        if starts:
            # White space before a call is content only if the call turns out not to be one.
            content = self._held_back[: min(starts)].rstrip(WHITESPACE)
            if content:
                events.append(ContentText(content))
            self._held_back = self._held_back[len(content) :]
            self._state = _State.SECTION
            self._calls_before_section = self.calls
            return True
        keep = self._partial_opening_chars(self._held_back)
        if self.calls and not self._held_back.strip(WHITESPACE):
            return False
        # White space is held back too: a call may follow it.
        content = self._held_back[: len(self._held_back) - keep]
        content = content.rstrip(WHITESPACE) if openings or self.calls else content
        if content:
            events.append(ContentText(content))
            self._held_back = self._held_back[len(content) :]
        return False

    def _read_section(self, events: list[OutputEvent]) -> bool:
        """Find the next call after an opening or after another call."""
        mark = self.call_format.opening or self.call_format.optional_opening
        stripped = self._held_back.lstrip(WHITESPACE)
        if stripped != mark and mark.startswith(stripped):
            return False
        rest = stripped.removeprefix(mark).lstrip(_SEPARATORS)
        closing = self.call_format.closing
        self._scanner = self._scanner_for(self._held_back[: len(self._held_back) - len(rest)], rest)
        if self._scanner is not None:
            self._held_back = rest
            self._state = _State.CALL
            return True
        if closing and rest.startswith(closing) and self.calls > self._calls_before_section:
            self._held_back = rest.removeprefix(closing)
            self._state = _State.TEXT
            return True
        possible = (mark, closing, FUNCTION_TAG if self.call_format.has_tagged_calls else "")
        if any(text.startswith(rest) for text in possible):
            return False
        first = len(self._held_back) - len(rest) + 1
        return self._emit_as_content(events, self._held_back[:first], rest[1:])

    def _scanner_for(self, prefix: str, rest: str) -> CallScanner | None:
        """Return a scanner for the call at the start of `rest`; None if there is no call."""
        if rest.startswith("{"):
            return JsonCallScanner(self.tools, prefix)
        if self.call_format.has_tagged_calls and rest.startswith(FUNCTION_TAG):
            return TaggedCallScanner(self.tools, prefix)
        if self.call_format.has_named_calls and TOOL_NAME.match(rest):
            return NamedCallScanner(self.tools, prefix)
        return None

    def _read_call(self, events: list[OutputEvent]) -> bool:
        """Feed the call's scanner; announce the call, or give its text back as content."""
        scanner = self._scanner
        assert scanner is not None
        text, self._held_back = self._held_back, ""
        rest = text[scanner.feed(text) :]
        if not scanner.is_announced and scanner.can_announce:
            scanner.is_announced = True
            scanner.index = self.calls
            self.calls += 1
            events.append(CallStarted(scanner.index, scanner.name or ""))
        if scanner.is_announced:
            arguments = scanner.take_arguments()
            if arguments:
                events.append(CallArguments(scanner.index, arguments))
        elif scanner.is_complete or scanner.is_not_a_call:
            return self._emit_as_content(events, scanner.prefix + scanner.scanned_text(), rest)
        if not scanner.is_complete:
            return False
        self._scanner = None
        self._held_back = rest
        self._state = _State.SECTION
        return True

    def _emit_as_content(self, events: list[OutputEvent], text: str, rest: str) -> bool:
        """Emit `text`, which is not a call, as content, and look for calls in `rest`."""
        certain = len(text) - self._partial_opening_chars(text)
        if certain:
            events.append(ContentText(text[:certain]))
        self._scanner = None
        self._held_back = text[certain:] + rest
        self._state = _State.TEXT
        return True

    def _partial_opening_chars(self, text: str) -> int:
        """Return how many characters at the end of `text` may begin an opening."""
        openings = self.call_format.openings
        return max((partial_match_chars(text, opening) for opening in openings), default=0)


def _join_content(events: list[OutputEvent]) -> list[OutputEvent]:
    """Join adjacent pieces of content."""
    joined: list[OutputEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ContentText) and isinstance(last, ContentText):
            joined[-1] = ContentText(last.text + event.text)
        else:
            joined.append(event)
    return joined

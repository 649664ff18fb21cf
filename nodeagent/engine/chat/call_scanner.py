"""The base of the scanners of tool call formats: a scanner follows one call, letter by letter.

A scanner knows when it has seen enough to announce a call by its name, hands out the arguments as
they arrive, and keeps the text it has read in case it turns out not to be a call.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

WHITESPACE: Final = " \t\r\n"
HEAD_CHARS_MAX: Final = 256
"""Characters before a call's arguments. Longer text is not a call."""

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's parameters, by tool name."""


@dataclass(slots=True)
class CallScanner(ABC):
    """Reads one call."""

    tools: ToolSchemas
    prefix: str
    """The text before the call, which becomes content if this is not a call."""
    name: str | None = None
    arguments_started: bool = False
    """Whether the arguments have started. Only then can the call be announced."""
    is_malformed: bool = False
    """Whether the text continues in a way that no call does."""
    is_complete: bool = False
    is_announced: bool = False
    index: int = 0
    """The number of the call in its output."""
    _new_arguments: list[str] = field(default_factory=list)
    """Pieces of the arguments that `take_arguments` has not returned yet."""

    @property
    def can_announce(self) -> bool:
        """True if enough is known to announce a call."""
        return self.name in self.tools and self.arguments_started and not self.is_malformed

    @property
    def is_not_a_call(self) -> bool:
        """True if the text cannot become a call any more."""
        return self.is_malformed or (self.name is not None and self.name not in self.tools)

    def take_arguments(self) -> str:
        """Return the argument text found since the last time."""
        found, self._new_arguments = "".join(self._new_arguments), []
        return found

    @abstractmethod
    def feed(self, text: str) -> int:
        """Scan `text`; return how many of its characters belong to the call."""

    @abstractmethod
    def scanned_text(self) -> str:
        """Return the text read so far, unchanged. Valid until the call is announced."""


@dataclass(slots=True)
class JsonNesting:
    """The nesting depth at the last letter of a JSON text."""

    depth: int = 0
    quoted: bool = False
    _escaped: bool = False

    def feed(self, letter: str) -> None:
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

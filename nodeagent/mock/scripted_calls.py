"""Reads from a conversation which tools to call, so that a client's loop of tool calls ends.

A line `call NAME {"argument": 1}` of a user's message is a call of a tool that the request offers.
The mock engine makes the calls of such lines together, and those after a line `then` once the ones
before it have results. When every call has its result, it answers with the results' text.
"""

import re
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import msgspec

RESULT_WORDS_MAX: Final = 200
PIECE_CHARACTERS: Final = 12
"""A call's arguments, and answers in JSON, are streamed in pieces of this length."""

_LINE: Final = re.compile(r"\s*call (\S+) (\{.*\})\s*")
_decode_arguments: Final = msgspec.json.Decoder(dict[str, Any]).decode


class MockCall(NamedTuple):
    """One call to make, and its place among those of the answer."""

    number: int
    name: str
    arguments: str


class MockPiece(NamedTuple):
    """The addition of one token: to the text, or to the arguments of a call."""

    text: str
    call: MockCall | None = None
    opens_call: bool = False


class MockTurn(NamedTuple):
    """One message as the reader needs it, with its calls counted."""

    role: str
    text: str
    calls: int


def scripted_reply(
    turns: Sequence[MockTurn], names: Collection[str], *, in_parallel: bool
) -> Sequence[MockPiece]:
    """Return the reply that the conversation's script asks for, or () without a script.

    `names` are those of the tools that may be called.
    """
    for start in reversed(range(len(turns))):
        if turns[start].role != "user":
            continue
        if script := _script(turns[start].text, names):
            return _next_reply(script, turns[start + 1 :], in_parallel=in_parallel)
    return ()


def _next_reply(
    script: Sequence[tuple[int, str, str]], later: Sequence[MockTurn], *, in_parallel: bool
) -> Sequence[MockPiece]:
    """Return the next step's calls that were not made yet, else the results."""
    made = sum(turn.calls for turn in later if turn.role == "assistant")
    left = script[made:]
    if not left:
        results = [turn.text for turn in later if turn.role == "tool"]
        words = ["done:", *" ".join(results).split()[:RESULT_WORDS_MAX]]
        return [MockPiece(word + " ") for word in words]
    together = [line for line in left if line[0] == left[0][0]] if in_parallel else left[:1]
    return [
        piece
        for number, (_, name, arguments) in enumerate(together)
        for piece in call_pieces(number, name, arguments)
    ]


def call_pieces(number: int, name: str, arguments: str) -> list[MockPiece]:
    """Return the pieces of one call: its opening, then its arguments."""
    call = MockCall(number, name, arguments)
    opening = MockPiece("", call, opens_call=True)
    return [opening, *(piece._replace(call=call) for piece in text_pieces(arguments))]


def text_pieces(text: str) -> list[MockPiece]:
    """Return the pieces of a text."""
    starts = range(0, len(text), PIECE_CHARACTERS)
    return [MockPiece(text[start : start + PIECE_CHARACTERS]) for start in starts]


def _script(text: str, names: Collection[str]) -> list[tuple[int, str, str]]:
    """Return step, name and arguments of each call that a message asks for."""
    lines = text.splitlines()
    parts = groupby(lines, lambda line: line.strip() == "then")
    steps = (list(group) for is_end, group in parts if not is_end)
    return [
        (step, name, arguments)
        for step, group in enumerate(steps)
        for name, arguments in map(_call_of, group)
        if name in names
    ]


def _call_of(line: str) -> tuple[str, str]:
    """Return the name and arguments of a line's call, or ("", "")."""
    found = _LINE.fullmatch(line)
    if found is None:
        return "", ""
    try:
        _decode_arguments(found[2])
    except (ValueError, RecursionError):
        return "", ""
    return found[1], found[2]

"""Schemas and grammars of clients that would end llama.cpp, or take all memory of its machine.

Where no token can follow, it samples one all the same. If that is one that ends an answer, the
process aborts. So each class of characters needs a member, and nothing may require a character that
no token has, or name a token, which may not exist. A repetition of at least 5 and at most 2 times
adds rules without end.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

CHARS_MAX: Final = 32_768
"""The limit on a grammar, or on all patterns of a schema. The check of as many takes 50 ms."""
LAST_CHARACTER: Final = 0x10FFFF
_CHARACTER: Final = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
_CLASS: Final = r"(?P<class>\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z))"
"""An unfinished one is matched, too: else each bracket would be compared with all that follows."""
_REPEATED: Final = r"\{\s*(?P<least>\d{1,18})\s*,\s*(?P<most>\d{1,18})\s*\}"
_IMPOSSIBLE: Final = r"(?P<impossible>\\x00|\\u0000|\\U(?:0{8}|(?!0010|000)[0-9a-fA-F]{8}))"
"""NUL, or no character at all."""
_IN_PATTERN: Final = re.compile(rf"{_CLASS}|{_REPEATED}|{_IMPOSSIBLE}|\\.", re.DOTALL)
_TEXT: Final = rf'"(?:{_IMPOSSIBLE}|\\.|[^"\\])*+(?:"|\\?\Z)'
_IN_GRAMMAR: Final = re.compile(rf"{_TEXT}|{_CLASS}|{_REPEATED}|#[^\n]*|(?P<token><)", re.DOTALL)
_RANGE: Final = re.compile(f"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)
_CONTROLS: Final = {r"\t": "\t", r"\r": "\r", r"\n": "\n"}
_LIMITS: Final = (("minLength", "maxLength"), ("minItems", "maxItems"))


def grammar_problem(value: Any) -> str:
    """Return why llama.cpp cannot use a decoded schema, or a grammar's text; "" if it can."""
    if isinstance(value, str):
        return _texts_problem(_IN_GRAMMAR, [value])
    left, patterns = [value], []
    while left:
        found = left.pop()
        if isinstance(found, list):
            left.extend(found)
        if not isinstance(found, dict):
            continue
        left.extend(found.values())
        for names in _LIMITS:
            least, most = (found.get(name) for name in names)
            if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
                return f"a schema in it has a {names[0]} above its {names[1]}"
        if isinstance(found.get("pattern"), str):
            patterns.append(found["pattern"])
    return _texts_problem(_IN_PATTERN, patterns)


def _texts_problem(parts: re.Pattern[str], texts: Sequence[str]) -> str:
    if sum(map(len, texts)) > CHARS_MAX:
        return f"its patterns or rules have more than {CHARS_MAX} characters"
    return next(filter(None, (_text_problem(parts, text) for text in texts)), "")


def _text_problem(parts: re.Pattern[str], text: str) -> str:
    for part in parts.finditer(text):
        groups = part.groupdict()
        if groups["impossible"]:
            return f"no token has the character {groups['impossible']}"
        if groups.get("token"):
            return "it names a token"
        if groups["least"] and int(groups["least"]) > int(groups["most"]):
            return f"the limits of the repetition {part[0][:40]} are in the wrong order"
        if groups["class"] and not _has_member(part[0][1:-1]):
            return f"no character is in the class {part[0][:40]}"
    return ""


def _has_member(inside: str) -> bool:
    """Return whether a character other than NUL is in a class; `inside` is its text."""
    is_negated = inside.startswith("^")
    ranges = sorted(
        (_code(found[1]), _code(found[2] or found[1]))
        for found in _RANGE.finditer(inside, int(is_negated))
    )
    if not is_negated:
        return any(max(first, 1) <= min(last, LAST_CHARACTER) for first, last in ranges)
    free = 1
    for first, last in ranges:
        if first > free:
            break
        free = max(free, last + 1)
    return free <= LAST_CHARACTER


def _code(character: str) -> int:
    """Return the code point of a character, as a grammar writes it."""
    is_code = len(character) > len("\\x")
    return int(character[2:], 16) if is_code else ord(_CONTROLS.get(character, character[-1]))

"""Schemas and grammars of clients for which a compiler of grammars would call itself without end.

llama.cpp's calls itself for each reference that leads to another one, and for each parenthesis that
opens within another. A chain of 9,000 references, or 20,000 parentheses, overflows the stack, which
ends the process. It takes 1,000 of either.
"""

from typing import Any, Final

RECURSION_MAX: Final = 1000
_REFERENCE: Final = "$ref"
_PATTERN: Final = "pattern"


def recursion_of(value: Any) -> int:
    """Return how often a compiler may call itself for a decoded schema, or a grammar's text."""
    if isinstance(value, str):
        return value.count("(")
    references, parentheses = 0, 0
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, dict):
            left.extend(found.values())
            references += _REFERENCE in found
            pattern = found.get(_PATTERN)
            if isinstance(pattern, str):
                parentheses = max(parentheses, pattern.count("("))
        elif isinstance(found, list):
            left.extend(found)
    return max(references, parentheses)

"""What a parameter that a model wrote as plain text is as JSON, by the tool's schema.

Rule 1: what may be nothing but a string is that text, whatever it looks like.
Rule 2: what is of none of the types that the schema allows stays text: the tool says what is wrong.
The schema is a client's, and may be anything.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

_SPOKEN: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""Also as Python writes them: chat templates show models their own calls so."""
_TYPES: Final[dict[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def is_text(schema: Mapping[str, Any], name: str) -> bool:
    """Say whether the parameter `name` can only be a string; so is one that nobody described."""
    return _types_of(schema, name) <= {"string"}


def value_of(schema: Mapping[str, Any], name: str, text: str) -> str:
    """Return the JSON of the parameter `name` that was written as `text`."""
    word = text.strip()
    word = _SPOKEN.get(word.lower(), word)
    try:
        found = _TYPES[type(json.loads(word, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        found = "string"
    allowed = _types_of(schema, name)
    if found != "string" and (found in allowed or (found == "integer" and "number" in allowed)):
        return word
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _types_of(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the types that the parameter may be of; none where nobody said."""
    types: set[str] = set()
    left, seen = [_child(schema.get("properties"), name)], set()
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        said = one.get("type")
        types |= {kind for kind in (said, *_listed(said)) if isinstance(kind, str)}
        values = [*_listed(one.get("enum")), *([one["const"]] if "const" in one else [])]
        types |= {_TYPES[type(value)] for value in values}
        for key in ("anyOf", "oneOf", "allOf"):
            left += _listed(one.get(key))
        left.append(_referred(schema, one.get("$ref")))
    return types


def _referred(schema: Mapping[str, Any], reference: Any) -> Any:
    """Return what a `$ref` within the schema means; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = schema
    for step in reference[2:].split("/"):
        found = _child(found, step.replace("~1", "/").replace("~0", "~"))
    return found


def _child(within: Any, name: str) -> Any:
    return within.get(name) if isinstance(within, Mapping) else None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

"""JSON values of tool parameters that a model wrote as plain text, typed by the tool's schema.

Rule 1: a parameter that can only be a string keeps its text, whatever the text looks like.
Rule 2: a value of a type that the schema does not allow becomes a string; the tool reports it.
The schema comes from a client and may be anything.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

_LITERALS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
"""JSON literals by lower-case spelling. Chat templates may show them as Python writes them."""
_TYPES: Final[dict[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    dict: "object",
    list: "array",
    type(None): "null",
}


def is_string_parameter(schema: Mapping[str, Any], name: str) -> bool:
    """Return whether the parameter `name` can only be a string, or has no described type."""
    return _types_of(schema, name) <= {"string"}


def parameter_json(schema: Mapping[str, Any], name: str, text: str) -> str:
    """Return the JSON for the parameter `name` whose value was written as `text`."""
    word = text.strip()
    word = _LITERALS.get(word.lower(), word)
    try:
        found = _TYPES[type(json.loads(word, parse_constant=_refuse_constant))]
    except (ValueError, RecursionError):
        found = "string"
    allowed = _types_of(schema, name)
    if found != "string" and (found in allowed or (found == "integer" and "number" in allowed)):
        return word
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python's JSON reader accepts."""
    raise ValueError(f"cannot read {constant}: it is not JSON")


def _types_of(schema: Mapping[str, Any], name: str) -> set[str]:
    """Return the JSON types that the schema allows for a parameter; empty if it names none."""
    types: set[str] = set()
    pending, seen = [_member(schema.get("properties"), name)], set()
    while pending:
        node = pending.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        declared = node.get("type")
        types |= {kind for kind in (declared, *_as_list(declared)) if isinstance(kind, str)}
        values = [*_as_list(node.get("enum")), *([node["const"]] if "const" in node else [])]
        types |= {_TYPES[type(value)] for value in values}
        for key in ("anyOf", "oneOf", "allOf"):
            pending += _as_list(node.get(key))
        pending.append(_resolve(schema, node.get("$ref")))
    return types


def _resolve(schema: Mapping[str, Any], reference: Any) -> Any:
    """Return the target of a `$ref` within the schema; None for any other reference."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = schema
    for step in reference[2:].split("/"):
        found = _member(found, step.replace("~1", "/").replace("~0", "~"))
    return found


def _member(container: Any, name: str) -> Any:
    return container.get(name) if isinstance(container, Mapping) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

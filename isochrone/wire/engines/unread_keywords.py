"""Keywords of a client's `strict` JSON schema to which llama.cpp would not hold an answer.

Its converter (`common/json-schema-to-grammar.cpp`) passes over what it does not know, and the
client would get an answer that its schema forbids. OpenAI refuses such a schema, too.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_UNREAD: Final = frozenset((
    "additionalItems", "allOf", "contains", "dependencies", "dependentRequired", "dependentSchemas",
    "else", "if", "maxContains", "maxProperties", "minContains", "minProperties", "multipleOf",
    "not", "patternProperties", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems", "$dynamicRef", "$recursiveRef",
))  # fmt: skip
"""Of `allOf` the properties and values are read, and no other keyword."""

_READ_ALONE: Final = ("$ref", "oneOf", "anyOf")
"""What is beside one of these is not read."""

_ASSERTIONS: Final = frozenset((
    "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "items",
    "maximum", "maxItems", "maxLength", "minimum", "minItems", "minLength", "pattern",
    "prefixItems", "properties", "required", *_READ_ALONE,
))  # fmt: skip
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_CLASS: Final = r"\[(?:\\.|[^\]\\])*+\]"
_SPECIAL_GROUP: Final = re.compile(rf"(?:{_CLASS}|\\.|[^\\(]|\((?!\?(?!:)))*+\(\?", re.DOTALL)
"""Matches up to the first group that begins with `(?` and not with `(?:`."""

_OF_NAMES: Final = ("properties", "$defs", "definitions")
"""Keywords whose values are schemas by name."""

_OF_SCHEMAS: Final = ("items", "prefixItems", "oneOf", "anyOf", "additionalProperties")


def unread_keyword(schema: Any) -> str:
    """Return what in a decoded schema would not be read, quoted; "" if all of it is."""
    left = [schema]
    while left:
        found = left.pop()
        if found is False:
            return "a schema that is 'false'"
        if not isinstance(found, dict):
            continue
        if unread := _unread_here(found):
            return unread
        for name in _OF_NAMES:
            if isinstance(inner := found.get(name), dict):
                left.extend(inner.values())
        for name in _OF_SCHEMAS:
            inner = found.get(name)
            # Without further properties or items an object or a list is read as it is meant.
            left.extend(inner if isinstance(inner, list) else () if inner is False else (inner,))
    return ""


def _unread_here(schema: Mapping[str, Any]) -> str:
    if unread := _UNREAD & schema.keys():
        return f"'{min(unread)}'"
    for name in _READ_ALONE:
        if name in schema and (beside := _ASSERTIONS & schema.keys() - {name}):
            return f"'{min(beside)}' beside '{name}'"
    bounds = [name for name in _BOUNDS if name in schema]
    given = schema.get("type")
    types = given if isinstance(given, list) else [given]
    if bounds and not all(one in ("integer", "null") for one in types):
        return f"'{bounds[0]}' of numbers that are no integers"
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
        return "a 'minimum' above its 'maximum'"
    if isinstance(pattern := schema.get("pattern"), str):
        if length := {"minLength", "maxLength"} & schema.keys():
            return f"'{min(length)}' beside 'pattern'"
        if _SPECIAL_GROUP.match(pattern):
            return "a group '(?' of a 'pattern'"
    if not {"items", "prefixItems"} & schema.keys() and {"minItems", "maxItems"} & schema.keys():
        return "a number of items without 'items'"
    return ""

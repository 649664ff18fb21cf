"""Strict schemas that llama.cpp would read in part are refused."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.engines.schema_recursion import RECURSION_MAX
from isochrone.wire.errors import ApiError
from nodeagent.drivers.request_body import PLAIN, with_fields

LLAMA_CPP = msgspec.structs.replace(PLAIN, schema_recursion_max=RECURSION_MAX)
PERSON = {
    "$defs": {"age": {"type": ["integer", "null"], "minimum": 0, "maximum": 150}},
    "type": "object",
    "properties": {
        "not": {"type": "string", "pattern": r"^(?:[(?=]|\(\?)[a-z]+$"},
        "age": {"$ref": "#/$defs/age", "description": "in years"},
        "tags": {"type": "array", "items": {"enum": ["if", "then"]}, "minItems": 1},
        "size": {"anyOf": [{"type": "number"}, {"type": "null"}], "title": "Size"},
    },
    "required": ["not", "age", "tags", "size"],
    "additionalProperties": False,
}


def bodies_with(schema: Any, *, strict: bool) -> dict[str, dict[str, Any]]:
    """Return a body for each field in which a client may ask for strictness."""
    described = {"name": "person", "strict": strict, "schema": schema}
    function = {"name": "f", "strict": strict, "parameters": schema}
    return {
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": described},
        },
        "tools": {"tools": [{"type": "function", "function": function}]},
    }


@pytest.mark.parametrize(
    ("schema", "unread"),
    [
        ({"patternProperties": {"^a": {}}}, "'patternProperties'"),
        ({"items": {"properties": {"a": {"uniqueItems": True}}}}, "'uniqueItems'"),
        ({"anyOf": [{"allOf": [{"type": "string"}]}]}, "'allOf'"),
        ({"$ref": "#/$defs/a", "minLength": 2}, "'minLength' beside '$ref'"),
        ({"anyOf": [{}], "required": ["a"]}, "'required' beside 'anyOf'"),
        ({"type": "number", "maximum": 1}, "'maximum' of numbers that are no integers"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "a 'minimum' above its 'maximum'"),
        ({"type": "string", "pattern": "^(a|(?=b)c)$"}, "a group '(?' of a 'pattern'"),
        ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "'maxLength' beside 'pattern'"),
        ({"type": "array", "minItems": 2}, "a number of items without 'items'"),
        ({"properties": {"a": False}}, "a schema that is 'false'"),
    ],
)
def test_what_a_strict_schema_says_is_read_or_refused(schema: Any, unread: str) -> None:
    """llama.cpp answered 200 with what the schema forbids."""
    for field, body in bodies_with(schema, strict=True).items():
        with pytest.raises(ApiError) as refused:
            with_fields(msgspec.json.encode(body), {}, LLAMA_CPP)
        assert unread in refused.value.message
        assert refused.value.param == field
        with_fields(msgspec.json.encode(body), {}, PLAIN)
    for body in bodies_with(schema, strict=False).values():
        with_fields(msgspec.json.encode(body), {}, LLAMA_CPP)


def test_a_strict_schema_that_is_read_whole_is_sent_as_it_is() -> None:
    """Names of properties and values of enumerations are no keywords."""
    for body in bodies_with(PERSON, strict=True).values():
        data = msgspec.json.encode(body)
        assert with_fields(data, {}, LLAMA_CPP) == data

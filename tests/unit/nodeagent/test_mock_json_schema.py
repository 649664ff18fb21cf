"""The mock engine's schemas of tools: what it makes follows them, and what it cannot it says."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.mock.json_schema import JsonSchema, UnsupportedSchemaError

LIMITS = st.integers(-20, 20)
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"const": "a"}),
    st.just({"$ref": "#/$defs/shared"}),
    st.just({"type": ["string", "null"]}),
    st.builds(lambda low: {"type": "number", "minimum": low + 0.5}, LIMITS),
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + abs(span)},
              LIMITS, LIMITS),
    st.builds(lambda size: {"type": "string", "minLength": size}, st.integers(0, 5)),
    st.builds(lambda values: {"enum": values}, st.lists(LIMITS, min_size=1, max_size=3)),
)  # fmt: skip


def _object(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": parts,
        "required": sorted(parts),
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
        st.builds(
            lambda item, count: {"type": "array", "items": item, "minItems": count},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from("abc"), SCHEMAS, max_size=3))
def test_an_example_follows_its_schema(parts: dict[str, Any]) -> None:
    schema = {**_object(parts), "$defs": {"shared": {"type": "integer"}}}
    example = JsonSchema(schema).example()
    assert example.keys() == parts.keys()
    assert not JsonSchema(schema).misfit(example)
    assert "must not have `z`" in JsonSchema(schema).misfit({**example, "z": 1})
    for name in parts:
        lacking = {key: value for key, value in example.items() if key != name}
        assert f"must have `{name}`" in JsonSchema(schema).misfit(lacking)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ({"type": "integer"}, True, "must be of type integer"),
        ({"type": "integer"}, 1.5, "must be of type integer"),
        ({"type": ["string", "null"]}, 1, "must be of type string or null"),
        ({"const": 1}, True, "must be 1"),
        ({"enum": ["a"]}, "b", "must be one of"),
        ({"minimum": 2}, 1, "must be at least 2"),
        ({"maximum": 2}, 3, "must be at most 2"),
        ({"minLength": 2}, "a", "its length must be at least 2"),
        ({"items": {"type": "string"}}, ["a", 1], r"x\[1\] must be of type string"),
        ({"maxItems": 1}, [1, 2], "its length must be at most 1"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 1, "must follow one of 2 schemas"),
        ({"additionalProperties": {"type": "string"}}, {"a": 1}, r"x\.a must be of type string"),
    ],
    ids=str,
)
def test_a_value_that_breaks_a_schema_is_named(part: Any, value: Any, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        assert not JsonSchema({"properties": {"x": part}}).misfit({"x": value})


@pytest.mark.parametrize(
    "part",
    [
        {"pattern": "a+"},
        {"type": "decimal"},
        {"type": []},
        {"minItems": "2"},
        {"minItems": 10**9},
        {"$ref": "#/$defs/absent"},
        {"$ref": "#/properties/x"},
        {"enum": []},
        True,
        "string",
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused(part: Any) -> None:
    schema = JsonSchema({"properties": {"x": part}, "required": ["x"]})
    with pytest.raises(UnsupportedSchemaError):
        schema.example()


def test_a_schema_that_grows_without_end_is_refused() -> None:
    many = {"type": "array", "minItems": 1000, "items": {"$ref": "#/$defs/many"}}
    schema = {"properties": {"x": many}, "required": ["x"], "$defs": {"many": many}}
    with pytest.raises(UnsupportedSchemaError, match="too large"):
        JsonSchema(schema).example()

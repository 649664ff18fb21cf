"""Finds the values that a field may have, for the message of an error."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec import inspect

LISTED_MAX: Final = 24
"""The most values that a message names: a message is for people."""

_STEP: Final = re.compile(r"\[(\d+|\.\.\.)\]|([^.\[\]]+)")


def allowed_values(kind: Any, path: str, body: Any = None) -> str:
    """Return the values of a field in words, "" if any are allowed or the field is not found.

    `kind` is the type of the whole body, and `path` the field's place as a decoder reports it, such
    as `input[0].role`. Where `body` has the tag of one of several types, only that type counts.
    """
    kinds = [_type_info(kind)]
    for index, name in _STEP.findall(path):
        kinds = [below for above in kinds for below in _below(_tagged(above, body), index, name)]
        body = _part(body, index, name)
    values = dict.fromkeys(value for found in kinds for value in _values(found))
    named = ", ".join(_spelled(value) for value in list(values)[:LISTED_MAX])
    more = len(values) - LISTED_MAX
    return f"{named} and {more} more" if more > 0 else named


def _spelled(value: Any) -> str:
    """Return a value as JSON has it, but a text in the quotes of the other messages."""
    return repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()


@lru_cache(maxsize=256)
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _tagged(kind: inspect.Type, value: Any) -> inspect.Type:
    """Return the type of a union whose tag `value` has; `kind` if there is none."""
    if not isinstance(kind, inspect.UnionType) or not isinstance(value, dict):
        return kind
    structs = [option for option in kind.types if isinstance(option, inspect.StructType)]
    tagged = (
        struct for struct in structs if struct.tag and value.get(struct.tag_field) == struct.tag
    )
    return next(tagged, kind)


def _part(value: Any, index: str, name: str) -> Any:
    """Return what `value` has at an index or a name, None if nothing."""
    if isinstance(value, dict):
        return value.get(name)
    if isinstance(value, list) and index.isdigit():
        return value[int(index)] if int(index) < len(value) else None
    return None


def _below(kind: inspect.Type, index: str, name: str) -> Iterator[inspect.Type]:
    """Yield the types that a value of `kind` has at an index or a name."""
    if isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from _below(option, index, name)
    elif isinstance(kind, inspect.StructType) and name:
        if name == kind.tag_field:
            yield inspect.LiteralType((kind.tag,))
        yield from (field.type for field in kind.fields if field.encode_name == name)
    elif isinstance(kind, inspect.DictType):
        yield kind.value_type
    elif isinstance(kind, inspect.TupleType) and index.isdigit():
        yield from kind.item_types[int(index) : int(index) + 1]
    elif isinstance(kind, inspect.CollectionType) and index:
        yield kind.item_type


def _values(kind: inspect.Type) -> Iterator[Any]:
    if isinstance(kind, inspect.UnionType):
        for option in kind.types:
            yield from _values(option)
    elif isinstance(kind, inspect.LiteralType):
        yield from kind.values
    elif isinstance(kind, inspect.EnumType):
        yield from (member.value for member in kind.cls)

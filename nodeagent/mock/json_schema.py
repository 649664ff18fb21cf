"""The JSON schema of a tool's arguments or of an answer, as far as the mock engine follows one.

It makes arguments where a call is forced, and an answer where the request gives a schema. It checks
the arguments of a script where a tool is `strict`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

PARTS_MAX: Final = 10_000
"""The most parts of a schema that are read for one call; references may repeat without end."""

DEPTH_MAX: Final = 64

Size = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Kind = Literal["object", "array", "string", "boolean", "null", "integer", "number"]

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


class UnsupportedSchemaError(Exception):
    """A schema that the mock engine cannot follow; the text says why."""


class SchemaPart(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """One object of a schema. Those with other keywords are refused; the first six mean nothing."""

    title: Any = None
    description: Any = None
    default: Any = None
    examples: Any = None
    deprecated: Any = None
    dialect: Any = msgspec.field(name="$schema", default=None)
    defs: Any = msgspec.field(name="$defs", default=None)
    definitions: Any = None

    reference: str = msgspec.field(name="$ref", default="")
    type: Kind | Annotated[tuple[Kind, ...], msgspec.Meta(min_length=1)] | None = None
    const: Any | msgspec.UnsetType = msgspec.UNSET
    enum: Annotated[tuple[Any, ...], msgspec.Meta(min_length=1)] | None = None
    any_of: tuple[Any, ...] = ()
    one_of: tuple[Any, ...] = ()
    properties: dict[str, Any] = {}
    required: tuple[str, ...] = ()
    additional_properties: bool | dict[str, Any] = True
    items: dict[str, Any] = {}
    min_items: Size = 0
    max_items: int | None = None
    min_length: Size = 0
    max_length: int | None = None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The types that it names."""
        if self.type is None:
            return ()
        return (self.type,) if isinstance(self.type, str) else self.type


class JsonSchema:
    """The schema of one tool's arguments, or of one answer."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = {"type": "object", **schema}
        self._parts_read = 0

    def example(self) -> Any:
        """Return the smallest value that follows the schema. Raises UnsupportedSchemaError."""
        return self._example(self._root, 0)

    def misfit(self, value: Any) -> str:
        """Say how `value` breaks the schema; "" if it does not. Raises UnsupportedSchemaError."""
        return next(self._misfits(self._root, value, "the arguments", 0), "")

    def _example(self, written: Any, depth: int) -> Any:
        part = self._read(written, depth)
        if part.const is not msgspec.UNSET:
            return part.const
        if part.enum:
            return part.enum[0]
        for choices in (part.any_of, part.one_of):
            if choices:
                return self._example(choices[0], depth + 1)
        match part.kinds[:1]:
            case ("object",):
                return {
                    name: self._example(part.properties.get(name, {}), depth + 1)
                    for name in part.required
                }
            case ("array",):
                return [self._example(part.items, depth + 1) for _ in range(part.min_items)]
            case ("string",):
                return "x" * part.min_length
            case ("boolean",):
                return False
            case ("integer" | "number",):
                return _number(part)
        return None

    def _misfits(self, written: Any, value: Any, place: str, depth: int) -> Iterator[str]:
        part = self._read(written, depth)
        if part.const is not msgspec.UNSET and not _is_same(value, part.const):
            yield f"{place} must be {part.const!r}"
        if part.enum and not any(_is_same(value, allowed) for allowed in part.enum):
            yield f"{place} must be one of {part.enum!r}"
        for choices in (part.any_of, part.one_of):
            if choices and all(
                next(self._misfits(choice, value, place, depth + 1), "") for choice in choices
            ):
                yield f"{place} must follow one of {len(choices)} schemas"
        if part.kinds and not any(_is_of(value, kind) for kind in part.kinds):
            yield f"{place} must be of type {' or '.join(part.kinds)}"
        if isinstance(value, dict):
            yield from self._members(part, value, place, depth)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._misfits(part.items, item, f"{place}[{index}]", depth + 1)
            yield from _out_of(len(value), part.min_items, part.max_items, f"{place}: its length")
        elif isinstance(value, str):
            yield from _out_of(len(value), part.min_length, part.max_length, f"{place}: its length")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield from _out_of(value, part.minimum, part.maximum, place)

    def _members(
        self, part: SchemaPart, value: Mapping[str, Any], place: str, depth: int
    ) -> Iterator[str]:
        others = part.additional_properties
        for name in part.required:
            if name not in value:
                yield f"{place} must have `{name}`"
        for name, member in value.items():
            if name not in part.properties and others is False:
                yield f"{place} must not have `{name}`"
                continue
            schema = part.properties.get(name, others if isinstance(others, dict) else {})
            yield from self._misfits(schema, member, f"{place}.{name}", depth + 1)

    def _read(self, written: Any, depth: int) -> SchemaPart:
        """Return a part of the schema, behind its references."""
        self._parts_read += 1
        if depth > DEPTH_MAX or self._parts_read > PARTS_MAX:
            raise UnsupportedSchemaError("its schema is too large")
        try:
            part = msgspec.convert(written, SchemaPart)
        except msgspec.ValidationError as error:
            raise UnsupportedSchemaError(f"its schema: {error}") from error
        return self._read(self._behind(part.reference), depth + 1) if part.reference else part

    def _behind(self, reference: str) -> Any:
        """Return what a reference within the schema names."""
        found: Any = self._root
        first, *steps = reference.split("/")
        for step in steps:
            found = found.get(step) if isinstance(found, dict) else None
        if first != "#" or found is None:
            raise UnsupportedSchemaError(f"its schema has no {reference}")
        return found


def _number(part: SchemaPart) -> float:
    """Return the number next to 0 that the limits allow."""
    low = -math.inf if part.minimum is None else part.minimum
    high = math.inf if part.maximum is None else part.maximum
    number = min(max(0.0, low), high)
    return math.ceil(number) if part.kinds[0] == "integer" or number == int(number) else number


def _is_of(value: Any, kind: str) -> bool:
    is_odd = isinstance(value, bool) and kind != "boolean"
    return isinstance(value, _TYPES[kind]) and not is_odd


def _is_same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _out_of(size: float, least: float | None, most: float | None, place: str) -> Iterator[str]:
    """Yield a misfit if a size or number is outside its limits."""
    if least is not None and size < least:
        yield f"{place} must be at least {least:g}"
    if most is not None and size > most:
        yield f"{place} must be at most {most:g}"

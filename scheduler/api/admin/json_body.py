"""Decodes the JSON body of an admin request, in which no field is ignored."""

from contextlib import suppress
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError
from isochrone.wire.http.invalid_field import decode_public, invalid_field

WHOLE_MAX: Final = float(2**53)
"""Above it, floats are not exact whole numbers."""

_anything: Final = msgspec.json.Decoder(Any)


def decode_body(raw: bytes, decoder: "msgspec.json.Decoder[Any]") -> Any:
    """Decode a body, in which a whole number may be written `1.0`.

    Raises ApiError 400, also for an unknown field at any depth.
    """
    try:
        body = decode_public(raw, decoder)
    except ApiError:
        with suppress(ValueError, RecursionError):
            raw = msgspec.json.encode(_with_whole_numbers(_anything.decode(raw)))
        body = decode_public(raw, decoder)
    # Structs that peers exchange, too, ignore unknown fields, so that releases may differ.
    if field := _unknown_field(decode_public(raw, _anything), body):
        raise invalid_field(f"there is no field {field[:200]!r}")
    return body


def _unknown_field(given: Any, read: Any) -> str:
    """Return the first field of a JSON value that the struct read from it lacks, "" for none."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(given, dict) and isinstance(read, msgspec.Struct):
        names: dict[str, str] = dict(
            zip(read.__struct_encode_fields__, read.__struct_fields__, strict=True)
        )
        known = names.keys() | {type(read).__struct_config__.tag_field}
        for name in given:
            if name not in known:
                return str(name)
        pairs = [
            (name, inner, getattr(read, names[name]))
            for name, inner in given.items()
            if name in names
        ]
    elif isinstance(given, list) and isinstance(read, list | tuple):
        pairs = [(str(n), *both) for n, both in enumerate(zip(given, read, strict=True))]
    for name, inner, inner_read in pairs:
        if below := _unknown_field(inner, inner_read):
            return f"{name}.{below}"
    return ""


def _with_whole_numbers(value: Any) -> Any:
    """Return a JSON value with an int in place of each whole float, as JSON Schema counts them."""
    if isinstance(value, dict):
        return {name: _with_whole_numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_MAX:
        return int(value)
    return value

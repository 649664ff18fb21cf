"""The error 400 for a body that a decoder refuses, with the name of its field."""

import re
from typing import Any, Final, TypeVar

import msgspec

from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.allowed_values import allowed_values

T = TypeVar("T")
REASON_CHARS_MAX: Final = 1_000
"""A decoder repeats the value or the name that it refuses, which may be as long as the body, and
regular expressions take seconds to search that."""

READ_BYTES_MAX: Final = 256 * 1024
"""A larger body is not read again to make a message more exact."""

_INVALID_FIELD: Final = re.compile(r" - at `\$\.?(.{1,120})`$")
_MISSING_FIELD: Final = re.compile(r"missing required field `(.{1,60}?)`")
_UNKNOWN_FIELD: Final = re.compile(r"object contains unknown field `(.{1,60}?)`", re.IGNORECASE)
_NOT_EMPTY: Final = re.compile(
    r"expected (?:`null`, got `[a-z]+`|`array` of length <= 0)", re.IGNORECASE
)
_WRONG_VALUE: Final = re.compile(r"^Invalid (?:enum )?value (.*)", re.DOTALL)


def decode_public(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode a public body. Raises ApiError 400 whose `param` names the invalid field."""
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise invalid_field(codec.describe(error), decoder.type, body) from None


def _read(body: bytes) -> Any:
    """Return a body's JSON, None for one that is not worth reading again for a message."""
    try:
        return msgspec.json.decode(body) if len(body) <= READ_BYTES_MAX else None
    except (ValueError, RecursionError):
        return None


def invalid_field(reason: str, kind: Any = None, body: bytes = b"") -> ApiError:
    """Return the error 400 for what a decoder reports, with the name of the field.

    `kind` is the type that it decoded `body` to: the message lists the values that the field may
    have.
    """
    if len(reason) > REASON_CHARS_MAX:
        # Its end names the field.
        reason = f"{reason[: REASON_CHARS_MAX // 2]} ... {reason[-REASON_CHARS_MAX // 2 :]}"
    invalid, missing = _INVALID_FIELD.search(reason), _MISSING_FIELD.search(reason)
    unknown = _UNKNOWN_FIELD.search(reason)
    field = ".".join([match.group(1) for match in (invalid, missing, unknown) if match])
    if missing:
        reason = "it is required"
    elif unknown or _NOT_EMPTY.search(reason):
        reason = "it is not supported"
    elif reason == "Input data was truncated":
        reason = "it is empty, or its JSON ends early"
    elif wrong := _WRONG_VALUE.match(reason := _INVALID_FIELD.sub("", reason)):
        allowed = allowed_values(kind, field, _read(body)) if kind is not None and field else ""
        reason = f"{wrong.group(1)[:80]} is not one of {allowed or 'its values'}"
    subject = f"field '{field}'" if field else "the request body"
    if reason[1:2].islower():
        # "Expected", but not "JSON".
        reason = f"{reason[:1].lower()}{reason[1:]}"
    message = f"cannot use {subject}: {reason}"
    return ApiError(ErrorCode.INVALID_REQUEST, message[:400], param=field or None)

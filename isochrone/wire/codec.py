"""Encodes and decodes structs, with a limit on every size.

msgspec's typed decoder refuses wrong types and unknown tags. It ignores unknown fields, so that an
older peer can read a newer one's messages. Deep nesting raises RecursionError in msgspec 0.22; here
it is a MalformedFrame like any other.
"""

from typing import Any, Final, TypeVar

import msgspec

from isochrone.wire.client_keys.key_table import decode_hook, encode_hook
from isochrone.wire.ids import PATTERN_DESCRIPTIONS

PROTOCOL: Final = 1
"""Version of the control protocol. A peer with another version is refused with a message."""

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest control frame. A larger one is refused where it would be sent (FrameTooLarge). Route
tables above it go in parts (`table_parts.py`)."""

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)


class MalformedFrame(ValueError):
    """The received bytes are not a valid message."""


class FrameTooLarge(ValueError):
    """A message is too large for its receiver, so it is not sent."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message as a msgpack frame."""
    return _encoder.encode(message)


def check_size(frame: bytes, kind: str) -> None:
    """Raise FrameTooLarge if the receiver would refuse `frame`, a message of `kind`."""
    if len(frame) > FRAME_BYTES_MAX:
        raise FrameTooLarge(
            f"cannot send a message of kind {kind}: {len(frame)} bytes, the limit is "
            f"{FRAME_BYTES_MAX}"
        )


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return a decoder for `kind`, a struct or a union of tagged structs."""
    return msgspec.msgpack.Decoder(kind, dec_hook=decode_hook)


def decode(
    frame: bytes | memoryview | msgspec.Raw,
    reader: "msgspec.msgpack.Decoder[T]",
    *,
    bytes_max: int = FRAME_BYTES_MAX,
) -> T:
    """Decode one msgpack frame. Raises MalformedFrame."""
    if len(frame) > bytes_max:
        raise MalformedFrame(f"cannot read frame: {len(frame)} bytes, the limit is {bytes_max}")
    try:
        return reader.decode(frame)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"cannot read frame: {describe(error)}") from error


def decode_json(
    body: bytes, reader: "msgspec.json.Decoder[T]", *, bytes_max: int = FRAME_BYTES_MAX
) -> T:
    """Decode one JSON body. Raises MalformedFrame."""
    if len(body) > bytes_max:
        raise MalformedFrame(f"cannot read body: {len(body)} bytes, the limit is {bytes_max}")
    try:
        return reader.decode(body)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"cannot read body: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Describe a decoding error without repeating the input."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not valid UTF-8"
    text = str(error)
    for pattern, description in PATTERN_DESCRIPTIONS.items():
        text = text.replace(f"`str` matching regex {pattern!r}", description)
    return text

"""Bytes to structs and back, with a limit on every size.

msgspec's typed decoder refuses wrong types and unknown tags; unknown fields are ignored, so an
older peer can read a newer one. Deep nesting surfaces as RecursionError in msgspec 0.22 and is an
ordinary refusal here.
"""

from typing import Any, Final, TypeVar

import msgspec

from isochrone.wire.ids import WORDS

PROTOCOL: Final = 1
"""Version of the control protocol. A peer that speaks another is refused in words."""

FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
"""Largest control frame: a route table of 20,000 routes takes about 6 MiB."""

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class MalformedFrame(ValueError):
    """What arrived is not a message of this protocol."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message as a msgpack frame."""
    return _encoder.encode(message)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Make the decoder for `kind`, a struct or a union of tagged structs."""
    return msgspec.msgpack.Decoder(kind)


def decode(
    frame: bytes, reader: "msgspec.msgpack.Decoder[T]", *, bytes_max: int = FRAME_BYTES_MAX
) -> T:
    """Decode one frame or raise MalformedFrame saying what is wrong with it."""
    if len(frame) > bytes_max:
        raise MalformedFrame(f"cannot read frame: {len(frame)} bytes, the limit is {bytes_max}")
    try:
        return reader.decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MalformedFrame(f"cannot read frame: {describe(error)}") from error


def decode_json(
    body: bytes, reader: "msgspec.json.Decoder[T]", *, bytes_max: int = FRAME_BYTES_MAX
) -> T:
    """Decode one JSON body or raise MalformedFrame saying what is wrong with it."""
    if len(body) > bytes_max:
        raise MalformedFrame(f"cannot read body: {len(body)} bytes, the limit is {bytes_max}")
    try:
        return reader.decode(body)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise MalformedFrame(f"cannot read body: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Say what a decoder refused, without echoing the input."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not valid UTF-8"
    text = str(error)
    for pattern, words in WORDS.items():
        text = text.replace(f"`str` matching regex {pattern!r}", words)
    return text

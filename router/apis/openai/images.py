"""Checks the images of a chat by their headers, before an engine spends memory on them. Pure.

A picture of a kilobyte may decode to gigabytes. Formats are those of OpenAI's API; where each keeps
its width and height is from its specification (PNG 11.2.2, GIF89a 18, JPEG T.81 B.2.2, WebP RFC
9649 2.5 to 2.7).
"""

import base64
import binascii
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.body_loops import is_surely_base64
from router.apis.openai.schema import ChatRequest, MediaReference, MessagePart

IMAGES_MAX: Final = 64
"""The images of one request."""

HEAD_CHARS: Final = 64 * 1024
"""The base64 characters of an image that are decoded first: four characters are three bytes."""

_DATA_URL: Final = re.compile(r"data:image/(?:png|jpeg|jpg|gif|webp);base64,", re.IGNORECASE)
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_SIZES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""The markers of a JPEG frame, which holds the size."""

_JPEG_ALONE: Final = frozenset({0x01, *range(0xD0, 0xD9)})
"""Markers without a length."""


class ImageSize(NamedTuple):
    """Width and height in pixels."""

    width: int
    height: int


def check_images(request: ChatRequest, pixels_max: int) -> None:
    """Raise ApiError 400 if an image is of an unknown format, broken or too large."""
    count = 0
    for number, message in enumerate(request.messages):
        if not isinstance(message.content, list):
            continue
        for place, part in enumerate(message.content):
            url = _image_url(part)
            if url is not None:
                count += 1
                field = f"messages[{number}].content[{place}].image_url"
                _check_image(url, field, pixels_max)
    if count > IMAGES_MAX:
        raise _invalid("messages", f"they have {count} images, the limit is {IMAGES_MAX}")


def image_size(data: bytes) -> ImageSize | None:
    """Return the size in an image's header; None if it has none that is known."""
    for begins, read in _READERS:
        if data.startswith(begins):
            try:
                return read(data)
            except IndexError:
                return None
    return None


def _image_url(part: MessagePart) -> str | None:
    given = part.image_url
    return given.url if isinstance(given, MediaReference) else given


def _check_image(url: str, field: str, pixels_max: int) -> None:
    match = _DATA_URL.match(url)
    if match is None:
        reason = "expected `data:image/FORMAT;base64,...` with PNG, JPEG, GIF or WebP"
        raise _invalid(field, reason)
    begin, size = match.end(), None
    if is_surely_base64(url, begin):
        size = image_size(binascii.a2b_base64(url[begin : begin + HEAD_CHARS]))
    if size is None:
        try:
            data = base64.b64decode(url[begin:], validate=True)
        except (binascii.Error, ValueError) as error:
            raise _invalid(field, f"its base64 is not valid: {error}") from None
        size = image_size(data)
    if size is None or not (size.width and size.height):
        raise _invalid(field, "it is no PNG, JPEG, GIF or WebP, or its header is broken")
    pixels = size.width * size.height
    if pixels > pixels_max:
        raise _invalid(
            field,
            f"the image has {size.width} x {size.height} = {pixels} pixels, the limit is"
            f" {pixels_max}: send a smaller one",
        )


def _png_size(data: bytes) -> ImageSize | None:
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    return ImageSize(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))


def _gif_size(data: bytes) -> ImageSize | None:
    if len(data) < 10:
        return None
    return ImageSize(int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little"))


def _jpeg_size(data: bytes) -> ImageSize | None:
    """Skip segments up to the frame header. Raises IndexError if the data end before it."""
    at = 2
    while True:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:
            # Fill bytes may come before any marker.
            at += 1
        elif marker in _JPEG_ALONE:
            at += 2
        elif marker in _JPEG_SIZES:
            if len(data) < at + 9:
                return None
            height, width = data[at + 5 : at + 7], data[at + 7 : at + 9]
            return ImageSize(int.from_bytes(width, "big"), int.from_bytes(height, "big"))
        else:
            at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))


def _webp_size(data: bytes) -> ImageSize | None:
    if data[8:12] != b"WEBP" or len(data) < 30:
        return None
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        bits = int.from_bytes(data[26:30], "little")
        return ImageSize(bits & 0x3FFF, bits >> 16 & 0x3FFF)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return ImageSize((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        width, height = data[24:27], data[27:30]
        return ImageSize(int.from_bytes(width, "little") + 1, int.from_bytes(height, "little") + 1)
    return None


_READERS: Final[tuple[tuple[bytes, Callable[[bytes], ImageSize | None]], ...]] = (
    (_PNG, _png_size),
    (b"GIF8", _gif_size),
    (b"\xff\xd8", _jpeg_size),
    (b"RIFF", _webp_size),
)


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field '{field}': {reason}", param=field)

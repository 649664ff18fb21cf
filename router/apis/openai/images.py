"""Checks the images of a chat by their headers, before an engine spends memory on them. Pure.

A picture of a kilobyte may decode to gigabytes. Formats are those of OpenAI's API; where each keeps
its width and height is from its specification (PNG 11.2.2, GIF89a 18 and 20, JPEG T.81 B.2.2, WebP
RFC 9649 2.5 to 2.7). A file that states its size twice is refused, and so is all that a decoder may
read in another way than this module: else the engine would allocate another size than was checked.
"""

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.body_loops import is_surely_base64
from isochrone.wire.ids import DATA_URL_PATTERN, PATTERN_DESCRIPTIONS
from router.apis.openai.schema import ChatRequest, MediaReference, MessagePart, TextlessPart

IMAGES_MAX: Final = 64
"""The images of one request."""

SIDES_RATIO_MAX: Final = 200
"""How many times as long as the other one side may be. Image processors that scale the shorter side
to a fixed length (CLIP's, of LLaVA) make 10 GB of an image of 1 x 10,000. Qwen's have this limit.
"""

LARGEST_MAX: Final = 4
"""How many images of the largest size one request may have, by their pixels: 256 megapixels are
768 MB in an engine, and several seconds of a processor. Each of 64 images may be a small file."""

FIRST_CHARS: Final = 1024
HEAD_CHARS: Final = 64 * 1024
"""The base64 characters of an image that are decoded first, and if its size is not in them:
four characters are three bytes."""

_DATA_URL: Final = re.compile(r"data:image/(?:png|jpeg|jpg|gif|webp);base64,", re.IGNORECASE)
_DATA_URL_IN_BODY: Final = re.compile(rb"data:(?i:image/(?:png|jpeg|jpg|gif|webp);base64,)")
"""The same where the decoder has not checked that it begins with `data:` in small letters."""

LINK: Final = "https://"
MAGIC_BYTES: Final = 8

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG_SIZES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""The markers of a JPEG frame, which holds the size."""

_JPEG_TABLES: Final = frozenset({0xC4, 0xCC, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE})
"""Other markers that may come before the scan, with a length. Of the rest some decoders skip a
segment and others two bytes."""

_JPEG_SCAN: Final = 0xDA
_JPEG_FRAME_BYTES: Final = 8
"""The least length of a frame's segment."""

_JPEG_PROGRESSIVE: Final = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
"""The markers of frames whose pixels come in several scans."""

_JPEG_SCAN_BEGINS: Final = b"\xff\xda"
SCANS_MAX: Final = 64
"""The scans of a JPEG. A scan may have 31 bytes, and a decoder goes through all pixels for each:
1,000 of them took 10 s of a processor for 16 megapixels. Encoders make some ten."""

_GIF_EXTENSION: Final = 0x21
_GIF_FRAME: Final = 0x2C
_GIF_COMMENT: Final = 0xFE
_GIF_COLOURS: Final = 0x80
"""The flag that says that a table of colours follows."""

BLOCKS_MAX: Final = 10_000
"""The segments, chunks and blocks in front of the pixels that are looked at in one request. Files
have some twenty; millions of empty ones would keep the router from all other requests."""


class ImageSize(NamedTuple):
    """Width and height in pixels; whether a JPEG has its pixels in several scans."""

    width: int
    height: int
    has_scans: bool = False


class TooManyBlocks(Exception):
    """The images of a request have more than BLOCKS_MAX blocks in front of their pixels."""


class TooManyScans(Exception):
    """A JPEG has more than SCANS_MAX scans."""


class BlockCount:
    """How many blocks of images were looked at."""

    def __init__(self) -> None:
        self.looked_at = 0

    def add(self) -> None:
        """Count one more. Raises TooManyBlocks."""
        self.looked_at += 1
        if self.looked_at > BLOCKS_MAX:
            raise TooManyBlocks


def image_data(body: bytes, urls: Sequence[int]) -> list[memoryview] | None:
    """Return the base64 of the images at these places of a body, None if one is of another form.

    `urls` are the beginning and the end of each URL, in turn.
    """
    view, found = memoryview(body), []
    for begin, end in zip(urls[::2], urls[1::2], strict=True):
        match = _DATA_URL_IN_BODY.match(body, begin, end)
        if match is None:
            return None
        found.append(view[match.end() : end])
    return found


class ImageLink(NamedTuple):
    """A link to an image, and the field that has it."""

    field: str
    url: str


class ImageCheck:
    """The images of a request: what they add up to, and those that are still to be fetched."""

    def __init__(self, pixels_max: int) -> None:
        self.links: list[ImageLink] = []
        self._pixels_max = pixels_max
        self._pixels = 0
        self._blocks = BlockCount()

    def add(self, image: str | memoryview, field: str) -> None:
        """Check an image: its URL, or the base64 of one, which is valid. Raises ApiError 400."""
        if isinstance(image, str) and image.startswith(LINK):
            self.links.append(ImageLink(field, image))
            return
        self._pixels += _checked_pixels(image, field, self._pixels_max, self._blocks)

    def check_sum(self) -> None:
        """Raise ApiError 400 if the images together are too large."""
        limit = LARGEST_MAX * self._pixels_max
        if self._pixels > limit:
            reason = f"their images have {self._pixels} pixels, the limit is {limit}"
            raise _invalid("messages", reason)


def check_images(
    request: ChatRequest, pixels_max: int, taken: Sequence[memoryview] = ()
) -> ImageCheck:
    """Raise ApiError 400 if an image is of an unknown format, broken or too large.

    A number in the place of a URL is that of an image in `taken`, see long_texts.py. Only a
    `LinkedChat` has links.
    """
    images = [
        (number, place, url)
        for number, message in enumerate(request.messages)
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if (url := _image_url(part)) is not None
    ]
    if len(images) > IMAGES_MAX:
        raise _invalid("messages", f"they have {len(images)} images, the limit is {IMAGES_MAX}")
    check = ImageCheck(pixels_max)
    for number, place, url in images:
        field = f"messages[{number}].content[{place}].image_url"
        check.add(taken[url] if isinstance(url, int) else url, field)
    check.check_sum()
    return check


def refuse_link(url: str, field: str) -> None:
    """Raise ApiError 400 if the URL of an image is a link, of a router that fetches none."""
    if url.startswith(LINK):
        raise _invalid(field, f"expected {PATTERN_DESCRIPTIONS[DATA_URL_PATTERN]}")


def media_type(data: bytes) -> str:
    """Return the media type of an image by its first MAGIC_BYTES, "" if it is of no known one."""
    return next((kind for begins, kind, _ in _READERS if data.startswith(begins)), "")


def image_size(data: bytes, blocks: BlockCount) -> ImageSize | None:
    """Return the size in an image's header; None if it has none that is known.

    Raises TooManyBlocks.
    """
    for begins, _, read in _READERS:
        if data.startswith(begins):
            try:
                return read(data, blocks)
            except IndexError:
                return None
    return None


def _image_url(part: MessagePart | TextlessPart) -> str | int | None:
    image_url = part.image_url
    return image_url.url if isinstance(image_url, MediaReference) else image_url


def _checked_pixels(
    image: str | memoryview, field: str, pixels_max: int, blocks: BlockCount
) -> int:
    """Check an image: its URL, or the base64 of one, which is valid. Return its pixels."""
    try:
        if isinstance(image, memoryview):
            size = _size_of_valid(image, 0, blocks)
        else:
            match = _DATA_URL.match(image)
            if match is None:
                reason = "expected `data:image/FORMAT;base64,...` with PNG, JPEG, GIF or WebP"
                raise _invalid(field, reason)
            size = _size_of(image, match.end(), blocks)
    except (binascii.Error, ValueError) as error:
        raise _invalid(field, f"its base64 is not valid: {error}") from None
    except TooManyBlocks:
        reason = f"the images have more than {BLOCKS_MAX} blocks in front of their pixels"
        raise _invalid(field, reason) from None
    except TooManyScans:
        raise _invalid(field, f"the JPEG has more than {SCANS_MAX} scans") from None
    if size is None or not (size.width and size.height):
        raise _invalid(field, "it is no PNG, JPEG, GIF or WebP, or its header is broken")
    pixels = size.width * size.height
    if pixels > pixels_max:
        raise _invalid(
            field,
            f"the image has {size.width} x {size.height} = {pixels} pixels, the limit is"
            f" {pixels_max}: send a smaller one",
        )
    sides = (size.width, size.height)
    if max(sides) > SIDES_RATIO_MAX * min(sides):
        reason = f"one side may be at most {SIDES_RATIO_MAX} times as long as the other"
        raise _invalid(field, f"the image has {size.width} x {size.height} pixels: {reason}")
    return pixels


def _size_of(url: str, begin: int, blocks: BlockCount) -> ImageSize | None:
    """Return the size in an image. Raises ValueError, TooManyBlocks and TooManyScans."""
    if is_surely_base64(url, begin):
        return _size_of_valid(url, begin, blocks)
    data = base64.b64decode(url[begin:], validate=True)
    size = image_size(data, blocks)
    if size is not None and size.has_scans:
        _check_scans(data)
    return size


def _size_of_valid(data: str | memoryview, begin: int, blocks: BlockCount) -> ImageSize | None:
    """Decode a part of an image, or all of it if need be. Raises TooManyBlocks, TooManyScans."""
    size = _size_in_valid(data, begin, blocks)
    if size is not None and size.has_scans:
        _check_scans(binascii.a2b_base64(data[begin:]))
    return size


def _check_scans(data: bytes) -> None:
    """Raise TooManyScans if a JPEG may have too many: within a scan the bytes mean nothing else."""
    if data.count(_JPEG_SCAN_BEGINS) > SCANS_MAX:
        raise TooManyScans


def _size_in_valid(data: str | memoryview, begin: int, blocks: BlockCount) -> ImageSize | None:
    before = blocks.looked_at
    size = image_size(binascii.a2b_base64(data[begin : begin + FIRST_CHARS]), blocks)
    if size is not None:
        return size
    # The first look has few blocks, which are looked at again.
    blocks.looked_at = before
    size = image_size(binascii.a2b_base64(data[begin : begin + HEAD_CHARS]), blocks)
    return size or image_size(binascii.a2b_base64(data[begin:]), blocks)


def _png_size(data: bytes, blocks: BlockCount) -> ImageSize | None:
    """Skip chunks up to the pixels. Raises IndexError if the data end before them."""
    if data[12:16] != b"IHDR" or len(data) < 24:
        return None
    size = ImageSize(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"))
    position = 8
    while True:
        blocks.add()
        position += 12 + int.from_bytes(data[position : position + 4], "big")
        kind = data[position + 4 : position + 8]
        if kind == b"IDAT":
            return size
        if len(kind) < 4 or kind == b"IHDR":
            return None


def _gif_size(data: bytes, blocks: BlockCount) -> ImageSize | None:
    """Return the size of the screen with the first frame, which may be larger.

    Raises IndexError if the data end before the frame.
    """
    width, height = (int.from_bytes(data[position : position + 2], "little") for position in (6, 8))
    position = 13 + (3 << (data[10] & 7) + 1 if data[10] & _GIF_COLOURS else 0)
    while data[position] == _GIF_EXTENSION:
        if not data[position + 2] and data[position + 1] != _GIF_COMMENT:
            return None
        position += 2
        while data[position]:
            blocks.add()
            position += 1 + data[position]
        blocks.add()
        position += 1
    if data[position] != _GIF_FRAME or len(data) < position + 10:
        return None
    left, top, across, down = (
        int.from_bytes(data[place : place + 2], "little")
        for place in range(position + 1, position + 9, 2)
    )
    return ImageSize(max(width, left + across), max(height, top + down))


def _jpeg_size(data: bytes, blocks: BlockCount) -> ImageSize | None:
    """Skip segments up to the scan. Raises IndexError if the data end before it."""
    position, size, components = 2, None, 0
    while True:
        blocks.add()
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:
            # Fill bytes may come before any marker.
            position += 1
            continue
        if marker == _JPEG_SCAN:
            # A decoder reads one scan with all components while it decodes, and none after it.
            return size and size._replace(has_scans=data[position + 4] < components)
        length = data[position + 2] << 8 | data[position + 3]
        if marker in _JPEG_SIZES and size is None and length >= _JPEG_FRAME_BYTES:
            height, width = data[position + 5 : position + 7], data[position + 7 : position + 9]
            size = ImageSize(int.from_bytes(width, "big"), int.from_bytes(height, "big"))
            is_progressive = marker in _JPEG_PROGRESSIVE
            components = 256 if is_progressive else data[position + 9]
        elif marker not in _JPEG_TABLES or length < 2:
            return None
        position += 2 + length


def _webp_size(data: bytes, blocks: BlockCount) -> ImageSize | None:
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


_READERS: Final[tuple[tuple[bytes, str, Callable[[bytes, BlockCount], ImageSize | None]], ...]] = (
    (_PNG, "image/png", _png_size),
    (b"GIF8", "image/gif", _gif_size),
    (b"\xff\xd8", "image/jpeg", _jpeg_size),
    (b"RIFF", "image/webp", _webp_size),
)


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field '{field}': {reason}", param=field)

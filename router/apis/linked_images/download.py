"""Downloads one image: https, a few redirects, no cookies, no compression, and base64 as it comes.

The bytes are encoded chunk by chunk: encoding 6 MiB at once would hold the event loop up for 20 ms.
"""

import binascii
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import aiohttp
from yarl import URL

from router.apis.linked_images.link import (
    NO_PUBLIC_ADDRESS,
    FetchRefused,
    parse_link,
    redirected,
)
from router.apis.linked_images.splice import FetchedImage
from router.apis.openai.images import MAGIC_BYTES, media_type

REDIRECTS_MAX: Final = 3
HEADERS: Final[Mapping[str, str]] = {
    "accept": "image/png, image/jpeg, image/gif, image/webp",
    "accept-encoding": "identity",
    "user-agent": "isochrone-router",
}
TOO_LARGE: Final = (
    "as base64 it does not fit into a body together with the rest of the request: send smaller"
    " images, or fewer"
)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class ImageBudget:
    """How many characters of base64 the images of one request may still have."""

    def __init__(self, most: int, hold: Callable[[int], None]) -> None:
        """`hold` counts what is kept, and may raise ApiError."""
        self._left = most
        self._hold = hold

    def check(self, size_bytes: int) -> None:
        """Raise FetchRefused if a file of this size would not fit."""
        if _base64_chars(size_bytes) > self._left:
            raise FetchRefused("too_large", TOO_LARGE)

    def take(self, size_bytes: int) -> None:
        """Count bytes of a file that are kept as base64. Raises FetchRefused, and ApiError."""
        self.check(size_bytes)
        count = _base64_chars(size_bytes)
        self._left -= count
        self._hold(count)


class LinkRules(NamedTuple):
    """What may be fetched: the port, and which addresses (`refuse` raises OSError)."""

    port: int
    refuse: Callable[[str], None]


class EncodedImage:
    """An image as base64, made of the chunks of its file."""

    def __init__(self, budget: ImageBudget) -> None:
        self._budget = budget
        self._rest = b""
        self._parts: list[bytes] = []
        self._media_type = ""

    def add(self, chunk: bytes) -> None:
        """Encode a chunk. Raises FetchRefused if this is no image."""
        data = self._rest + chunk
        if not self._media_type:
            if len(data) < MAGIC_BYTES:
                self._rest = data
                return
            self._begin(data)
        whole = len(data) - len(data) % 3
        self._rest = data[whole:]
        self._append(data[:whole])

    def end(self) -> FetchedImage:
        """Return the image. Raises FetchRefused if this is none."""
        if not self._media_type:
            self._begin(self._rest)
        self._append(self._rest)
        return FetchedImage(self._media_type, b"".join(self._parts))

    def _begin(self, data: bytes) -> None:
        self._media_type = media_type(data)
        if not self._media_type:
            raise FetchRefused("no_image", "what its host sent is no PNG, JPEG, GIF or WebP")

    def _append(self, data: bytes) -> None:
        self._budget.take(len(data))
        self._parts.append(binascii.b2a_base64(data, newline=False))


async def download(
    http: aiohttp.ClientSession, link: str, rules: LinkRules, budget: ImageBudget
) -> FetchedImage:
    """Return the image at a link. Raises FetchRefused, and ApiError."""
    url = parse_link(link, port=rules.port, refuse=rules.refuse)
    try:
        for _ in range(REDIRECTS_MAX + 1):
            async with http.get(url, headers=HEADERS, allow_redirects=False) as response:
                if response.status in _REDIRECTS:
                    url = _target(url, response, rules)
                    continue
                _check_head(response)
                budget.check(response.content_length or 0)
                image = EncodedImage(budget)
                async for chunk in response.content.iter_any():
                    image.add(chunk)
                return image.end()
    except aiohttp.ClientConnectorDNSError as error:
        raise FetchRefused("refused", NO_PUBLIC_ADDRESS) from error
    except aiohttp.ClientSSLError as error:
        reason = "its host has no valid certificate, or does not speak TLS"
        raise FetchRefused("unreachable", reason) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason = "its host cannot be reached, or broke off"
        raise FetchRefused("unreachable", reason) from error
    raise FetchRefused("refused", f"it redirects more than {REDIRECTS_MAX} times")


def _target(url: URL, response: aiohttp.ClientResponse, rules: LinkRules) -> URL:
    location = response.headers.get("location", "")
    return redirected(url, location, port=rules.port, refuse=rules.refuse)


def _check_head(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise FetchRefused("status", f"its host answered {response.status}")
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise FetchRefused("no_image", "its host sent it compressed, which was not asked for")


def _base64_chars(size_bytes: int) -> int:
    return (size_bytes + 2) // 3 * 4

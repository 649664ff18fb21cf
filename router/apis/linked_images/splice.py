"""Puts images into a chat's body in place of the links to them. Pure."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from router.apis.openai.images import LINK


class FetchedImage(NamedTuple):
    """An image as base64; the media type is what its bytes say."""

    media_type: str
    base64: bytes

    def quoted_url(self) -> bytes:
        """Return the `data:` URL as a JSON string."""
        return b'"data:%b;base64,%b"' % (self.media_type.encode(), self.base64)


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_CONTENT: Final = msgspec.json.Decoder(str | list[dict[str, msgspec.Raw]] | None)
_IMAGE: Final = msgspec.json.Decoder(str | dict[str, msgspec.Raw] | None)
_URL: Final = msgspec.json.Decoder(str)


def with_images(body: bytes, images: Mapping[str, FetchedImage]) -> bytes:
    """Return a body with `data:` URLs in place of links.

    The parts of messages are written again even if none has a link: a parser that takes the first
    of two fields of one name would find a link that the router has not seen.
    """
    fields: dict[str, Any] = _FIELDS.decode(body)
    messages: list[dict[str, Any]] = [*_MESSAGES.decode(fields["messages"])]
    for message in messages:
        content = _CONTENT.decode(message.get("content", b"null"))
        if not isinstance(content, list):
            continue
        parts: list[dict[str, Any]] = [*content]
        for part in parts:
            if "image_url" in part:
                part["image_url"] = _with_image(part["image_url"], images)
        message["content"] = parts
    return msgspec.json.encode({**fields, "messages": messages})


def _with_image(raw: msgspec.Raw, images: Mapping[str, FetchedImage]) -> Any:
    given = _IMAGE.decode(raw)
    if isinstance(given, dict):
        return {**given, "url": _whole(given["url"], _URL.decode(given["url"]), images)}
    return None if given is None else _whole(raw, given, images)


def _whole(raw: msgspec.Raw, url: str, images: Mapping[str, FetchedImage]) -> msgspec.Raw:
    return msgspec.Raw(images[url].quoted_url()) if url.startswith(LINK) else raw

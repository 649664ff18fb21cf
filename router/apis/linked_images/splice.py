"""Puts images into a chat's body in place of the links to them. Pure."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from router.apis.openai.images import LINK


class FetchedImage(NamedTuple):
    """An image as base64; the media type is what its bytes say."""

    media_type: str
    base64: bytes


_MARK: Final = b"\0"
"""Stands for an image while the rest of a body is encoded, so that the image is copied once. It is
in no body that was decoded."""

_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_CONTENT: Final = msgspec.json.Decoder(str | list[dict[str, msgspec.Raw]] | None)
_IMAGE: Final = msgspec.json.Decoder(str | dict[str, msgspec.Raw] | None)


def with_images(body: bytes, images: Mapping[str, FetchedImage]) -> bytes:
    """Return a body with `data:` URLs in place of links.

    The parts of messages are written again even if none has a link: a parser that takes the first
    of two fields of one name would find a link that the router has not seen.
    """
    fields: dict[str, Any] = _FIELDS.decode(body)
    messages: list[dict[str, Any]] = [*_MESSAGES.decode(fields["messages"])]
    links: list[str] = []
    for message in messages:
        content = _CONTENT.decode(message.get("content", b"null"))
        if not isinstance(content, list):
            continue
        parts: list[dict[str, Any]] = [*content]
        for part in parts:
            if "image_url" in part:
                part["image_url"] = _marked(part["image_url"], links)
        message["content"] = parts
    first, *others = msgspec.json.encode({**fields, "messages": messages}).split(_MARK)
    pieces = [first]
    for link, other in zip(links, others, strict=True):
        image = images[link]
        pieces += (f'"data:{image.media_type};base64,'.encode(), image.base64, b'"', other)
    return b"".join(pieces)


def _marked(raw: msgspec.Raw, links: list[str]) -> Any:
    """Return an image with a mark in place of a link, which is appended to `links`."""
    given = _IMAGE.decode(raw)
    if isinstance(given, dict):
        return {**given, "url": _marked(given["url"], links)}
    if given is None or not given.startswith(LINK):
        return raw
    links.append(given)
    return msgspec.Raw(_MARK)

"""Reads a body: the request in it, and its prompt. Long texts and images are read by a loop in C.

The compiled request path takes those of a chat out of the body (`text_bytes.c`): it checks and
decodes texts, and checks the base64 of images. The decoder reads the rest, with a number in the
place of each, and so checks it as it checks any body. A body that it does not accept then is
decoded as a whole, as every body is without that loop. So the decoder alone decides what is
refused, and with which message.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from isochrone.native_class import mypyc_attr
from router.apis.openai.decode import CHAT, check_body, decode_checked
from router.apis.openai.images import image_data
from router.apis.openai.prompt import OpenAiRequest, render_prompt, render_textless
from router.apis.openai.schema import TextlessChat

LONG_BODY_BYTES: Final = 8 * 1024
"""From this size on taking texts out costs less than decoding them."""

_TEXTLESS: Final = msgspec.json.Decoder(TextlessChat)

TakeTexts = Callable[[bytes], "tuple[bytes, bytes, list[int], list[int]] | None"]
"""A body to the body without long texts and images, these texts in UTF-8, where each of them ends,
and where the URL of each image begins and ends in the body; or None if nothing was taken out. The
body is free of what `check_json_body` refuses."""


@mypyc_attr(acyclic=True, free_list_len=1)
class ReadBody:
    """A decoded body, its prompt as `render_prompt` returns it, and the images taken out of it.

    An image is its base64, which is valid; in the `request` its number stands in its place.
    """

    __slots__ = ("images", "prompt", "request")

    def __init__(
        self, request: OpenAiRequest, prompt: bytes, images: Sequence[memoryview] = ()
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.images = images


def take_none(body: bytes) -> None:
    """Take no text out: without the loop in C, decoding the whole body is the fastest."""
    return


take_texts: TakeTexts = take_none

with suppress(ImportError):
    take_texts = importlib.import_module("router.apis.openai.text_bytes").without_long_texts


def read_body(body: bytes, decoder: "msgspec.json.Decoder[Any]") -> ReadBody:
    """Decode a body. Raises ApiError 400 whose `param` names the invalid field."""
    check_body(body)
    if decoder is CHAT and len(body) >= LONG_BODY_BYTES:
        read = read_textless(body, take_texts)
        if read is not None:
            return read
    request: OpenAiRequest = decode_checked(body, decoder)
    return ReadBody(request, render_prompt(request))


def read_textless(body: bytes, take: TakeTexts) -> ReadBody | None:
    """Read a checked body by taking its texts out; None if that is not possible."""
    taken = take(body)
    if taken is None:
        return None
    textless, texts, ends, urls = taken
    images = image_data(body, urls) if urls else []
    if images is None:
        return None
    try:
        request = _TEXTLESS.decode(textless)
    except (ValueError, RecursionError):
        return None
    return ReadBody(request, render_textless(request, texts, ends), images)

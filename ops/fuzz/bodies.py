"""Fuzzes the reading of a chat whose texts and images are taken out; compares it with the decoder.

`ISOCHRONE_COMPILED=1 python -m ops.fuzz.bodies SECONDS [SEED]`, in seconds of CPU time. A mutated
body that is read with these taken out must be one that the decoder accepts as a whole, with the
same fields, the same prompt and the same images.
"""

import base64
import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError
from router.apis.openai import long_texts
from router.apis.openai.decode import CHAT, check_body
from router.apis.openai.images import check_images
from router.apis.openai.long_texts import TakeTexts, read_textless
from router.apis.openai.prompt import render_prompt
from router.apis.openai.schema import ChatRequest, MediaReference, MessagePart, TextlessPart

LONG: Final = "x" * 130
"""A text that is long enough to be taken out."""

PIXELS_MAX: Final = 10_000
_GIF: Final = b"GIF89a\x25\0\x15\0\0\0\0\x2c\0\0\0\0\x25\0\x15\0\0\x02\0\x3b"
_PICTURE: Final = base64.b64encode(_GIF + bytes(range(82))).decode()
URLS: Final = (
    *(f"data:image/gif;base64,{_PICTURE}", f"data:image/gif;base64,{_PICTURE}{LONG}AA"),
    *(f"data:image/png;base64,{_PICTURE}", f"DATA:image/gif;base64,{_PICTURE}"),
    *(f"data:image/gif;base64,{_PICTURE}=", f"data:image/gif;base64,{LONG}!=", "data:,"),
    *(f"data:image/gif;base64;{_PICTURE}", f"data:image/gif,{_PICTURE}", "http://host/a"),
)
"""URLs of images, most of them long enough to be taken out, and some of them refused."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
PIECES: Final = (
    "x", "word " * 20, '"', "\\", "\n\t\r\b\f/", "\0\x1f\x7f", "é", "語", "😀", LONG, "{[", "]}:,",
)  # fmt: skip
INSERTED: Final = (
    b'"', b"\\", b"0", b"-1", b" 0 ", b"1", b",", b":", b"{", b"}", b"[", b"]", b"\\u00",
    b"\\ud83d", b"\\x", b"\x1f", b'"content":0', b'"content"', b'"messages"', b'"content":',
    b'"c\\u006fntent"', b'"messages":[{"role":"user","content":"%b"}]' % LONG.encode(),
    b"true", b"\n", b'"role":', b'"text":0', b'"url":1', b'"url":', b'"image_url":0',
    b'"image_url":', b'"image_url":{"url":"%b"}' % URLS[0].encode(), b'"audio_url":', b"=", b",",
    b'"image_url":"%b"' % URLS[0].encode(), b'[{"type":"text","text":"%b"}]' % LONG.encode(),
)  # fmt: skip
MUTATIONS_PER_BODY: Final = 6


def chat_body(chat: object, chance: random.Random) -> bytes:
    """Write a chat as JSON, as one client or another does."""
    text = json.dumps(
        chat,
        ensure_ascii=chance.random() < 0.5,
        indent=chance.choice((None, None, 1)),
        separators=chance.choice(((",", ":"), (" , ", " : "), (",\n", ":\t"))),
    )
    return text.replace("/", chance.choice(("/", "\\/"))).encode()


def mutate_body(body: bytes, chance: random.Random) -> bytes:
    """Return the body with bytes inserted, removed or repeated."""
    data = bytearray(body)
    for _ in range(chance.randint(1, 3)):
        at, end = sorted((chance.randrange(len(data) + 1), chance.randrange(len(data) + 1)))
        kind = chance.random()
        if kind < 0.6:
            data[at:at] = chance.choice(INSERTED)
        elif kind < 0.8:
            del data[at : min(end, at + chance.choice((1, 1, 5, 200)))]
        else:
            data[at:at] = data[at : min(end, at + 300)]
        data = data or bytearray(b"{")
    return bytes(data)


def is_taken_alike(body: bytes, take: TakeTexts) -> bool:
    """Return whether texts are taken out of a body. Raises if it is then read in another way."""
    try:
        check_body(body)
    except ApiError:
        return False
    read = read_textless(body, take)
    if read is None:
        return False
    whole = CHAT.decode(body)
    is_alike = read.prompt == render_prompt(whole) and isinstance(read.request, ChatRequest)
    for field in msgspec.structs.fields(ChatRequest):
        if field.name != "messages":
            is_alike &= getattr(read.request, field.name) == getattr(whole, field.name)
    assert isinstance(read.request, ChatRequest)
    for one, other in zip(read.request.messages, whole.messages, strict=True):
        is_alike &= one.role == other.role
        is_alike &= isinstance(one.content, list) == isinstance(other.content, list)
        if isinstance(one.content, list) and isinstance(other.content, list):
            for part, whole_part in zip(one.content, other.content, strict=True):
                is_alike &= is_part_alike(part, whole_part, read.images)
    is_alike &= _refusal(read.request, read.images) == _refusal(whole, ())
    if not is_alike:
        raise ValueError(f"this body is read in two ways: {body!r}")
    return True


def is_part_alike(
    part: MessagePart | TextlessPart, whole: MessagePart, images: Sequence[memoryview]
) -> bool:
    """Return whether a part is read with the fields that it has in the whole body."""
    fields = [field.name for field in msgspec.structs.fields(MessagePart)]
    is_alike = all(
        getattr(part, name) == getattr(whole, name)
        for name in fields
        if name not in ("text", "image_url")
    )
    image, whole_image = part.image_url, whole.image_url
    is_alike &= isinstance(image, MediaReference) == isinstance(whole_image, MediaReference)
    url = image.url if isinstance(image, MediaReference) else image
    whole_url = whole_image.url if isinstance(whole_image, MediaReference) else whole_image
    if isinstance(url, int):
        assert whole_url is not None
        return is_alike and bytes(images[url]).decode() == whole_url.partition(",")[2]
    return is_alike and url == whole_url


def _refusal(request: ChatRequest, images: Sequence[memoryview]) -> str:
    """Return why the images of a chat are refused, "" if they are not."""
    try:
        check_images(request, PIXELS_MAX, images)
    except ApiError as error:
        return error.message
    return ""


def random_parts(chance: random.Random) -> list[dict[str, Any]]:
    """Return the content of a message in parts."""
    parts: list[dict[str, Any]] = []
    for _ in range(chance.randint(0, 3)):
        text = "".join(chance.choices(PIECES, k=chance.randint(0, 6)))
        url = chance.choice(URLS)
        parts.append(
            chance.choice(
                (
                    {"type": "text", "text": text},
                    {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
                    {"type": "image_url", "image_url": url},
                    {"type": "audio_url", "audio_url": {"url": url}, "text": text},
                )
            )
        )
    return parts


def random_chat(chance: random.Random) -> dict[str, Any]:
    """Return a chat with texts in and outside its messages."""

    def text() -> str:
        return "".join(chance.choices(PIECES, k=chance.randint(0, 6)))

    messages = []
    for _ in range(chance.randint(1, 4)):
        content = chance.choice((text(), text(), None, random_parts(chance)))
        message: dict[str, Any] = {"role": chance.choice(ROLES), "content": content}
        if chance.random() < 0.2:
            message["name"] = {"messages": [{"content": text()}]}
        messages.append(message)
    tools = [{"content": text()}] if chance.random() < 0.3 else []
    return {"model": "m", "messages": messages, "tools": tools}


def main() -> None:
    """Fuzz for a while and print how many bodies were read; fail at the first difference."""
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if long_texts.take_texts is long_texts.take_none:
        raise SystemExit("cannot fuzz: run `make compiled` and set ISOCHRONE_COMPILED=1")
    chance, count, taken = random.Random(seed), 0, 0
    until_s = time.process_time() + seconds
    while time.process_time() < until_s:
        body = chat_body(random_chat(chance), chance)
        for _ in range(MUTATIONS_PER_BODY):
            count += 1
            taken += is_taken_alike(mutate_body(body, chance), long_texts.take_texts)
    sys.stdout.write(f"{count} bodies, {taken} read without their texts, seed {seed}\n")


if __name__ == "__main__":
    main()

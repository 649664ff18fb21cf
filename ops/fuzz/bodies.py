"""Fuzzes the reading of a chat whose long texts are taken out, and compares it with the decoder.

`ISOCHRONE_COMPILED=1 python -m ops.fuzz.bodies SECONDS [SEED]`, in seconds of CPU time. A mutated
body that is read with its texts taken out must be one that the decoder accepts as a whole, with the
same fields and the same prompt.
"""

import json
import random
import sys
import time
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError
from router.apis.openai import long_texts
from router.apis.openai.decode import CHAT, check_body
from router.apis.openai.long_texts import TakeTexts, read_textless
from router.apis.openai.prompt import render_prompt
from router.apis.openai.schema import ChatRequest

LONG: Final = "x" * 130
"""A text that is long enough to be taken out."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
PIECES: Final = (
    "x", "word " * 20, '"', "\\", "\n\t\r\b\f/", "\0\x1f\x7f", "é", "語", "😀", LONG, "{[", "]}:,",
)  # fmt: skip
INSERTED: Final = (
    b'"', b"\\", b"0", b"-1", b" 0 ", b"1", b",", b":", b"{", b"}", b"[", b"]", b"\\u00",
    b"\\ud83d", b"\\x", b"\x1f", b'"content":0', b'"content"', b'"messages"', b'"content":',
    b'"c\\u006fntent"', b'"messages":[{"role":"user","content":"%b"}]' % LONG.encode(),
    b"true", b"\n", b'"role":',
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
    if not is_alike:
        raise ValueError(f"this body is read in two ways: {body!r}")
    return True


def random_chat(chance: random.Random) -> dict[str, Any]:
    """Return a chat with texts in and outside its messages."""

    def text() -> str:
        return "".join(chance.choices(PIECES, k=chance.randint(0, 6)))

    messages = []
    for _ in range(chance.randint(1, 4)):
        content = chance.choice((text(), text(), text(), None, [{"type": "text", "text": text()}]))
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

"""Taking long texts and images out of a body changes neither what is accepted nor what is read."""

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isochrone.wire.errors import ApiError
from ops.fuzz import bodies
from ops.fuzz.bodies import LONG, ROLES, URLS, chat_body, is_taken_alike, mutate_body, random_parts
from router.apis.openai import long_texts
from router.apis.openai.decode import CHAT
from router.apis.openai.long_texts import LONG_BODY_BYTES, read_body, read_textless, take_none
from tests.c_module import compile_now

SOURCE = Path(__file__).parents[3] / "router" / "apis" / "openai" / "text_bytes.c"
PIECES = st.sampled_from(bodies.PIECES)
TEXTS = st.lists(PIECES, max_size=8).map("".join)
PARTS = st.randoms(use_true_random=False).map(random_parts)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(ROLES)},
    optional={"content": TEXTS | TEXTS | TEXTS | PARTS | st.none(), "name": TEXTS},
)
CHATS = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(MESSAGES, min_size=1, max_size=4)},
    optional={
        "tools": st.lists(st.dictionaries(st.sampled_from(["content", "messages"]), TEXTS)),
        "metadata": st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=2)}),
        "stop": st.lists(TEXTS, max_size=2),
        "content": TEXTS,
        "seed": st.integers(-3, 3),
    },
)


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


@given(CHATS, st.randoms(use_true_random=False))
def test_what_is_read_is_the_same(in_c: ModuleType, chat: Any, chance: random.Random) -> None:
    body = chat_body(chat, chance)
    taken = is_taken_alike(body, in_c.without_long_texts)
    contents = [message.get("content") for message in chat["messages"]]
    if not any(isinstance(content, list) for content in contents):
        texts = [content for content in contents if content is not None]
        assert taken or all(len(text.encode()) < len(LONG) for text in texts)


@given(CHATS, st.randoms(use_true_random=False))
def test_what_is_refused_is_the_same(in_c: ModuleType, chat: Any, chance: random.Random) -> None:
    # `is_taken_alike` decodes whatever was taken: that fails where the body is not acceptable.
    is_taken_alike(mutate_body(chat_body(chat, chance), chance), in_c.without_long_texts)


def message(content: bytes) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":%b}]}' % content


def parts(*given: bytes) -> bytes:
    return message(b"[%b]" % b",".join(b'{"type":"text",%b}' % part for part in given))


IMAGE = b'"image_url":{"url":"%b"}' % URLS[0].encode()


@pytest.mark.parametrize(
    "body",
    [
        message(b'"%b"0' % LONG.encode()),
        message(b'0"%b"' % LONG.encode()),
        message(b'"%b\\x"' % LONG.encode()),
        message(b'"%b\x1f"' % LONG.encode()),
        message(b'"%b\\' % LONG.encode()),
        message(b'"%b\\u12' % LONG.encode()),
        message(b'"%b\\u12x4"' % LONG.encode()),
        message(b'"%b' % LONG.encode()),
        message(b'"%b" "%b"' % (LONG.encode(), LONG.encode())),
        message(b'"%b"}],"messages":[{"role":"user","content":0' % LONG.encode()),
        message(b'"%b"}],"messages":[{"role":"user","c\\u006fntent":0' % LONG.encode()),
        message(b'"%b","content":1' % LONG.encode()),
        message(b'"%b"},{"role":"user","content":-0' % LONG.encode()),
        message(b'"%b"}' % LONG.encode()),
        message(b'"%b"}]}{"messages":[{"content":"%b"' % (LONG.encode(), LONG.encode())),
        b'[{"messages":[{"role":"user","content":"%b"}]}]' % LONG.encode(),
        parts(IMAGE, b'"text":0'),
        parts(IMAGE, b'"image_url":0'),
        parts(IMAGE, b'"image_url":{"url":0}'),
        parts(IMAGE, b'"audio_url":{"url":0}'),
        parts(IMAGE, b'"image_url":{"\\u0075rl":0}'),
        parts(IMAGE, b'"image_url":[{"url":"%b"}]' % URLS[0].encode()),
        parts(IMAGE, b'"image_url":{"url":{"url":"%b"}}' % URLS[0].encode()),
        parts(IMAGE, b'"text":["%b"]' % LONG.encode()),
        parts(IMAGE + b"0"),
        parts(b'"image_url":{"url":"%b' % URLS[0].encode()),
        parts(IMAGE).replace(b'"user"', b'"role"'),
    ],
)
def test_what_the_decoder_refuses_is_never_read(in_c: ModuleType, body: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, ValueError)):
        CHAT.decode(body)
    assert read_textless(body, in_c.without_long_texts) is None


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (message(b'"%b"' % LONG.encode()), 1),
        (message(b' \n"%b"\t' % LONG.encode()), 1),
        (message(b'"short"'), 0),
        (message(b'"%b","content":"short"' % LONG.encode()), 1),
        (message(b'"%b","content":"%b!"' % (LONG.encode(), LONG.encode())), 2),
        (message(b'"%b","c\\u006fntent":"short"' % LONG.encode()), 0),
        (parts(b'"text":"%b"' % LONG.encode()), 1),
        (parts(b'"text":"short"'), 0),
        (parts(b'"text":"%b","text":"%b!"' % (LONG.encode(), LONG.encode())), 2),
        (parts(b'"text":{"text":"%b"}' % LONG.encode()).replace(b'"text":{', b'"x":{'), 0),
        (message(b'null,"name":{"content":"%b"}' % LONG.encode()), 0),
    ],
)
def test_only_the_long_texts_of_messages_are_taken(
    in_c: ModuleType, body: bytes, taken: int
) -> None:
    assert is_taken_alike(body, in_c.without_long_texts) == bool(taken)
    found = in_c.without_long_texts(body)
    assert (len(found[2]) if found else 0) == taken


@pytest.mark.parametrize(
    ("body", "taken"),
    [
        (parts(IMAGE), 1),
        (parts(IMAGE, IMAGE), 2),
        (parts(IMAGE + b"," + IMAGE), 2),
        (parts(b'"image_url": "%b" ' % URLS[0].encode()), 1),
        (parts(IMAGE, b'"text":"%b"' % LONG.encode()), 1),
        (parts(IMAGE, b'"image_url":{"url":"data:,"}'), 1),
        (parts(IMAGE.replace(b"image_url", b"audio_url")), 0),
        (parts(IMAGE.replace(b'"url"', b'"uri"')).replace(b'"image_url"', b'"x"'), 0),
        (parts(b'"x":{"image_url":"%b"}' % URLS[0].encode()), 0),
        (message(b'"%b"},{"role":"user",%b' % (LONG.encode(), IMAGE)), 0),
    ],
)
def test_only_the_images_of_parts_are_taken(in_c: ModuleType, body: bytes, taken: int) -> None:
    assert is_taken_alike(body, in_c.without_long_texts) == (taken > 0 or LONG.encode() in body)
    found = in_c.without_long_texts(body)
    assert (len(found[3]) // 2 if found else 0) == taken
    for begin, end in zip(found[3][::2], found[3][1::2], strict=True) if found else ():
        assert body[begin:end] == URLS[0].encode()


@pytest.mark.parametrize("url", URLS[2:])
def test_an_image_that_is_refused_is_refused_alike(in_c: ModuleType, url: str) -> None:
    body = parts(b'"image_url":{"url":"%b"},"text":"%b"' % (url.encode(), LONG.encode()))
    if url.startswith("data:"):
        is_taken_alike(body, in_c.without_long_texts)
    else:
        assert read_textless(body, in_c.without_long_texts) is None


@given(st.integers(0, 198), st.integers(0, 2), st.sampled_from(["", "=", "-", '\\"', "\\/", "é"]))
def test_each_place_of_an_image_is_looked_at(
    in_c: ModuleType, at: int, padding: int, inserted: str
) -> None:
    data = "A" * at + inserted + "A" * (198 - at) + "=" * padding
    body = parts(b'"image_url":"data:image/png;base64,%b"' % data.encode())
    found = in_c.without_long_texts(body)
    is_valid = len(data) == 200 and (not inserted or (inserted == "=" and at == 198))
    assert bool(found) == is_valid


@given(st.text(max_size=40), st.integers(0, 70))
@example("\0\ud7ff\ue000\uffff\U0010ffff", 0)
def test_every_character_is_decoded(in_c: ModuleType, text: str, before: int) -> None:
    text = "y" * before + text + LONG
    for ensure_ascii in (False, True):
        body = message(json.dumps(text, ensure_ascii=ensure_ascii).encode())
        assert in_c.without_long_texts(body)[1] == text.encode()


def test_a_long_chat_is_read_with_and_without_the_loop(
    in_c: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = message(b'"%b\\n"' % (b"a" * LONG_BODY_BYTES))
    seen = []
    for take in (in_c.without_long_texts, take_none):
        if long_texts.__file__.endswith(".py"):
            monkeypatch.setattr(long_texts, "take_texts", take)
        seen.append(read_body(body, CHAT).prompt)
    assert seen[0] == seen[1] == b"\0user\0" + b"a" * LONG_BODY_BYTES + b"\n"
    with pytest.raises(ApiError, match=r"messages\[0\]\.role"):
        read_body(body.replace(b'"user"', b'"nobody"'), CHAT)


def test_c_refuses_what_it_cannot_read(in_c: ModuleType) -> None:
    with pytest.raises(TypeError):
        in_c.without_long_texts("text")
    assert in_c.without_long_texts(b"") is None


def test_every_role_has_a_place_in_the_prompt(in_c: ModuleType) -> None:
    literal = msgspec.structs.fields(type(CHAT.decode(message(b'""')).messages[0]))[0].type
    assert get_args(literal) == ROLES
    for role in ROLES:
        assert is_taken_alike(
            message(b'"%b"' % LONG.encode()).replace(b"user", role.encode()),
            in_c.without_long_texts,
        )

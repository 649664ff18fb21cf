"""What the router takes of a body for the prompt that it will become."""

import pytest

from isochrone.wire.errors import ApiError
from router.apis.openai.decode import CHAT, COMPLETION, EMBEDDING, decode
from router.apis.openai.prompt import count_answers, count_text_bytes, render_prompt

TOOLS = b'[{"type":"function","function":{"name":"f"}}]'


@pytest.mark.parametrize(
    ("rest", "begins"),
    [
        (b"", b"\0user\0hi"),
        (b',"tools":' + TOOLS, TOOLS + b"\0user\0hi"),
        (b',"tool_choice":"auto","response_format":{"type":"json_object"}', b"\0user\0hi"),
    ],
)
def test_tools_count_as_the_beginning_of_the_prompt(rest: bytes, begins: bytes) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]' + rest + b"}"
    request = decode(body, CHAT)
    assert render_prompt(request) == begins
    assert count_text_bytes(request, len(render_prompt(request))) > len(begins)


@pytest.mark.parametrize(
    ("rest", "count"),
    [
        (b'"prompt":"a"', 1),
        (b'"prompt":"a","n":3', 3),
        (b'"prompt":[1,2,3],"n":2', 2),
        (b'"prompt":["a","b"]', 2),
        (b'"prompt":[[1],[2,3],[4]],"n":2', 6),
    ],
)
def test_every_choice_of_every_prompt_is_an_answer(rest: bytes, count: int) -> None:
    assert count_answers(decode(b'{"model":"m",' + rest + b"}", COMPLETION)) == count


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages":[]}', "messages"),
        (b'{"messages":[{"role":"user"}]}', "model"),
        (b'{"model":"m","messages":[{"content":"hi"}]}', "messages[0].role"),
        (b'{"model":"m","messages":[{"role":"bot"}]}', "messages[0].role"),
        (b"[]", None),
        (b"{", None),
    ],
)
def test_what_is_wrong_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        decode(body, CHAT)
    assert refused.value.param == param


CHATTED = b'{"model":"m","messages":[{"role":"user","content":[%b]}]}'


@pytest.mark.parametrize(
    "part",
    [
        b'{"type":"image_url","image_url":{"url":"http://169.254.169.254/latest/meta-data"}}',
        b'{"type":"image_url","image_url":{"url":"data:,","url":"file:///etc/passwd"}}',
        b'{"type":"input_image","image_url":"https://10.0.0.7/x.png"}',
        b'{"type":"video_url","video_url":{"url":" data:x"}}',
        b'{"type":"text","text":"x","audio_url":{"url":"http://localhost:9100/metrics"}}',
    ],
)
def test_no_engine_is_made_to_fetch_what_a_client_cannot_reach(part: bytes) -> None:
    with pytest.raises(ApiError, match="nothing is fetched for a client"):
        decode(CHATTED % part, CHAT)


def test_what_comes_with_the_request_is_let_through() -> None:
    seen = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AA==","detail":"low"}}'
    decode(CHATTED % (b'{"type":"text","text":"what is this?"},' + seen), CHAT)
    decode(b'{"model":"m","input":"x"}', EMBEDDING)
    with pytest.raises(ApiError):
        # As vLLM takes a chat to be embedded, beside the input that was read here.
        decode(b'{"model":"m","input":"x","messages":[]}', EMBEDDING)

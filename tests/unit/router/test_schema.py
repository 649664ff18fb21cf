"""What the router takes of a body for the prompt that it will become."""

import pytest

from isochrone.wire.errors import ApiError
from router.apis.openai.decode import CHAT, COMPLETION, decode

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
    assert request.rendered == begins
    assert request.text_bytes(len(request.rendered)) > len(begins)


@pytest.mark.parametrize(
    ("rest", "answers"),
    [
        (b'"prompt":"a"', 1),
        (b'"prompt":"a","n":3', 3),
        (b'"prompt":[1,2,3],"n":2', 2),
        (b'"prompt":["a","b"]', 2),
        (b'"prompt":[[1],[2,3],[4]],"n":2', 6),
    ],
)
def test_every_choice_of_every_prompt_is_an_answer(rest: bytes, answers: int) -> None:
    assert decode(b'{"model":"m",' + rest + b"}", COMPLETION).answers == answers


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

"""OpenAI request bodies: the prompt, the number of answers, and what is refused."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.errors import ApiError
from isochrone.wire.kv.kv_transfer import ENGINE_FIELDS, NESTED_FIELDS
from router.apis.openai.decode import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    RERANK,
    decode,
    with_system_first,
    without_transfer_fields,
)
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
def test_tools_are_the_beginning_of_the_prompt(rest: bytes, begins: bytes) -> None:
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
def test_each_choice_of_each_prompt_counts_as_an_answer(rest: bytes, count: int) -> None:
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
def test_an_error_names_the_field(body: bytes, param: str | None) -> None:
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
        b'{"type":"text","text":"x","audio_url":{"url":"http://localhost:9100/metrics"}}',
    ],
)
def test_a_url_that_an_engine_would_fetch_is_refused(part: bytes) -> None:
    with pytest.raises(ApiError, match="other URLs are not fetched"):
        decode(CHATTED % part, CHAT)


def test_a_data_url_is_accepted_and_messages_to_embed_are_not() -> None:
    image = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AA==","detail":"low"}}'
    decode(CHATTED % (b'{"type":"text","text":"what is this?"},' + image), CHAT)
    decode(b'{"model":"m","input":"x"}', EMBEDDING)
    with pytest.raises(ApiError):
        # vLLM would embed `messages` instead of the `input` that the router has read.
        decode(b'{"model":"m","input":"x","messages":[]}', EMBEDDING)


def test_a_document_to_rank_has_text_and_no_parts() -> None:
    documents = b'{"model":"m","query":"q","documents":["a",{"text":"b","id":7%b}]}'
    decode(documents % b"", RERANK)
    link = b'{"type":"image_url","image_url":{"url":"http://169.254.169.254/latest/meta-data"}}'
    with pytest.raises(ApiError) as refused:
        # vLLM would read the parts instead of the text, and fetch what they link to.
        decode(documents % (b',"content":[' + link + b"]"), RERANK)
    assert refused.value.param == "documents[1].content"


@pytest.mark.parametrize("name", [*ENGINE_FIELDS, NESTED_FIELDS])
@pytest.mark.parametrize(
    ("decoder", "start"),
    [
        (CHAT, b'{"model":"m", "messages":[{"role":"user","content":"hi"}]'),
        (COMPLETION, b'{"model":"m", "prompt":"hi"'),
    ],
)
def test_only_a_body_with_a_field_of_engines_is_written_anew(
    decoder: msgspec.json.Decoder[Any], start: bytes, name: str
) -> None:
    plain = start + b"}"
    assert without_transfer_fields(plain, decode(plain, decoder)) is plain
    for value in (b"null", b"1", b'{"kv_transfer_params":1}'):
        body = start + b',"' + name.encode() + b'":' + value + b"}"
        sent = without_transfer_fields(body, decode(body, decoder))
        assert b"kv_transfer_params" not in sent
        assert (name.encode() in sent) is (name == NESTED_FIELDS)


@pytest.mark.parametrize(
    ("roles", "sent"),
    [
        (["user", "assistant", "tool", "user"], None),
        (["system", "user"], None),
        (["developer", "user"], [("system", "0"), ("user", "1")]),
        (["system", "developer", "user"], [("system", "0\n1"), ("user", "2")]),
        (["system", "user", "assistant", "system"], None),
        (["user", "assistant", "developer"], [("user", "0"), ("assistant", "1"), ("system", "2")]),
    ],
)
def test_instructions_are_one_system_message_at_the_beginning(
    roles: list[str], sent: list[tuple[str, str]] | None
) -> None:
    """Templates leave others out, or refuse them; any other body is sent as it is."""
    messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    body = msgspec.json.encode({"model": "m", "messages": messages, "seed": 7})
    written = with_system_first(body, decode(body, CHAT))
    if sent is None:
        assert written is body
        return
    fields = msgspec.json.decode(written)
    assert [(message["role"], message["content"]) for message in fields["messages"]] == sent
    assert (fields["model"], fields["seed"]) == ("m", 7)


def test_instructions_in_parts_are_joined_and_what_no_decoder_reads_stays() -> None:
    body = b"""{"model":"m","messages":[
        {"role":"developer","content":[{"type":"text","text":"a","x":1e999}]},
        {"role":"system","content":"b"},{"role":"system"},
        {"role":"assistant","content":null,"tool_calls":[{"y":1e999}]}]}"""
    written = with_system_first(body, decode(body, CHAT))
    first, second = msgspec.json.decode(written, type=MessagesOnly).messages
    assert bytes(first["role"]) == b'"system"'
    assert bytes(first["content"]) == (
        b'[{"type":"text","text":"a","x":1e999},{"type":"text","text":"b"}'
        b',{"type":"text","text":""}]'
    )
    assert bytes(second["tool_calls"]) == b'[{"y":1e999}]'


class MessagesOnly(msgspec.Struct):
    messages: list[dict[str, msgspec.Raw]]

"""Forms with a sound, the fields of requests for sounds and images, and what their answers used."""

from typing import Any

import msgspec
import pytest
from openai.types import image_generate_params
from openai.types.audio import (
    speech_create_params,
    transcription_create_params,
    translation_create_params,
)

from isochrone.wire.errors import ApiError
from isochrone.wire.models.model import KIND_FEATURES
from router.apis.media.multipart import PARTS_MAX, read_form
from router.apis.media.schema import (
    ImageRequest,
    SpeechRequest,
    TranscriptionRequest,
    TranslationRequest,
)
from router.apis.openai.surface import ROUTES_OF_KINDS
from router.dataplane.media_relay import MediaRelay
from router.dataplane.media_usage import media_usage
from router.dataplane.usage import UsageCount

TYPE = "multipart/form-data; boundary=b"


def part(name: str, value: bytes, extra: str = "") -> bytes:
    disposition = f'Content-Disposition: form-data; name="{name}"{extra}'
    return b"--b\r\n" + disposition.encode() + b"\r\n\r\n" + value + b"\r\n"


FILE = part("file", b"\0\r\n--x\r\n", '; filename="a.wav"\r\nContent-Type: audio/wav')
END = b"--b--\r\n"


def test_a_form_is_read() -> None:
    body = part("model", "größe".encode()) + FILE + part("t[]", b"a") + part("t[]", b"b") + END
    form = read_form(TYPE, body)
    assert form.fields == {"model": ["größe"], "t[]": ["a", "b"]}
    assert (form.file_field, form.file_name, form.file_bytes) == ("file", "a.wav", 8)
    assert read_form(TYPE, FILE[: FILE.index(b"\0")] + END).file_bytes == 0
    quoted = read_form('Multipart/Form-Data; boundary="b"', body.rstrip())
    assert quoted == form


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "does not begin"),
        (b"hello\r\n" + FILE + END, "does not begin"),
        (FILE, "not followed|no end"),
        (FILE[:-2], "no end"),
        (FILE + END + b"more", "more behind"),
        (FILE + FILE + END, "two files"),
        (part("model", b"a") + part("model", b"b") + END, "'model' appears twice"),
        (part("model", b"\xff") + END, "not UTF-8"),
        (part("model", b"x" * 70_000) + END, "more than 65536 bytes"),
        (part("model", b"x", "\r\nContent-Transfer-Encoding: base64") + END, "has the header"),
        (part("model", b"x", "\r\ncontent-disposition: form-data; name=y") + END, "no single"),
        (part("model", b"x", "; filename*=utf-8''x") + END, "no single"),
        (part('a"b', b"x") + END, "no single"),
        (b"--b\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END, "no name"),
        (b"--b\r\n" + b"x" * 2000, "no head"),
        (b"--bx\r\n\r\n\r\n--b--", "not followed"),
        (part("a[]", b"1") * (PARTS_MAX + 1) + END, "more than 64 parts"),
    ],
)
def test_an_ambiguous_form_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(ApiError, match=reason):
        read_form(TYPE, body)


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", TYPE + "; charset=x", TYPE + "\n", TYPE * 9],
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(ApiError, match="content type"):
        read_form(content_type, FILE + END)


@pytest.mark.parametrize(
    ("kind", "params", "refused"),
    [
        (
            TranscriptionRequest,
            transcription_create_params.TranscriptionCreateParamsBase,
            {"file"},
        ),
        (TranslationRequest, translation_create_params.TranslationCreateParams, {"file"}),
        (SpeechRequest, speech_create_params.SpeechCreateParams, set()),
        (
            ImageRequest,
            image_generate_params.ImageGenerateParamsBase,
            {"complexity", "frame_count", "frame_duration_ms", "safety_identifier", "svg"},
        ),
    ],
)
def test_each_field_of_the_sdk_is_decided(kind: Any, params: Any, refused: set[str]) -> None:
    """`refused` are unknown to the struct, which names them; a file is read apart."""
    known = {field.encode_name.removesuffix("[]") for field in msgspec.structs.fields(kind)}
    assert set(params.__annotations__) - known == refused


@pytest.mark.parametrize(
    ("body", "content_type", "used"),
    [
        (b'{"text":"a","usage":{"type":"duration","seconds":3}}', "application/json", (150, 0)),
        (b'{"usage":{"input_tokens":5,"output_tokens":7}}', "application/json", (5, 7)),
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":7}}', "application/json", (5, 7)),
        (b'{"text":"a"}', "application/json; charset=utf-8", (9, 0)),
        (b'{"usage":{"input_tokens":-5}}', "application/json", (9, 0)),
        (b'{"usage":[[[', "application/json", (9, 0)),
        (b"some words", "text/plain", (9, 2)),
    ],
)
def test_usage_is_read_or_estimated(body: bytes, content_type: str, used: tuple[int, int]) -> None:
    assert media_usage(body, content_type, 9) == UsageCount(used[0], used[1], 0)


def test_a_stream_is_relayed_unchanged_and_its_last_usage_is_read() -> None:
    relay = MediaRelay()
    done = b'data: {"type":"transcript.text.done","usage":{"type":"duration","seconds":2}}\n\n'
    for piece in (b"data: " + b"x" * 9000, done[:30], done[30:]):
        assert relay.feed(piece) == piece
    assert (relay.is_over, relay.usage) == (False, None)
    relay.end_of_body()
    assert (relay.is_done, relay.usage) == (True, UsageCount(100, 0, 0))


def test_a_lost_engine_is_no_end() -> None:
    relay = MediaRelay()
    relay.feed(b'data: {"error":{"code":"engine_lost","message":"the engine failed"}}\n\n')
    relay.end_of_body()
    assert (relay.is_done, relay.has_failed, relay.is_engine_lost) == (False, True, True)


def test_each_kind_of_model_has_a_route() -> None:
    assert ROUTES_OF_KINDS.keys() == KIND_FEATURES.keys()

"""Every field of the official SDK's request types is honoured, accepted or refused by decision."""

import json
from typing import Any, get_args

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from openai.types.shared_params.reasoning_effort import ReasoningEffort as SdkReasoningEffort

from isochrone.wire.errors import ApiError
from isochrone.wire.http.public_bodies import ReasoningEffort
from router.apis.openai.decode import CHAT, decode, refuse_storing
from router.apis.openai.schema import ChatRequest
from router.apis.responses.translate import RESPONSES_REQUEST, ResponsesRequest, to_chat
from tests.chat_fields import CHAT_TYPES

CHANGES_NO_ANSWER = {
    *("user", "metadata", "safety_identifier"),
    *("prompt_cache_retention", "prompt_cache_options"),
}
BY_THE_ENGINE = {
    *("logit_bias", "logprobs", "top_logprobs", "parallel_tool_calls", "prediction"),
    *("reasoning_effort", "response_format", "tool_choice"),
}
"""Fields that engines honour, or refuse if they do not have them."""

REFUSED: dict[str, Any] = {
    "audio": {"voice": "any", "format": "wav"},
    "function_call": "auto",
    "functions": [{"name": "f"}],
    "modalities": ["text", "audio"],
    "moderation": {},
    "service_tier": "priority",
    "verbosity": "low",
    "web_search_options": {},
}
"""A value of each field that is refused. `store` is refused if it is true."""

REFUSED_RESPONSES: dict[str, Any] = {
    "access_programs": [],
    "context_management": [],
    "image": {},
    "include": ["message.output_text.logprobs"],
    "moderation": {},
    "reasoning": {"summary": "concise"},
    "service_tier": "priority",
    "stream_options": {"include_obfuscation": True},
    "text": {"verbosity": "high"},
    "unheard_of": 1,
}


def test_each_field_of_a_chat_is_decided() -> None:
    fields = chat_create_params.CompletionCreateParamsBase.__annotations__.keys()
    assert fields <= {*ChatRequest.__struct_fields__} | CHANGES_NO_ANSWER | BY_THE_ENGINE


def test_each_field_of_a_response_is_decided() -> None:
    fields = response_create_params.ResponseCreateParamsBase.__annotations__.keys()
    assert fields <= {*ResponsesRequest.__struct_fields__}


@pytest.mark.parametrize(
    ("kind", "decided"), CHAT_TYPES, ids=[kind.__name__ for kind, _ in CHAT_TYPES]
)
def test_each_field_within_a_chat_is_decided(kind: Any, decided: frozenset[str]) -> None:
    assert kind.__annotations__.keys() - decided == set(), "decide these: honoured or refused"


def test_completions_and_embeddings_have_no_new_fields() -> None:
    completion = completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    assert completion - {*ChatRequest.__struct_fields__} <= {
        *("prompt", "best_of", "echo", "suffix", "logit_bias", "logprobs", "user"),
    }
    embedding = embedding_create_params.EmbeddingCreateParams.__annotations__.keys()
    assert embedding <= {"input", "model", "dimensions", "encoding_format", "user"}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_of_a_chat_that_no_engine_has_is_refused_by_name(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    decode(json.dumps({**body, field: None}).encode(), CHAT)
    with pytest.raises(ApiError, match=f"cannot use field '{field}") as refused:
        decode(json.dumps({**body, field: REFUSED[field]}).encode(), CHAT)
    assert (refused.value.param or "").startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_processor_kwargs", {"min_pixels": 10**9}),
        ("media_io_kwargs", {"video": {"num_frames": -1}}),
    ],
)
def test_options_that_would_undo_the_limit_of_pixels_are_refused(field: str, value: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], field: value}
    with pytest.raises(ApiError, match=f"cannot use field '{field}'"):
        decode(json.dumps(body).encode(), CHAT)


@pytest.mark.parametrize("name", ["uuid", "video_url"])
def test_a_part_that_the_limits_of_images_do_not_hold_is_refused(name: str) -> None:
    """A name in a cache that tenants share, and a video, which may be a list of images."""
    part = {"type": "image_url", name: "data:video/jpeg;base64,AAAA"}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    with pytest.raises(ApiError) as refused:
        decode(json.dumps(body).encode(), CHAT)
    assert refused.value.param == f"messages[0].content[0].{name}"


@pytest.mark.parametrize("field", REFUSED_RESPONSES)
def test_a_field_of_a_response_that_is_not_honoured_is_refused_by_name(field: str) -> None:
    body = {"model": "m", "input": "a", field: REFUSED_RESPONSES[field]}
    with pytest.raises(ApiError, match=f"cannot use field '{field}") as refused:
        to_chat(decode(json.dumps(body).encode(), RESPONSES_REQUEST))
    assert (refused.value.param or "").startswith(field)


def test_a_reasoning_effort_is_one_of_openais() -> None:
    assert get_args(SdkReasoningEffort)[0] == ReasoningEffort
    body = {"model": "m", "input": "a", "reasoning": {"effort": "extreme"}}
    words = "cannot use field 'reasoning.effort': 'extreme' is not one of 'high', 'low', 'max'"
    with pytest.raises(ApiError, match=words):
        decode(json.dumps(body).encode(), RESPONSES_REQUEST)


def test_only_storing_is_refused() -> None:
    refuse_storing(None)
    refuse_storing(False)
    with pytest.raises(ApiError, match="answers are not stored"):
        refuse_storing(True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "cannot use the request body: it is empty, or its JSON ends early"),
        (b"{", "cannot use the request body: it is empty, or its JSON ends early"),
        (b"{x", "cannot use the request body: JSON is malformed: object keys must be strings"),
        (b"[]", "cannot use the request body: expected `object`, got `array`"),
    ],
)
def test_a_body_that_is_no_json_object_is_described(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode(body, CHAT)
    assert refused.value.message.startswith(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream_options.include_obfuscation", {"stream_options": {"include_obfuscation": True}}),
        ("options.x", {"options": {"rejectIfBusy": True, "x": 1}}),
    ],
)
def test_an_option_that_does_not_exist_is_refused(field: str, value: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **value}
    with pytest.raises(ApiError) as refused:
        decode(json.dumps(body).encode(), CHAT)
    assert refused.value.param == field

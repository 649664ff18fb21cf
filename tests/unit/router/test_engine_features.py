"""A request that uses what the deployment's engine lacks is refused before it is sent."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.engines.engine_capabilities import lacking_features
from isochrone.wire.errors import ApiError
from isochrone.wire.ids import DeploymentId, ModelId
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.openai.engine_features import refuse_lacking

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
LACKS = ("embeddings", "forced_tools", "strict_tools", "structured_output", "logprobs", "images")


def an_entry(*lacks: str) -> DeploymentEntry:
    return DeploymentEntry(
        deployment_id=DeploymentId("d"),
        name="tiny",
        model_id=ModelId("m"),
        context_tokens=100,
        engine="tensorrt_llm",
        engine_lacks=lacks,
    )


def chat(**fields: Any) -> bytes:
    message = {"role": "user", "content": "x"}
    return msgspec.json.encode({"model": "tiny", "messages": [message], **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{}], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [{}, {"type": "function", "function": {"strict": True}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
    ],
)
def test_a_lacking_feature_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError, match=r"'tiny'.*tensorrt_llm") as refused:
        refuse_lacking(an_entry(*LACKS), "/v1/chat/completions", chat(**fields))
    assert refused.value.param == param
    refuse_lacking(an_entry(), "/v1/chat/completions", chat(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{}], "tool_choice": "auto"},
        {"tools": [{"function": {"strict": False}}, {"function": {"strict": None}}]},
        {"tools": [{"function": {"strict": True}}], "tool_choice": "none"},
        {"tools": [{"function": "of a wrong type"}, "neither"]},
        {"response_format": {"type": "text"}},
        {"logprobs": False, "n": 2, "seed": 1},
        {"logprobs": "of a wrong type"},
    ],
)
def test_other_requests_pass(fields: dict[str, Any]) -> None:
    refuse_lacking(an_entry(*LACKS), "/v1/chat/completions", chat(**fields))


def test_logprobs_of_completions_are_a_feature_of_their_own() -> None:
    entry = an_entry("completion_logprobs")
    body = msgspec.json.encode({"model": "tiny", "prompt": "x", "logprobs": 1})
    with pytest.raises(ApiError, match="of a completion") as refused:
        refuse_lacking(entry, "/v1/completions", body)
    assert refused.value.param == "logprobs"
    refuse_lacking(entry, "/v1/chat/completions", chat(logprobs=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2}, "n"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": [[1, 2], [3]]}, "prompt"),
        ({"echo": False, "n": 1, "best_of": 1}, ""),
        ({"echo": None, "best_of": None}, ""),
        ({"prompt": [1, 2]}, ""),
        ({"prompt": ["x"]}, ""),
    ],
)
def test_what_an_engine_would_ignore_of_a_completion_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    """llama.cpp ignores these fields, or counts only one of the answers."""
    entry = an_entry(*lacking_features("llama_cpp"))
    body = msgspec.json.encode({"model": "tiny", "prompt": "x", **fields})
    if not param:
        refuse_lacking(entry, "/v1/completions", body)
        return
    with pytest.raises(ApiError, match=f"`{param}`") as refused:
        refuse_lacking(entry, "/v1/completions", body)
    assert refused.value.param == param
    # Of a chat, vLLM and llama.cpp answer with the beginning of a continued message.
    refuse_lacking(entry, "/v1/chat/completions", chat(echo=True))


def test_a_lacking_surface_is_refused() -> None:
    with pytest.raises(ApiError, match="/v1/embeddings"):
        refuse_lacking(an_entry(*LACKS), "/v1/embeddings", b"{}")

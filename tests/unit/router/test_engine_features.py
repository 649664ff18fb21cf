"""A request that uses what the deployment's engine lacks is refused before it is sent."""

from typing import Any

import msgspec
import pytest

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import DeploymentId, ModelId
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.openai.engine_features import refuse_lacking

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
LACKS = ("embeddings", "forced_tools", "structured_output", "logprobs", "images")


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
        {"response_format": {"type": "text"}},
        {"logprobs": False, "n": 2, "seed": 1},
        {"logprobs": "of a wrong type"},
    ],
)
def test_other_requests_pass(fields: dict[str, Any]) -> None:
    refuse_lacking(an_entry(*LACKS), "/v1/chat/completions", chat(**fields))


def test_a_lacking_surface_is_refused() -> None:
    with pytest.raises(ApiError, match="/v1/embeddings"):
        refuse_lacking(an_entry(*LACKS), "/v1/embeddings", b"{}")

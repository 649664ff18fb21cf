"""Refuses requests that use a feature the deployment's engine lacks, before they are sent anywhere.

Each deployment of the route table lists the features that its engine lacks
(`engine_capabilities.py`). The body is read a second time only if the list is not empty.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from isochrone.wire.engines.engine_capabilities import FEATURES
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.openai.schema import (
    CHAT_PATH,
    CLASSIFY_PATH,
    COMPLETIONS_PATH,
    EMBEDDINGS_PATH,
    RERANK_PATH,
)

_SURFACES: Final[Mapping[str, str]] = {
    CHAT_PATH: "chat",
    COMPLETIONS_PATH: "completions",
    EMBEDDINGS_PATH: "embeddings",
    RERANK_PATH: "rerank",
    CLASSIFY_PATH: "classify",
}


class _UsedPart(msgspec.Struct, frozen=True):
    type: str = ""


class _UsedMessage(msgspec.Struct, frozen=True):
    content: str | list[_UsedPart] | None = None


class _UsedFormat(msgspec.Struct, frozen=True):
    type: str = ""


class _UsedFields(msgspec.Struct, frozen=True):
    """The fields of a request that some engines lack. Others are skipped."""

    messages: list[_UsedMessage] = []
    tools: list[msgspec.Raw] | None = None
    tool_choice: Any = None
    response_format: _UsedFormat | None = None
    logprobs: bool | int | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    prompt: Any = None

    def has_part(self, *kinds: str) -> bool:
        """Return True if a message has a part of one of these types."""
        return any(
            part.type in kinds
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
        )

    def has_several_prompts(self) -> bool:
        """Return True for a list of texts, or of lists of tokens."""
        prompts = self.prompt if isinstance(self.prompt, list) else []
        return len(prompts) > 1 and not isinstance(prompts[0], int)


class _UsedFunction(msgspec.Struct, frozen=True):
    strict: bool | None = None


class _UsedTool(msgspec.Struct, frozen=True):
    function: _UsedFunction | None = None


_DECODER: Final = msgspec.json.Decoder(_UsedFields)
_TOOL_DECODER: Final = msgspec.json.Decoder(_UsedTool)


def _has_strict_tool(used: _UsedFields) -> bool:
    """Return True if the arguments of some function must follow its schema."""
    for tool in used.tools or ():
        try:
            function = _TOOL_DECODER.decode(tool).function
        except (ValueError, RecursionError):
            continue
        if function is not None and function.strict:
            return bool(used.tool_choice != "none")
    return False


_USES: Final[Mapping[str, tuple[str, Callable[[_UsedFields], bool]]]] = {
    "tools": ("tools", lambda used: bool(used.tools) and used.tool_choice != "none"),
    "forced_tools": (
        "tool_choice",
        lambda used: used.tool_choice == "required" or isinstance(used.tool_choice, dict),
    ),
    "strict_tools": ("tools", _has_strict_tool),
    "structured_output": (
        "response_format",
        lambda used: used.response_format is not None and used.response_format.type != "text",
    ),
    "logprobs": ("logprobs", lambda used: used.logprobs not in (None, False)),
    "completion_logprobs": (
        "logprobs",
        lambda used: used.prompt is not None and used.logprobs not in (None, False),
    ),
    "logit_bias": ("logit_bias", lambda used: bool(used.logit_bias)),
    "several_answers": ("n", lambda used: (used.n or 1) > 1),
    "several_prompts": ("prompt", lambda used: used.has_several_prompts()),
    "seed": ("seed", lambda used: used.seed is not None),
    "images": ("messages", lambda used: used.has_part("image_url", "input_image")),
    "audio": ("messages", lambda used: used.has_part("audio_url", "input_audio")),
    "suffix": ("suffix", lambda used: bool(used.suffix)),
    "echo": ("echo", lambda used: used.prompt is not None and bool(used.echo)),
    "best_of": ("best_of", lambda used: (used.best_of or 1) > (used.n or 1)),
}
"""For each feature, the field that uses it, and whether a request does."""


def refuse_lacking(deployment: DeploymentEntry, path: str, body: bytes) -> None:
    """Raise ApiError 400 if a request uses what the deployment's engine lacks."""
    lacks = deployment.engine_lacks
    if not lacks:
        return
    refuse_lacking_route(deployment, _SURFACES.get(path, ""))
    # Other fields of a wrong type are the engine's to refuse.
    try:
        used = _DECODER.decode(body)
    except (ValueError, RecursionError):
        return
    for feature in lacks:
        if feature in _USES:
            field, uses = _USES[feature]
            if uses(used):
                raise _refusal(deployment, feature, field)


def refuse_lacking_route(deployment: DeploymentEntry, feature: str) -> None:
    """Raise ApiError 400 if the deployment's engine lacks a route."""
    if feature in deployment.engine_lacks:
        raise _refusal(deployment, feature, "model")


def _refusal(deployment: DeploymentEntry, feature: str, field: str) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_REQUEST,
        f"cannot use {FEATURES[feature]} with the model {deployment.name!r}: its engine"
        f" ({deployment.engine}) does not have it; leave it out, or ask for another model",
        param=field,
    )

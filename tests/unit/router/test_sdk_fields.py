"""Every parameter of every route that the official SDKs call is decided, however deep it lies.

`test_conformance.py` decides the fields of the inference routes and sends each of them. Here are
the other routes, and the types within a response's input: what no struct of ours has is refused by
its name, and a parameter that is new in an SDK fails the test until someone decides.
"""

import json
from collections.abc import Collection
from typing import Any, Final, get_args

import msgspec
import pytest
from anthropic.types import model_list_params as anthropic_model_list
from cloudflare.types import ai
from cloudflare.types.ai import ai_run_params, finetunes
from cloudflare.types.ai import models as ai_models
from openai.types import (
    batch_create_params,
    batch_list_params,
    file_create_params,
    file_list_params,
    moderation_create_params,
    responses,
    shared_params,
)
from openai.types.conversations import (
    conversation_create_params,
    conversation_update_params,
    item_create_params,
    item_list_params,
    item_retrieve_params,
)
from openai.types.responses import (
    easy_input_message_param,
    input_item_list_params,
    response_input_item_param,
    response_reasoning_item_param,
    response_retrieve_params,
)

from isochrone.wire.errors import ApiError
from router.apis.document.routes import ROUTES
from router.apis.openai.decode import decode
from router.apis.responses import tools, translate
from router.apis.responses.translate import RESPONSES_REQUEST

INCLUDE: Final = frozenset({"include"})
"""Refused by stored_routes.py, except what each stored item has."""

BY_THE_SDK: Final = frozenset({"account_id", "conversation_id"})
"""Parts of the path."""

HANDLED: Final[dict[tuple[str, str], tuple[Any, Collection[str]]]] = {
    ("POST", "/v1/files"): (file_create_params.FileCreateParams, {"expires_after"}),
    ("GET", "/v1/files"): (file_list_params.FileListParams, ()),
    ("POST", "/v1/batches"): (batch_create_params.BatchCreateParams, ()),
    ("GET", "/v1/batches"): (batch_list_params.BatchListParams, ()),
    ("GET", "/v1/responses/{response_id}"): (
        response_retrieve_params.ResponseRetrieveParamsStreaming,
        INCLUDE | {"include_obfuscation"},
    ),
    ("GET", "/v1/responses/{response_id}/input_items"): (
        input_item_list_params.InputItemListParams,
        INCLUDE,
    ),
    ("POST", "/v1/conversations"): (conversation_create_params.ConversationCreateParams, ()),
    ("POST", "/v1/conversations/{conversation_id}"): (
        conversation_update_params.ConversationUpdateParams,
        (),
    ),
    ("POST", "/v1/conversations/{conversation_id}/items"): (
        item_create_params.ItemCreateParams,
        INCLUDE,
    ),
    ("GET", "/v1/conversations/{conversation_id}/items"): (
        item_list_params.ItemListParams,
        INCLUDE,
    ),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): (
        item_retrieve_params.ItemRetrieveParams,
        INCLUDE,
    ),
    ("POST", "/v1/moderations"): (moderation_create_params.ModerationCreateParams, ()),
    ("GET", "/v1/models"): (
        anthropic_model_list.ModelListParams,
        # The first four are honoured with Anthropic's header, and a workspace changes no list.
        {"after_id", "before_id", "lifecycle", "limit", "workspace_id"},
    ),
    ("GET", "/ai/models/search"): (ai.ModelListParams, {"format"}),
    ("GET", "/ai/models/schema"): (ai_models.SchemaGetParams, ()),
    ("POST", "/ai/tomarkdown"): (ai.to_markdown_transform_params.File, ()),
    ("POST", "/ai/finetunes"): (ai.FinetuneCreateParams, ()),
    ("GET", "/ai/finetunes/public"): (finetunes.PublicListParams, ()),
    ("POST", "/ai/finetunes/{finetune}/finetune-assets"): (finetunes.AssetCreateParams, ()),
}
"""By route: the parameters of the SDK, and those of them that code beside the route's structs
honours (a form's field in brackets) or refuses by name."""

ELSEWHERE: Final = {
    "POST /ai/run/{model}": "test_conformance.py, and RUN_KINDS",
    **{
        f"POST {path}": "test_conformance.py"
        for path in (
            *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
            *("/v1/messages", "/v1/messages/count_tokens", "/v1/responses/input_tokens"),
        )
    },
    **{
        f"POST {path}": "test_media.py"
        for path in (
            *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
            "/v1/images/generations",
        )
    },
    **{f"GET /ai/{kind}/search": "no SDK has its paging" for kind in ("tasks", "authors")},
    **{f"POST {path}": "no SDK has it" for path in ("/v1/rerank", "/classify")},
}

RUN_KINDS: Final = {
    *("Prompt", "Messages", "Translation", "Summarization"),
    *("TextEmbeddings", "TextClassification"),
    # Refused: no task that a deployment has, or another route has it.
    *("TextToImage", "TextToSpeech", "AutomaticSpeechRecognition", "ImageClassification"),
    *("ObjectDetection", "ImageToText", "Variant12", "Variant13", "MultimodalEmbeddings"),
}
"""The kinds of requests of `/ai/run` in Cloudflare's SDK."""


def known_to(route: Any) -> set[str]:
    """Return the parameters that a route's structs have, with `_` for Cloudflare's capitals."""
    bodies = route.body if isinstance(route.body, tuple) else (route.body,)
    structs = [kind for kind in bodies if kind is not None]
    names = {*route.files, *route.fields}
    if isinstance(route.query, dict):
        names |= route.query.keys()
    elif route.query is not None:
        structs.append(route.query)
    for kind in structs:
        names |= {field.encode_name for field in msgspec.structs.fields(kind)}
    return {"".join(f"_{c.lower()}" if c.isupper() else c for c in name) for name in names}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_each_parameter_of_a_route_is_decided(route: Any) -> None:
    if f"{route.method} {route.path}" in ELSEWHERE:
        return
    params, beside = HANDLED.get((route.method, route.path), (None, ()))
    if params is None:
        assert (route.body, route.query, route.files) == (None, None, ()), "name its SDK's type"
        return
    given = set(params.__annotations__) - BY_THE_SDK
    assert given - known_to(route) == set(beside), "decide these: honoured or refused"


def test_each_kind_of_run_is_decided() -> None:
    assert {kind.__name__ for kind in get_args(ai_run_params.AIRunParams)} == RUN_KINDS
    assert set(ai_run_params.TextEmbeddings.__annotations__) == {"account_id", "text"}
    assert set(ai_run_params.TextClassification.__annotations__) == {"account_id", "text"}


_ITEM: Final = response_input_item_param
WITHIN: Final = (
    (tools.FunctionTool, responses.FunctionToolParam),
    (tools.NamespaceTool, responses.NamespaceToolParam),
    (translate.NamedToolChoice, responses.ToolChoiceFunctionParam),
    (translate.TextSettings, responses.ResponseTextConfigParam),
    (translate.TextFormat, responses.ResponseFormatTextJSONSchemaConfigParam),
    (translate.ReasoningSettings, shared_params.Reasoning),
    (translate.SummaryPart, response_reasoning_item_param.Summary),
    (translate.ContentPart, responses.ResponseInputTextParam),
    (translate.ContentPart, responses.ResponseInputImageParam),
    (translate.ContentPart, responses.ResponseOutputTextParam),
    (translate.ContentPart, responses.ResponseOutputRefusalParam),
    (translate.InputItem, easy_input_message_param.EasyInputMessageParam),
    (translate.InputItem, _ITEM.Message),
    (translate.InputItem, _ITEM.FunctionCallOutput),
    (translate.InputItem, responses.ResponseOutputMessageParam),
    (translate.InputItem, responses.ResponseFunctionToolCallParam),
    (translate.InputItem, responses.ResponseReasoningItemParam),
    (translate.ConversationReference, responses.ResponseConversationParam),
)


@pytest.mark.parametrize(("kind", "params"), WITHIN)
def test_each_field_within_a_response_is_decided(kind: Any, params: Any) -> None:
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    known.add(kind.__struct_config__.tag_field)
    assert set(params.__annotations__) - known == set(), "decide these: honoured or refused"
    assert kind.__struct_config__.forbid_unknown_fields


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools[0].defer_loading", {"tools": [{"type": "function", "defer_loading": True}]}),
        ("tools[0].output_schema", {"tools": [{"type": "function", "output_schema": {}}]}),
        ("tools[0].new", {"tools": [{"type": "function", "name": "f", "new": 1}]}),
        ("reasoning.context", {"reasoning": {"context": "all_turns"}}),
        ("reasoning.summary", {"reasoning": {"summary": "concise"}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("text.new", {"text": {"new": 1}}),
        ("text.format.new", {"text": {"format": {"type": "text", "new": 1}}}),
        ("input[0].phase", {"input": [{"role": "assistant", "content": "a", "phase": "b"}]}),
        ("input[0].name_", {"input": [{"role": "user", "content": "a", "name_": "b"}]}),
        (
            "input[0].content[0].new",
            {
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "", "new": 1}]}
                ]
            },
        ),
    ],
)
def test_a_field_within_a_response_is_refused_by_name(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        decode(json.dumps({"model": "m", "input": "a", **body}).encode(), RESPONSES_REQUEST)
    assert (refused.value.param or "").startswith(field.partition("[")[0])
    assert field in refused.value.message

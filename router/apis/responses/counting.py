"""`POST /v1/responses/input_tokens`: how many tokens the input of a response has."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from router.apis.openai.decode import decode
from router.apis.openai.schema import ModelField
from router.apis.openai.surface import OpenAiSurface
from router.apis.responses.tools import Tool
from router.apis.responses.translate import (
    ITEMS_MAX,
    InputItem,
    NamedToolChoice,
    ReasoningSettings,
    ResponsesRequest,
    TextSettings,
    to_chat,
)
from router.apis.translating_writer import TranslatingWriter, read_token_count
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

INPUT_TOKENS_PATH: Final = "/v1/responses/input_tokens"


class InputTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses/input_tokens`: the fields of a response that make its prompt."""

    model: ModelField
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=ITEMS_MAX)]
    instructions: str | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    """No part of the prompt: the format is enforced while the answer is generated."""
    truncation: Literal["disabled"] | None = None
    conversation: None = None
    previous_response_id: None = None


INPUT_TOKENS_REQUEST: Final = msgspec.json.Decoder(InputTokensRequest)


def read_input_tokens_request(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return the request for the count, and a writer that translates it. Raises ApiError."""
    counted = decode(request.body, INPUT_TOKENS_REQUEST)
    chat = to_chat(
        ResponsesRequest(
            model=counted.model,
            input=counted.input,
            instructions=counted.instructions,
            tools=counted.tools,
            tool_choice=counted.tool_choice,
            reasoning=counted.reasoning,
        ),
        may_link=openai.may_link,
    )
    translating = TranslatingWriter(
        writer,
        translate_frame=bytes,
        translate_body=translate_input_tokens,
        # A refusal is in OpenAI's format already.
        translate_refusal=bytes,
    )
    return openai.read_count(request, chat, "input"), translating


def translate_input_tokens(body: bytes) -> bytes:
    """Translate an engine's count of tokens. Raises ApiError if there is none."""
    count = read_token_count(body)
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": count})

"""The fields of Anthropic's Messages API. No engine sees them, so unknown fields are refused.

Names are from Anthropic's API reference, "Messages". A field of type None accepts only null.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from router.apis.openai.schema import Fraction, ImageUrl, ModelField, TokenCount

MESSAGES_PATH: Final = "/v1/messages"
COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"
MESSAGES_MAX: Final = 10_000
BLOCKS_MAX: Final = 1024
TOOLS_MAX: Final = 1024
STOPS_MAX: Final = 16

EmptyList = Annotated[list[Any], Meta(max_length=0)]


class MessagesStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A struct of this API."""


class CacheControl(MessagesStruct, frozen=True):
    """`cache_control`: a hint. Every prefix is cached, and the oldest are evicted first."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class CacheableStruct(MessagesStruct, frozen=True, kw_only=True):
    """A struct that may have a `cache_control`."""

    cache_control: CacheControl | None = None


class TextBlock(CacheableStruct, frozen=True, tag="text"):
    """A block of text."""

    text: str
    citations: EmptyList | None = None


class Base64Image(MessagesStruct, frozen=True, tag="base64"):
    """An image within the request."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class LinkedImage(MessagesStruct, frozen=True, tag="url"):
    """An image in a `data:` URL, or a link for a router that fetches it."""

    url: ImageUrl


class ImageBlock(CacheableStruct, frozen=True, tag="image"):
    """An image, for engines that accept them."""

    source: Base64Image | LinkedImage
    transformations: None = None


class PlainTextSource(MessagesStruct, frozen=True, tag="text"):
    """The text of a document."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


class CitationSettings(MessagesStruct, frozen=True):
    """`citations`: no engine cites."""

    enabled: Literal[False] = False


class DocumentBlock(CacheableStruct, frozen=True, tag="document"):
    """A document of plain text, which becomes a part of the prompt."""

    source: PlainTextSource
    title: str | None = None
    context: str | None = None
    citations: CitationSettings | None = None


class ThinkingBlock(MessagesStruct, frozen=True, tag="thinking"):
    """The reasoning of an earlier answer."""

    thinking: str
    signature: str = ""


class DirectCaller(MessagesStruct, frozen=True):
    """The caller of a tool: the model itself, not a program that it wrote."""

    type: Literal["direct"]


class ToolUseBlock(CacheableStruct, frozen=True, tag="tool_use"):
    """A call of a tool in an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolReferenceBlock(CacheableStruct, frozen=True, tag="tool_reference"):
    """A deferred tool that a client's search has found: from here on the model may call it."""

    tool_name: str


class ToolResultBlock(CacheableStruct, frozen=True, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: (
        str
        | Annotated[
            list[TextBlock | ImageBlock | DocumentBlock | ToolReferenceBlock],
            Meta(max_length=BLOCKS_MAX),
        ]
        | None
    ) = None
    is_error: bool | None = None
    toolset_name: None = None


ContentBlock = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
)


class InputMessage(MessagesStruct, frozen=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=BLOCKS_MAX)]


class CustomTool(CacheableStruct, frozen=True):
    """A tool that the client runs. Anthropic's own tools (web search, bash) are refused."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    """Accepted: the input of every tool is streamed as it is generated."""
    defer_loading: bool | None = None
    """The model gets the tool only once a `tool_reference` names it."""
    allowed_callers: list[Literal["direct"]] | None = None


class AutoToolChoice(MessagesStruct, frozen=True, tag="auto"):
    """The model decides."""

    disable_parallel_tool_use: bool | None = None


class AnyToolChoice(MessagesStruct, frozen=True, tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NamedTool(MessagesStruct, frozen=True, tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(MessagesStruct, frozen=True, tag="none"):
    """The model must not call a tool."""


ThinkingDisplay = Literal["summarized", "omitted"] | None


class ThinkingEnabled(MessagesStruct, frozen=True, tag="enabled"):
    """A reasoning model is to reason. The limit of all output is `max_tokens`."""

    budget_tokens: Annotated[int, Meta(ge=1024, le=10_000_000)]
    display: ThinkingDisplay = None


class ThinkingAdaptive(MessagesStruct, frozen=True, tag="adaptive"):
    """A reasoning model is to reason as much as it finds necessary."""

    display: ThinkingDisplay = None


class ThinkingDisabled(MessagesStruct, frozen=True, tag="disabled"):
    """A reasoning model is to answer at once."""


class JsonOutput(MessagesStruct, frozen=True):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(MessagesStruct, frozen=True):
    """`output_config`: the effort of a reasoning model and the format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class MessagesMetadata(MessagesStruct, frozen=True):
    """`metadata`: changes no answer."""

    user_id: Annotated[str, Meta(max_length=512)] | None = None


class KeptThinking(MessagesStruct, frozen=True):
    """An edit that keeps the reasoning of all earlier answers, which is what happens anyway."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(MessagesStruct, frozen=True):
    """`context_management`, of which only edits that change nothing are accepted."""

    edits: Annotated[list[KeptThinking], Meta(max_length=16)] | None = None


class CountTokensRequest(CacheableStruct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`, and what `POST /v1/messages` has in common with it."""

    model: ModelField
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: str | Annotated[list[TextBlock], Meta(max_length=BLOCKS_MAX)] | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: AutoToolChoice | AnyToolChoice | NamedTool | NoToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: None = None
    workspace_id: None = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    diagnostics: None = None
    inference_geo: None = None
    mcp_servers: EmptyList | None = None


MESSAGES_REQUEST: Final = msgspec.json.Decoder(MessagesRequest)
COUNT_TOKENS_REQUEST: Final = msgspec.json.Decoder(CountTokensRequest)

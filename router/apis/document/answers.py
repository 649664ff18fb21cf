"""The types of the public API's answers, for its OpenAPI document.

Engines write most of these answers. A type names the fields that every engine sends; an answer may
have others.
"""

from typing import Any, Literal

import msgspec

FinishReason = str | None


class TokenUsage(msgspec.Struct):
    """The tokens that a request used."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class AnsweredMessage(msgspec.Struct):
    """The message that a model generated."""

    role: Literal["assistant"]
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class AnsweredChoice(msgspec.Struct):
    """One of the answers of a chat."""

    index: int
    message: AnsweredMessage
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None


class ChatAnswer(msgspec.Struct):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[AnsweredChoice]
    usage: TokenUsage | None = None


class CompletedText(msgspec.Struct):
    """One of the continuations of a prompt."""

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: dict[str, Any] | None = None


class CompletionAnswer(msgspec.Struct):
    """A completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletedText]
    usage: TokenUsage | None = None


class EmbeddedText(msgspec.Struct):
    """The vector of one input: numbers, or with `encoding_format: base64` their bytes."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(msgspec.Struct):
    """The vectors of the inputs."""

    object: Literal["list"]
    data: list[EmbeddedText]
    model: str
    usage: TokenUsage


class RankedDocument(msgspec.Struct):
    """The relevance of the document at `index`."""

    index: int
    relevance_score: float
    document: dict[str, Any] | str | None = None


class RerankAnswer(msgspec.Struct):
    """Documents, the most relevant first."""

    model: str
    results: list[RankedDocument]


class ModerationResult(msgspec.Struct):
    """The moderation of one input."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[str]]


class ModerationAnswer(msgspec.Struct):
    """The moderation of all inputs."""

    id: str
    model: str
    results: list[ModerationResult]


class ResponseAnswer(msgspec.Struct):
    """OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: float
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    output: list[dict[str, Any]]
    error: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None


class MessageAnswer(msgspec.Struct):
    """Anthropic's message object."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: dict[str, Any]
    stop_sequence: str | None = None


class TokenCountAnswer(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


class InputTokensAnswer(msgspec.Struct):
    """The number of tokens of a response's input."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class TranscriptionAnswer(msgspec.Struct):
    """The text of a sound."""

    text: str
    usage: dict[str, Any] | None = None


class GeneratedImage(msgspec.Struct):
    """One image."""

    b64_json: str


class ImageAnswer(msgspec.Struct):
    """Generated images."""

    created: int
    data: list[GeneratedImage]


class ModelPrice(msgspec.Struct):
    """The price of a million tokens."""

    prompt_per_million: float
    cached_per_million: float
    output_per_million: float


class ListedModel(msgspec.Struct):
    """A deployment that a key may use."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: str
    context_window: int
    price: ModelPrice | None


class ModelListAnswer(msgspec.Struct):
    """The deployments that a key may use."""

    object: Literal["list"]
    data: list[ListedModel]


class DescribedFile(msgspec.Struct):
    """OpenAI's object of a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str
    expires_at: int | None = None


class DescribedBatch(msgspec.Struct):
    """OpenAI's object of a batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    status: str
    input_file_id: str
    completion_window: str
    created_at: int
    request_counts: dict[str, int]
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, str] | None = None


class DescribedConversation(msgspec.Struct):
    """OpenAI's object of a conversation."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str] | None


class ConversationItem(msgspec.Struct):
    """An item of a conversation or of a response's input."""

    id: str
    type: str


class DeletedObject(msgspec.Struct):
    """The deleted object."""

    id: str
    object: str
    deleted: bool


class DescribedAdapter(msgspec.Struct):
    """Workers AI's object of a LoRA adapter."""

    id: str
    model: str
    name: str
    description: str | None
    public: bool
    created_at: str
    modified_at: str


class ListedRunModel(msgspec.Struct):
    """Workers AI's object of a model."""

    id: str
    source: int
    name: str
    description: str
    task: dict[str, str]
    tags: list[str]
    properties: list[dict[str, Any]]


class NamedEntry(msgspec.Struct):
    """A task or an author."""

    id: str
    name: str


class ModelSchemas(msgspec.Struct):
    """The JSON Schemas of a model's input and output."""

    input: dict[str, Any]
    output: dict[str, Any]


class ConvertedFile(msgspec.Struct, rename={"mime_type": "mimeType"}):
    """A document as Markdown, or why it cannot be."""

    id: str
    name: str
    mime_type: str
    format: Literal["markdown", "error"]
    tokens: int | None = None
    data: str | None = None
    error: str | None = None


class ConvertibleFormat(msgspec.Struct, rename={"mime_type": "mimeType"}):
    """A format that can be converted."""

    extension: str
    mime_type: str


class HealthAnswer(msgspec.Struct):
    """Whether the router can serve."""

    status: Literal["ok", "no_table"]
    pop: str
    message: str | None = None


class OpenAiErrorFields(msgspec.Struct):
    """The error: `code` for programs, `message` for people."""

    message: str
    type: str
    code: str | int | None
    param: str | None


class OpenAiError(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: OpenAiErrorFields


class AnthropicErrorFields(msgspec.Struct):
    """The error: `type` for programs, `message` for people."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str | None = None


class WorkersAiErrorFields(msgspec.Struct):
    """The error: `code` for programs, `message` for people."""

    code: int
    message: str


class WorkersAiError(msgspec.Struct):
    """An error in Workers AI's envelope."""

    result: None
    success: Literal[False]
    errors: list[WorkersAiErrorFields]
    messages: list[Any]

"""Request bodies of chats and plain completions: decoded, checked, and read part by part.

Wrong types and values are refused with the field and the reason, and so are unknown fields: a
misspelt option must not be ignored.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.invalid_field import decode_public
from isochrone.wire.http.public_bodies import ReasoningEffort
from nodeagent.engine.server.openai.request_errors import invalid_request, unsupported_field
from nodeagent.engine.server.openai.structured_fields import StructuredOutputFields
from nodeagent.engine.server.openai.tool_fields import (
    ToolCallSpec,
    ToolChoice,
    ToolSpec,
    template_calls,
)

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptionsSpec(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's `stream_options`. Events are not padded."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class UnsupportedFields(StructuredOutputFields, kw_only=True):
    """Fields that other engines support and this one does not, with the value that changes nothing.

    Any other value is refused.
    """

    allowed_token_ids: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    documents: Any = None
    ebnf: Any = None
    echo: Any = False
    functions: Any = None
    grammar: Any = None
    guided_grammar: Any = None
    include_stop_str_in_output: Any = False
    json_schema: Any = None
    length_penalty: Any = 1
    logits_processors: Any = None
    mirostat: Any = 0
    no_stop_trim: Any = False
    prompt_logprobs: Any = None
    regex: Any = None
    repeat_penalty: Any = 1
    skip_special_tokens: Any = True
    suffix: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: Any = 1
    use_beam_search: Any = False
    web_search_options: Any = None


class AcceptedFields(UnsupportedFields, kw_only=True):
    """Fields that change no answer of this engine. Routers check those of OpenAI's."""

    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    store: Literal[False] | None = None
    service_tier: str | None = None
    moderation: None = None
    options: Any = None
    """The router's own options."""


_UNSUPPORTED_DEFAULTS: Final = UnsupportedFields()


class GenerationFields(AcceptedFields, kw_only=True):
    """The fields that chats and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionsSpec | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    n: Count | None = None
    speculate: bool | None = None
    """An extension of this engine: false turns speculation off. The output is the same."""


class MessageSpec(msgspec.Struct):
    """One message of a chat.

    Unknown fields are allowed, because clients send back answers of other servers as they are. A
    field without which the prompt would lack something is refused.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: Annotated[list[ToolCallSpec], Meta(max_length=1024)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    function_call: None = None
    audio: None = None


class PredictionSpec(msgspec.Struct):
    """Text that the client expects in the answer. The n-gram proposer drafts from it."""

    content: str | list[dict[str, Any]]
    type: Literal["content"] = "content"


class ChatBody(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[MessageSpec], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    """vLLM's field: the answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """vLLM's field: false only if the answer continues a message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's field: values for further variables of the chat template."""
    reasoning_effort: ReasoningEffort | None = None
    function_call: None = None
    verbosity: Literal["medium"] | None = None
    modalities: list[str] | None = None
    prediction: PredictionSpec | None = None


class CompletionBody(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[Any], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None


_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


def read_chat(body: bytes, bytes_max: int) -> ChatBody:
    """Decode a chat body and refuse unsupported fields. Raises ApiError."""
    chat: ChatBody = decode_body(body, _chat_decoder, bytes_max)
    _refuse_unsupported(chat)
    if set(chat.modalities or ()) - {"text"}:
        raise unsupported_field("modalities", "only 'text' is supported")
    if chat.add_generation_prompt is False and not chat.continue_final_message:
        reason = "false needs 'continue_final_message': true"
        raise unsupported_field("add_generation_prompt", reason)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid_request(
            "top_logprobs", "cannot use field 'top_logprobs': it needs 'logprobs': true"
        )
    return chat


def read_completion(body: bytes, bytes_max: int) -> CompletionBody:
    """Decode a completion body and refuse unsupported fields. Raises ApiError."""
    completion: CompletionBody = decode_body(body, _completion_decoder, bytes_max)
    _refuse_unsupported(completion)
    if completion.best_of not in (None, completion.n or 1):
        raise unsupported_field("best_of", "only the value of 'n' is supported")
    return completion


def completion_prompts(completion: CompletionBody) -> list[str | list[int]]:
    """Return the prompts, each as text or as token ids."""
    body_prompt: Any = completion.prompt
    prompts = (
        body_prompt
        if isinstance(body_prompt, list) and type(body_prompt[0]) is not int
        else [body_prompt]
    )
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not is_ids and not isinstance(prompt, str):
            raise invalid_request(
                "prompt",
                "cannot use field 'prompt': expected strings or lists of token ids",
            )
    return prompts


def template_messages(chat: ChatBody) -> list[dict[str, Any]]:
    """Return the messages in the form that chat templates expect, with text contents.

    With `continue_final_message` the last message is left out: see `answer_prefix`.
    """
    messages = chat.messages[:-1] if chat.continue_final_message else chat.messages
    return [_template_message(message) for message in messages]


def answer_prefix(chat: ChatBody) -> str:
    """Return the beginning of the answer that the client already has; empty if there is none.

    It follows the rendered prompt unchanged.
    """
    if not chat.continue_final_message:
        return ""
    last = chat.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise invalid_request(
            "continue_final_message",
            "cannot use field 'continue_final_message': the last message must be an assistant"
            " message without tool calls",
        )
    return _content_text(last.content)


def template_arguments(chat: ChatBody) -> dict[str, Any]:
    """Return the client's values for further variables of the chat template.

    As in vLLM, an effort switches thinking on, and `none` off, unless the client says otherwise.
    """
    effort = chat.reasoning_effort
    variables: dict[str, Any] = {}
    if effort is not None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return variables | (chat.chat_template_kwargs or {})


def predicted_text(chat: ChatBody) -> str:
    """Return the text that the client predicts; empty if there is none."""
    return _content_text(chat.prediction.content) if chat.prediction is not None else ""


def decode_body(body: bytes, decoder: Any, bytes_max: int) -> Any:
    """Decode a JSON body of at most `bytes_max` bytes, or raise ApiError naming the field."""
    if len(body) > bytes_max:
        message = f"cannot read body: {len(body)} bytes, the limit is {bytes_max}"
        raise ApiError(ErrorCode.INVALID_REQUEST, message)
    return decode_public(body, decoder)


def check_token_ids(param: str, ids: Iterable[int], size: int) -> None:
    """Raise ApiError if a token id is outside the vocabulary of `size` tokens."""
    outside = next((token for token in ids if not 0 <= token < size), None)
    if outside is not None:
        raise invalid_request(
            param,
            f"cannot use field '{param}': token id {outside} is not between 0 and {size - 1}",
        )


def _refuse_unsupported(body: GenerationFields) -> None:
    for name in UnsupportedFields.__annotations__:
        value, harmless = getattr(body, name), getattr(_UNSUPPORTED_DEFAULTS, name)
        if value not in (None, harmless, "", [], {}):
            raise unsupported_field(name)


TEXT_PARTS: Final = ("text", "refusal")
"""Types of content parts whose text is in the field of that name."""


def _content_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return a message's content as one text; refuse parts of other types."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get(part["type"]) for part in content if part.get("type") in TEXT_PARTS]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        reason = "only content parts of type 'text', with a text, are supported"
        raise unsupported_field("messages", reason)
    return "".join(str(text) for text in texts)


def _template_message(message: MessageSpec) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    content = _content_text(message.content) or message.refusal or ""
    entry: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        entry["tool_calls"] = template_calls(message.tool_calls)
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        entry["name"] = message.name
    if message.reasoning_content is not None:
        entry["reasoning_content"] = message.reasoning_content
    return entry

"""OpenAI request bodies, checked: wrong types and values are refused in words, unknown fields pass.

Rule: what the engine cannot do is refused, never silently ignored, where ignoring it would give
another answer than was asked for.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.codec import MalformedFrame, decode_json
from isochrone.wire.errors import ApiError, ErrorCode
from nodeagent.engine.sampling.sampler import SamplingParams
from nodeagent.engine.structured.grammar import Grammar
from nodeagent.engine.structured.request_grammar import Constrained, grammar_of
from nodeagent.engine.structured.request_grammar import refused as refused
from nodeagent.engine.tools.chat_tools import CallSpec, Choice, ToolSpec, calls_for_template

_STOPS_MAX: Final = 16
_STOP_CHARS_MAX: Final = 1024
_TEMPERATURE_LEAST: Final = 1e-5
"""Below this the division overflows, and the likeliest token is meant."""

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
TokenId = Annotated[int, Meta(ge=0, le=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct):
    """What a stream says besides its text."""

    include_usage: bool | None = None


class Lacked(Constrained, kw_only=True):
    """What other engines can and this one cannot; another value than the one here is refused."""

    add_generation_prompt: Any = True
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


_NOTHING_LACKED: Final = Lacked()


class Knobs(Lacked, kw_only=True):
    """The fields that chat and plain completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    """Ours: false turns drafts off. The output is the same with and without."""


class Message(msgspec.Struct):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: Annotated[list[CallSpec], Meta(max_length=1024)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class Prediction(msgspec.Struct):
    """Text that the caller expects to be much of the answer: drafts are taken from it too."""

    content: str | list[dict[str, Any]]
    type: Literal["content"] = "content"


class ChatBody(Knobs, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    """As vLLM names it: the last message is the assistant's and goes on."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As vLLM names it: what else the chat template asks about."""
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    prediction: Prediction | None = None


class CompletionBody(Knobs, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[Any], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a body asks for, in the engine's terms. The prompt is still to be tokenised."""

    params: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    grammar: Grammar | None = None
    speculate: bool = True
    choices: int = 1
    """How many answers there are to be to each prompt."""


_chat_decoder = msgspec.json.Decoder(ChatBody)
_completion_decoder = msgspec.json.Decoder(CompletionBody)


def read_chat(body: bytes, bytes_max: int) -> ChatBody:
    """Decode a chat body and refuse what the engine lacks."""
    chat: ChatBody = decoded(body, _chat_decoder, bytes_max)
    _refuse_lacked(chat)
    if set(chat.modalities or ()) - {"text"}:
        raise _unsupported("modalities", "modalities other than text are not supported")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise refused("top_logprobs", "cannot give top_logprobs: logprobs is not true")
    return chat


def read_completion(body: bytes, bytes_max: int) -> CompletionBody:
    """Decode a completion body and refuse what the engine lacks."""
    completion: CompletionBody = decoded(body, _completion_decoder, bytes_max)
    _refuse_lacked(completion)
    if completion.best_of not in (None, completion.n or 1):
        raise _unsupported("best_of", "best_of other than n is not supported by this engine")
    return completion


def prompts_of(completion: CompletionBody) -> list[str | list[int]]:
    """Return the prompts, each text or token ids."""
    given: Any = completion.prompt
    prompts = given if isinstance(given, list) and type(given[0]) is not int else [given]
    for prompt in prompts:
        ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not ids and not isinstance(prompt, str):
            raise refused(
                "prompt", "cannot read prompt: each must be a string or a list of token ids"
            )
    return prompts


def messages_of(chat: ChatBody) -> list[dict[str, Any]]:
    """Return the messages as a chat template expects them: text contents only.

    The beginning of an answer that goes on is none of them: it follows the prompt as it is.
    """
    messages = chat.messages[:-1] if chat.continue_final_message else chat.messages
    return [_message(message) for message in messages]


def begun_of(chat: ChatBody) -> str:
    """Return the beginning of the answer that the caller has already; empty where none."""
    if not chat.continue_final_message:
        return ""
    last = chat.messages[-1]
    if last.role != "assistant" or last.tool_calls:
        raise refused("continue_final_message", "cannot go on: the last message is no answer")
    return _text(last.content)


def wishes_of(chat: ChatBody) -> dict[str, Any]:
    """Return what the caller says of the chat template's own questions."""
    effort = {"reasoning_effort": chat.reasoning_effort} if chat.reasoning_effort else {}
    return {**effort, **(chat.chat_template_kwargs or {})}


def prediction_of(chat: ChatBody) -> str:
    """Return the text that the caller predicts; empty where none."""
    return _text(chat.prediction.content) if chat.prediction is not None else ""


def ask_of(body: ChatBody | CompletionBody) -> Ask:
    """Translate the fields that say how to generate."""
    if isinstance(body, ChatBody):
        max_tokens = body.max_completion_tokens or body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        # Sixteen is what OpenAI's plain completions default to.
        max_tokens = body.max_tokens or 16
        logprobs = body.logprobs
    temperature = 1.0 if body.temperature is None else body.temperature
    options = body.stream_options
    return Ask(
        params=SamplingParams(
            temperature=0.0 if temperature < _TEMPERATURE_LEAST else temperature,
            top_p=body.top_p or 1.0,
            top_k=max(body.top_k or 0, 0),
            min_p=body.min_p or 0.0,
            seed=body.seed,
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=_bias(body.logit_bias or {}),
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
        ),
        max_tokens=max_tokens,
        stops=_stops(body.stop),
        stop_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        grammar=grammar_of(body),
        speculate=body.speculate is not False,
        choices=body.n or 1,
    )


def decoded(body: bytes, decoder: Any, bytes_max: int) -> Any:
    """Return what a body holds; raises ApiError where it is not what `decoder` wants."""
    try:
        return decode_json(body, decoder, bytes_max=bytes_max)
    except MalformedFrame as error:
        raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error


def hold_to_vocabulary(param: str, ids: Iterable[int], size: int) -> None:
    """Refuse token ids that the model has no tokens for."""
    odd = next((token for token in ids if not 0 <= token < size), None)
    if odd is not None:
        raise refused(param, f"cannot use token {odd}: ids must lie between 0 and {size - 1}")


def unknown_model(name: str, served: str) -> ApiError:
    """Make the error for a name that is neither the model's nor an adapter's."""
    return ApiError(
        ErrorCode.MODEL_NOT_FOUND,
        f"cannot serve model {name[:200]!r}: this engine has {served}",
        param="model",
    )


def _refuse_lacked(body: Knobs) -> None:
    for name in Lacked.__annotations__:
        value, harmless = getattr(body, name), getattr(_NOTHING_LACKED, name)
        if value not in (None, harmless, "", [], {}):
            raise _unsupported(name, f"{name} is not supported by this engine")


def _unsupported(param: str, message: str) -> ApiError:
    return refused(param, f"cannot serve this request: {message}")


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content if part.get("type") == "text"]
    if len(texts) != len(content) or not all(isinstance(text, str) for text in texts):
        raise _unsupported("messages", "only text parts are supported in message contents")
    return "".join(str(text) for text in texts)


def _message(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if message.tool_calls:
        told["tool_calls"] = calls_for_template(message.tool_calls)
    if message.tool_call_id is not None:
        told["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        told["name"] = message.name
    if message.reasoning_content is not None:
        told["reasoning_content"] = message.reasoning_content
    return told


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > _STOPS_MAX or any(len(text) > _STOP_CHARS_MAX for text in stops):
        raise refused(
            "stop",
            f"cannot use stop: at most {_STOPS_MAX} strings of {_STOP_CHARS_MAX} characters are"
            " allowed",
        )
    return tuple(text for text in stops if text)


def _bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for token, value in bias.items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise refused("logit_bias", f"cannot use logit_bias: {token[:40]!r} is no token id")
        if not math.isfinite(value) or abs(value) > 100:
            raise refused(
                "logit_bias", f"cannot use logit_bias: {value} is not between -100 and 100"
            )
        pairs.append((int(token), value))
    return tuple(pairs)

"""OpenAI's request bodies for the mock engine: decoded, and refused where it cannot answer them."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.public_bodies import ReasoningEffort
from nodeagent.mock.engine import MockPrompt, MockRequest
from nodeagent.mock.json_schema import JsonSchema, UnsupportedSchemaError
from nodeagent.mock.scripted_calls import (
    MockPiece,
    MockTurn,
    call_pieces,
    scripted_reply,
    text_pieces,
)

CHAT_TOKENS_DEFAULT: Final = 256
COMPLETION_TOKENS_DEFAULT: Final = 16

ANSWERS_MAX: Final = 128
STOPS_MAX: Final = 16
TOP_LOGPROBS_MAX: Final = 20

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, msgspec.Meta(ge=0, le=TOP_LOGPROBS_MAX)]


class MockTextPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text parts are accepted."""

    type: str
    text: str = ""


class MockMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | tuple[MockTextPart, ...] | None = None
    tool_calls: list[Any] | None = None


class MockFunction(msgspec.Struct, frozen=True):
    """A function that may be called."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class MockTool(msgspec.Struct, frozen=True):
    """A tool that a request offers."""

    function: MockFunction
    type: Literal["function"] = "function"


class MockNamedFunction(msgspec.Struct, frozen=True):
    """The name of a function."""

    name: str


class MockNamedTool(msgspec.Struct, frozen=True):
    """A choice of the tool that must be called."""

    function: MockNamedFunction
    type: Literal["function"] = "function"


class MockFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that change no numbered token, and so are honoured by ignoring them."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: Penalty | None = None
    ignore_eos: bool | None = None
    metadata: Any = None
    options: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    presence_penalty: Penalty | None = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: ReasoningEffort | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    safety_identifier: Any = None
    seed: int | None = None
    service_tier: str | None = None
    store: Literal[False] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    tools: list[MockTool] | None = None
    """Called if the conversation says so (`scripted_calls.py`), or the request forces a call."""
    top_k: int | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    user: Any = None
    verbosity: Literal["medium"] | None = None
    modalities: list[Literal["text"]] | None = None


class MockRefusedFields(MockFields, frozen=True, kw_only=True):
    """Fields that the mock engine does not honour, with the values that ask for nothing."""

    audio: None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logit_bias: Annotated[dict[str, float], msgspec.Meta(max_length=0)] | None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    suffix: Literal[""] | None = None
    web_search_options: None = None


class MockNamedSchema(msgspec.Struct, frozen=True):
    """The schema that an answer must follow."""

    name: str
    schema: dict[str, Any] = {}


class MockFormat(msgspec.Struct, frozen=True):
    """The form of an answer. A schema is honoured by the smallest value that follows it."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: MockNamedSchema | None = None

    def answer(self) -> Sequence[MockPiece]:
        """Return an answer of this form, () if any text is one. Raises ApiError."""
        if self.type == "text":
            return ()
        value: Any = {}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise _invalid("json_schema is missing", "response_format")
            try:
                value = JsonSchema(self.json_schema.schema).example()
            except UnsupportedSchemaError as error:
                reason = f"the mock engine cannot answer in this form: {error}"
                raise _invalid(reason, "response_format") from None
        return text_pieces(msgspec.json.encode(value).decode())


class MockRequestBody(MockRefusedFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/chat/completions` with messages, or `POST /v1/completions` with a prompt.

    Misspelt fields are refused, so that a mistake of a router or a test shows.
    """

    messages: Annotated[tuple[MockMessage, ...], msgspec.Meta(min_length=1)] | None = None
    prompt: str | tuple[str | int | tuple[int, ...], ...] | None = None
    model: str = ""
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=ANSWERS_MAX)] | None = None
    stop: str | Annotated[tuple[str, ...], msgspec.Meta(max_length=STOPS_MAX)] | None = None
    logprobs: bool | TopLogprobs | None = None
    top_logprobs: TopLogprobs | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: MockFormat | None = None
    tool_choice: Literal["none", "auto", "required"] | MockNamedTool | None = None
    mock: dict[str, float] | None = None

    @property
    def alternatives(self) -> int | None:
        """The tokens whose probability is reported beside each token; None without
        probabilities."""
        if self.messages is not None:
            return (self.top_logprobs or 0) if self.logprobs else None
        return None if self.logprobs in (None, False) else int(self.logprobs)

    @property
    def callable_tools(self) -> dict[str, MockFunction]:
        """The functions that may be called, by name. Raises ApiError if the named one is absent."""
        functions = {tool.function.name: tool.function for tool in self.tools or ()}
        if self.tool_choice == "none":
            return {}
        if isinstance(self.tool_choice, MockNamedTool):
            name = self.tool_choice.function.name
            if name not in functions:
                raise _invalid(f"no tool has the name {name!r}", "tool_choice")
            return {name: functions[name]}
        return functions

    def reply(self) -> Sequence[MockPiece]:
        """Return the calls that the conversation scripts, a forced call, or the requested form.

        Otherwise return (). Raises ApiError if the requested call or form cannot follow its schema.
        """
        called = self._called()
        if any(piece.call for piece in called):
            return called
        return self.formatted() or called

    def formatted(self) -> Sequence[MockPiece]:
        """Return an answer of the requested form, () if any text is one. Raises ApiError."""
        return (self.response_format or MockFormat()).answer()

    def _called(self) -> Sequence[MockPiece]:
        functions = self.callable_tools
        is_forced = self.tool_choice not in (None, "none", "auto")
        if not functions:
            if is_forced:
                raise _invalid("there are no tools to call", "tool_choice")
            return ()
        turns = [
            MockTurn(message.role, _text(message), len(message.tool_calls or ()))
            for message in self.messages or ()
        ]
        in_parallel = self.parallel_tool_calls is not False
        pieces = scripted_reply(turns, functions.keys(), in_parallel=in_parallel)
        if is_forced and not any(piece.call for piece in pieces):
            pieces = call_pieces(0, *_example_call(next(iter(functions.values()))))
        for piece in pieces:
            if piece.opens_call and piece.call and functions[piece.call.name].strict:
                _check_call(functions[piece.call.name], piece.call.arguments)
        return pieces


_decoder = msgspec.json.Decoder(MockRequestBody)


def decode(data: bytes) -> MockRequestBody:
    """Decode a request body. Raises ApiError."""
    try:
        body = _decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise _invalid(str(error)) from error
    if body.top_logprobs is not None and not body.logprobs:
        raise _invalid("top_logprobs needs logprobs", "top_logprobs")
    return body


def mock_request(body: MockRequestBody, *, is_chat: bool, salt: str) -> MockRequest:
    """Translate a body into a request. Raises ApiError if it has no prompt.

    If the prompt, or the assistant's last message, ends in "t41", the answer begins with t42. In
    this way a resumed answer shows whether a token was lost or repeated. Any other answer begins
    with the number `first_token` of the field `mock`, so that a test can tell answers apart.
    """
    faults = dict(body.mock or {})
    first_token = int(faults.pop("first_token", 0))
    if is_chat:
        texts = [(message.role, _text(message)) for message in body.messages or ()]
        words = [word for role, text in texts for word in (role, *text.split())]
        resumed_text = texts[-1][1] if texts and texts[-1][0] == "assistant" else ""
        prompts = [MockPrompt(words, _first_token(resumed_text) or first_token)]
        max_tokens = body.max_completion_tokens or body.max_tokens or CHAT_TOKENS_DEFAULT
    else:
        prompts = _prompts(body.prompt)
        max_tokens = body.max_tokens or COMPLETION_TOKENS_DEFAULT
    if not all(prompt.words for prompt in prompts):
        raise _invalid("the prompt is empty", "messages" if is_chat else "prompt")
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    reply = body.reply() if is_chat else body.formatted()
    return MockRequest(prompts, body.n or 1, max_tokens, stop, salt, faults, reply=reply)


def _example_call(function: MockFunction) -> tuple[str, str]:
    """Return a call's name and arguments, which follow the schema. Raises ApiError."""
    try:
        arguments = JsonSchema(function.parameters or {}).example()
    except UnsupportedSchemaError as error:
        raise _invalid(f"the mock engine cannot call `{function.name}`: {error}", "tools") from None
    return function.name, msgspec.json.encode(arguments).decode()


def _check_call(function: MockFunction, arguments: str) -> None:
    """Raise ApiError if the arguments of a call do not follow the function's schema."""
    try:
        misfit = JsonSchema(function.parameters or {}).misfit(msgspec.json.decode(arguments))
    except UnsupportedSchemaError as error:
        misfit = str(error)
    if misfit:
        raise _invalid(f"`{function.name}` is strict: {misfit}", "messages")


def _first_token(resumed_text: str) -> int:
    last = resumed_text.split()[-1:]
    number = last[0].removeprefix("t") if last and last[0].startswith("t") else ""
    return int(number) + 1 if number.isdigit() else 0


def _text(message: MockMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    if any(part.type != "text" for part in message.content):
        raise _invalid("this model accepts only text content", "messages")
    return "".join(part.text for part in message.content)


def _prompts(prompt: str | tuple[str | int | tuple[int, ...], ...] | None) -> list[MockPrompt]:
    """Return a completion's prompts: one text or list of token ids, or several."""
    if not prompt:
        raise _invalid(
            "the prompt must be a text, a list of token ids, or a list of these", "prompt"
        )
    if isinstance(prompt, tuple) and all(isinstance(token, int) for token in prompt):
        return [MockPrompt([str(token) for token in prompt], 0)]
    found = []
    for part in (prompt,) if isinstance(prompt, str) else prompt:
        if isinstance(part, int):
            raise _invalid("the prompt mixes token ids and texts", "prompt")
        if isinstance(part, str):
            found.append(MockPrompt(part.split() or [""], _first_token(part)))
        else:
            found.append(MockPrompt([str(token) for token in part], 0))
    return found


def _invalid(reason: str, param: str | None = None) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot serve the request: {reason}", param=param)

"""The fields of OpenAI requests that the router reads or checks.

Unknown fields are allowed: the engine gets the original bytes and checks them. Fields of OpenAI
that no engine honours are refused here, so that all engines answer alike: a field of type None
accepts only null. `user`, `metadata`, `safety_identifier` and the other `prompt_cache_...` fields
have no effect (prefix caching need not be requested), so they are accepted.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from isochrone.wire.ids import DATA_URL_PATTERN, IMAGE_URL_PATTERN

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
RERANK_PATH: Final = "/v1/rerank"
CLASSIFY_PATH: Final = "/classify"
"""vLLM's route, to which `/v1/moderations` and Workers AI's classification are translated."""
TOKENIZE_PATH: Final = "/tokenize"
"""The path at which engines count the tokens of a chat. Clients use a surface's own route."""

ModelField = Annotated[str, Meta(min_length=1, max_length=128)]
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]
DataUrl = Annotated[str, Meta(pattern=DATA_URL_PATTERN)]
ImageUrl = Annotated[str, Meta(pattern=IMAGE_URL_PATTERN)]
"""Links are for routers that fetch them, see router/apis/linked_images."""
AnswerCount = Annotated[int, Meta(ge=1, le=16)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TextOrTokens = (
    str
    | Annotated[
        list[str | int | Annotated[list[int], Meta(max_length=1_000_000)]],
        Meta(min_length=1, max_length=1_000_000),
    ]
)
StopTexts = str | Annotated[list[str], Meta(max_length=16)]


class MediaReference(msgspec.Struct, frozen=True):
    """An image or audio in a `data:` URL.

    Other URLs are refused: an engine would fetch them from inside the fleet's network.
    """

    url: DataUrl


class MessagePart(msgspec.Struct, frozen=True):
    """One part of a message's content; the router uses only its text."""

    type: Annotated[str, Meta(max_length=32)]
    text: str | None = None
    image_url: DataUrl | MediaReference | None = None
    audio_url: DataUrl | MediaReference | None = None
    video_url: None = None
    """Nothing limits what a video decodes to; vLLM also reads a list of images as one."""
    uuid: None = None
    """Under this name vLLM would answer one tenant with another's image."""


class RequestMessage(msgspec.Struct, frozen=True):
    """One message of a chat request."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], Meta(max_length=1024)] | None = None
    function_call: None = None
    audio: None = None
    """Engines would leave both out of the prompt; `tool_calls` have taken the first one's place."""


class RequestStreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`: whether the client wants the usage frame. Events are not padded."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class RouterOptions(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """`options`: the router's own options, named as in Workers AI."""

    reject_if_busy: bool = False


class RefusedOpenAiFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of OpenAI that no engine honours, with the values that ask for nothing."""

    service_tier: Literal["auto", "default", "flex"] | None = None
    """`flex` is the lowest priority, unless the request has a priority of its own."""
    store: bool | None = None
    """Only false: see `refuse_storing`."""
    moderation: None = None


ABSENT: Final = msgspec.Raw()
"""The value of a field that a request does not have: this very object."""


class _GenerationRequest(RefusedOpenAiFields, frozen=True, kw_only=True):
    model: ModelField
    max_tokens: TokenCount | None = None
    n: AnswerCount | None = None
    stream: bool | None = None
    stream_options: RequestStreamOptions | UnsetType | None = UNSET
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: StopTexts | None = None
    seed: int | None = None
    options: RouterOptions | None = None
    kv_transfer_params: msgspec.Raw = ABSENT
    ec_transfer_params: msgspec.Raw = ABSENT
    vllm_xargs: msgspec.Raw = ABSENT
    disaggregated_params: msgspec.Raw = ABSENT
    bootstrap_host: msgspec.Raw = ABSENT
    bootstrap_port: msgspec.Raw = ABSENT
    bootstrap_room: msgspec.Raw = ABSENT
    mm_processor_kwargs: None = None
    """With it vLLM enlarges an image beyond the pixels that the router has checked."""
    media_io_kwargs: None = None


class ChatRequest(_GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[RequestMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: TokenCount | None = None
    tools: msgspec.Raw = msgspec.Raw()
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    prompt_cache_key: str | None = None
    """Names the session of a request without the header for it."""


class TextlessReference(MediaReference, frozen=True):
    """A reference whose URL may have been taken out of the body."""

    url: int | DataUrl  # type: ignore[assignment]


class TextlessPart(MessagePart, frozen=True):
    """A part of a message whose text or image may have been taken out of the body."""

    text: int | str | None = None  # type: ignore[assignment]
    image_url: int | DataUrl | TextlessReference | None = None  # type: ignore[assignment]


class TextlessMessage(RequestMessage, frozen=True):
    """A message of a body without its long texts: a number stands for what was taken out."""

    content: int | str | Annotated[list[TextlessPart], Meta(max_length=1024)] | None = None  # type: ignore[assignment]


class TextlessChat(ChatRequest, frozen=True, kw_only=True):
    """A chat whose long texts and images were taken out, see long_texts.py."""

    messages: Annotated[list[TextlessMessage], Meta(min_length=1, max_length=10_000)]  # type: ignore[assignment]


class LinkedReference(MediaReference, frozen=True):
    """A reference to an image, which may be a link."""

    url: ImageUrl


class LinkedPart(MessagePart, frozen=True):
    """A part of a message whose image may be a link."""

    image_url: ImageUrl | LinkedReference | None = None


class LinkedMessage(RequestMessage, frozen=True):
    """A message that may link to images."""

    content: str | Annotated[list[LinkedPart], Meta(max_length=1024)] | None = None  # type: ignore[assignment]


LinkedMessages = Annotated[list[LinkedMessage], Meta(min_length=1, max_length=10_000)]


class LinkedChat(ChatRequest, frozen=True, kw_only=True):
    """A chat that may link to images; the router fetches them before a replica is chosen."""

    messages: LinkedMessages  # type: ignore[assignment]


class CompletionRequest(_GenerationRequest, frozen=True, kw_only=True):
    """`POST /v1/completions`. A prompt may be text or token ids."""

    prompt: TextOrTokens


class _NonGenerating(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelField
    options: RouterOptions | None = None

    # Without generation there is no stream, and there are no output tokens.
    stream = None
    stream_options = None
    temperature = None
    seed = None
    n = 1
    presence_penalty = None
    frequency_penalty = None
    max_tokens = 0


class EmbeddingRequest(_NonGenerating, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. An input may be text or token ids, but not `messages`."""

    input: TextOrTokens
    messages: None = None


class ClassifyRequest(EmbeddingRequest, frozen=True, kw_only=True):
    """`POST /classify`: the classes of one text or of each of several."""


class RankableDocument(msgspec.Struct, frozen=True):
    """A document of a reranking request that has other fields besides its text.

    Parts in `content` are refused: vLLM would fetch the images and videos that they link to.
    """

    text: str
    content: UnsetType | None = UNSET


class RerankRequest(_NonGenerating, frozen=True, kw_only=True):
    """`POST /v1/rerank`: documents to be sorted by their relevance to a query."""

    query: str
    documents: Annotated[list[str | RankableDocument], Meta(min_length=1, max_length=1024)]

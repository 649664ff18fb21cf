"""What a client may send on the OpenAI surface, as far as the router must know it.

The engine checks the rest: the original bytes go on to it, so unknown fields are let through.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from isochrone.wire.ids import DATA_URL_PATTERN

CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
EMBEDDINGS_PATH: Final = "/v1/embeddings"
RERANK_PATH: Final = "/v1/rerank"

ModelField = Annotated[str, Meta(min_length=1, max_length=128)]
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]
DataUrl = Annotated[str, Meta(pattern=DATA_URL_PATTERN)]
Choices = Annotated[int, Meta(ge=1, le=16)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Text = (
    str
    | Annotated[
        list[str | int | Annotated[list[int], Meta(max_length=1_000_000)]],
        Meta(min_length=1, max_length=1_000_000),
    ]
)
Stops = str | Annotated[list[str], Meta(max_length=16)]


class MediaReference(msgspec.Struct, frozen=True):
    """What is to be seen or heard. An engine would fetch it from inside the fleet's network."""

    url: DataUrl


class MessagePart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text counts here."""

    type: Annotated[str, Meta(max_length=32)]
    text: str | None = None
    image_url: DataUrl | MediaReference | None = None
    audio_url: DataUrl | MediaReference | None = None
    video_url: DataUrl | MediaReference | None = None


class RequestMessage(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[MessagePart], Meta(max_length=1024)] | None = None


class RequestStreamOptions(msgspec.Struct, frozen=True):
    """Whether the client wants the usage frame."""

    include_usage: bool | None = None


class RouterOptions(msgspec.Struct, frozen=True, rename="camel"):
    """Our own options, named as Workers AI names them."""

    reject_if_busy: bool = False


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelField
    max_tokens: TokenCount | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: RequestStreamOptions | UnsetType | None = UNSET
    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stops | None = None
    seed: int | None = None
    options: RouterOptions | None = None


class ChatRequest(_Shared, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[RequestMessage], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: TokenCount | None = None
    tools: msgspec.Raw = msgspec.Raw()


class CompletionRequest(_Shared, frozen=True, kw_only=True):
    """`POST /v1/completions`. A prompt may also be token ids."""

    prompt: Text


class _Read(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelField
    options: RouterOptions | None = None

    # What only reads is never a stream and puts out no tokens.
    stream = None
    stream_options = None
    temperature = None
    seed = None
    n = 1
    presence_penalty = None
    frequency_penalty = None
    max_tokens = 0


class EmbeddingRequest(_Read, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. An input may also be token ids, and is no chat."""

    input: Text
    messages: None = None


class RerankDocument(msgspec.Struct, frozen=True):
    """A document that comes with more than its text."""

    text: str


class RerankRequest(_Read, frozen=True, kw_only=True):
    """`POST /v1/rerank`: documents to put in order of their relevance to a query."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=1024)]

"""What a client may send on the OpenAI surface, as far as the router must know it.

The engine checks the rest: the original bytes go on to it, so unknown fields are let through.
"""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

ModelField = Annotated[str, Meta(min_length=1, max_length=128)]
TokenCount = Annotated[int, Meta(ge=1, le=10_000_000)]
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
MESSAGE_BYTES: Final = 12
"""What a template adds to a message, beside the two bytes of ours that set it off."""

Stops = str | Annotated[list[str], Meta(max_length=16)]


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content; only text counts here."""

    type: Annotated[str, Meta(max_length=32)]
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Meta(max_length=1024)] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Whether the client wants the usage frame."""

    include_usage: bool | None = None


class Options(msgspec.Struct, frozen=True, rename="camel"):
    """Our own options, named as Workers AI names them."""

    reject_if_busy: bool = False


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelField
    max_tokens: TokenCount | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | UnsetType | None = UNSET
    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: Stops | None = None
    seed: int | None = None
    options: Options | None = None

    @property
    def answers(self) -> int:
        """How many answers there are to be."""
        return self.n or 1


class ChatRequest(_Shared, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: TokenCount | None = None
    tools: msgspec.Raw = msgspec.Raw()

    def text_bytes(self, rendered_bytes: int) -> int:
        """How much text the prompt holds, the template's words included."""
        return rendered_bytes + MESSAGE_BYTES * len(self.messages)

    @property
    def rendered(self) -> bytes:
        """The prompt as bytes that begin alike where two conversations do: templates put tools
        first."""
        said = "".join([f"\0{one.role}\0{_text(one.content)}" for one in self.messages])
        return bytes(self.tools) + said.encode(errors="replace")

    @property
    def output_tokens_max(self) -> int | None:
        """How many tokens the client allows."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Shared, frozen=True, kw_only=True):
    """`POST /v1/completions`. A prompt may also be token ids."""

    prompt: Text

    @property
    def answers(self) -> int:
        """How many answers there are to be: so many to each prompt."""
        several = not isinstance(self.prompt, str) and not isinstance(self.prompt[0], int)
        return (self.n or 1) * (len(self.prompt) if several else 1)

    def text_bytes(self, rendered_bytes: int) -> int:
        """How much text there is; a token id counts as four bytes."""
        return rendered_bytes if isinstance(self.prompt, str) else _bytes_of(self.prompt)

    @property
    def rendered(self) -> bytes:
        """The prompt as bytes that begin alike where two prompts do."""
        if isinstance(self.prompt, str):
            return self.prompt.encode(errors="replace")
        return msgspec.json.encode(self.prompt)

    @property
    def output_tokens_max(self) -> int | None:
        """How many tokens the client allows."""
        return self.max_tokens


class _Read(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelField
    options: Options | None = None

    # What only reads is never a stream and puts out no tokens.
    stream = None
    stream_options = None
    temperature = None
    seed = None
    answers = 1
    presence_penalty = None
    frequency_penalty = None
    output_tokens_max = 0


class EmbeddingRequest(_Read, frozen=True, kw_only=True):
    """`POST /v1/embeddings`. An input may also be token ids."""

    input: Text

    def text_bytes(self, rendered_bytes: int) -> int:
        """How much text there is; a token id counts as four bytes."""
        return rendered_bytes if isinstance(self.input, str) else _bytes_of(self.input)

    @property
    def rendered(self) -> bytes:
        """The text as bytes."""
        return self.input.encode(errors="replace") if isinstance(self.input, str) else b""


class Document(msgspec.Struct, frozen=True):
    """A document that comes with more than its text."""

    text: str


class RerankRequest(_Read, frozen=True, kw_only=True):
    """`POST /v1/rerank`: documents to put in order of their relevance to a query."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=1024)]

    def text_bytes(self, rendered_bytes: int) -> int:
        """How much text there is; the query is read with each document."""
        texts = [one if isinstance(one, str) else one.text for one in self.documents]
        query = len(self.query.encode(errors="replace"))
        return sum(len(text.encode(errors="replace")) + query for text in texts)

    @property
    def rendered(self) -> bytes:
        """The query as bytes."""
        return self.query.encode(errors="replace")


def _bytes_of(text: Text) -> int:
    if isinstance(text, str):
        return len(text.encode(errors="replace"))
    return sum(
        4
        if isinstance(one, int)
        else len(one.encode(errors="replace"))
        if isinstance(one, str)
        else 4 * len(one)
        for one in text
    )


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text or "" for part in content)

"""The requests for sounds and images: the fields that are checked, and those that are refused."""

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.ids import END
from router.apis.openai.schema import ModelField, RouterOptions

TRANSCRIPTIONS_PATH: Final = "/v1/audio/transcriptions"
TRANSLATIONS_PATH: Final = "/v1/audio/translations"
SPEECH_PATH: Final = "/v1/audio/speech"
IMAGES_PATH: Final = "/v1/images/generations"
UPLOAD_PATHS: Final = frozenset({TRANSCRIPTIONS_PATH, TRANSLATIONS_PATH})
MEDIA_PATHS: Final = UPLOAD_PATHS | {SPEECH_PATH, IMAGES_PATH}

Text = Annotated[str, Meta(min_length=1, max_length=32_768)]
_EDGE: Final = "[1-9][0-9]{1,4}"
ShortText = Annotated[str, Meta(max_length=256)]


class NamedVoice(msgspec.Struct, frozen=True):
    """A voice that the engine knows by its id."""

    id: Annotated[str, Meta(min_length=1, max_length=128)]


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/audio/speech`. The answer is a sound, or with `stream_format: sse` events."""

    model: ModelField
    input: Text
    voice: Annotated[str, Meta(min_length=1, max_length=128)] | NamedVoice
    instructions: Annotated[str, Meta(max_length=8192)] | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    stream_format: Literal["sse", "audio"] | None = None
    options: RouterOptions | None = None


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/images/generations`. Images are in the answer: no URL would lead anywhere."""

    model: ModelField
    prompt: Text
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    size: Annotated[str, Meta(pattern=rf"^(auto|{_EDGE}x{_EDGE}){END}")] | None = None
    response_format: Literal["b64_json"] | None = None
    quality: ShortText | None = None
    style: ShortText | None = None
    background: ShortText | None = None
    moderation: ShortText | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    stream: bool | None = None
    user: ShortText | None = None
    seed: int | None = None
    options: RouterOptions | None = None


class TranscriptionRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form fields of `POST /v1/audio/transcriptions`, beside its `file`.

    Those of type None are OpenAI's and no engine honours them.
    """

    model: ModelField
    language: ShortText | None = None
    prompt: Annotated[str, Meta(max_length=8192)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool = False
    timestamp_granularities: list[Literal["word", "segment"]] | None = msgspec.field(
        default=None, name="timestamp_granularities[]"
    )
    chunking_strategy: Literal["auto"] | None = None
    include: None = msgspec.field(default=None, name="include[]")
    keywords: None = msgspec.field(default=None, name="keywords[]")
    languages: None = msgspec.field(default=None, name="languages[]")
    delay: None = None
    known_speaker_names: None = msgspec.field(default=None, name="known_speaker_names[]")
    known_speaker_references: None = msgspec.field(default=None, name="known_speaker_references[]")


class TranslationRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form fields of `POST /v1/audio/translations`, beside its `file`."""

    model: ModelField
    prompt: Annotated[str, Meta(max_length=8192)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool = False

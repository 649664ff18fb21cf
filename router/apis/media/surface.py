"""Reads requests for sounds and images: from an HTTP request to the pipeline's InferenceRequest.

The engine gets the client's own bytes, a form or JSON. These answers are not made of tokens, so the
cost of a request is a coarse estimate, which its real usage replaces.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire import codec
from isochrone.wire.errors import ApiError, ErrorCode, openai_error_event
from isochrone.wire.http.invalid_field import invalid_field
from isochrone.wire.ids import RequestId
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.media.multipart import read_form
from router.apis.media.schema import (
    IMAGES_PATH,
    SPEECH_PATH,
    TRANSCRIPTIONS_PATH,
    TRANSLATIONS_PATH,
    UPLOAD_PATHS,
    ImageRequest,
    SpeechRequest,
    TranscriptionRequest,
    TranslationRequest,
)
from router.apis.openai.decode import decode
from router.apis.openai.engine_features import refuse_lacking_route
from router.apis.openai.surface import (
    OpenAiSurface,
    relayed_headers,
    traceparent_of,
    ttft_ms_of,
)
from router.dataplane.http_messages import HttpRequest
from router.inference_request import InferenceRequest

IMAGE_TOKENS: Final = 1056
"""Output tokens expected of one image: those of OpenAI's medium quality at 1024 x 1024."""

AUDIO_BYTES_PER_TEXT_BYTE: Final = 256
"""The bytes of a sound that are expected to take as long to process as one byte of text."""

TEXT_TOKENS: Final = 256
"""Output tokens expected of a transcription or a spoken text."""


class MediaRoute(NamedTuple):
    """One route: the kind of model and the feature of an engine that it needs."""

    kind: str
    feature: str
    output_tokens: int


MEDIA_ROUTES: Final[Mapping[str, MediaRoute]] = {
    TRANSCRIPTIONS_PATH: MediaRoute("transcription", "transcriptions", TEXT_TOKENS),
    TRANSLATIONS_PATH: MediaRoute("transcription", "translations", TEXT_TOKENS),
    SPEECH_PATH: MediaRoute("speech", "speech", TEXT_TOKENS),
    IMAGES_PATH: MediaRoute("image", "image_generation", IMAGE_TOKENS),
}

_SPEECH: Final = msgspec.json.Decoder(SpeechRequest)
_IMAGE: Final = msgspec.json.Decoder(ImageRequest)


class _MediaCall(NamedTuple):
    """The fields of a request that the router reads."""

    model: str
    text_bytes: int
    answer_count: int
    is_stream: bool
    rejects_if_busy: bool


def read_media_request(openai: OpenAiSurface, request: HttpRequest, path: str) -> InferenceRequest:
    """Return the inference request of an HTTP request. Raises ApiError if it is invalid."""
    key, route = request.key, MEDIA_ROUTES[path]
    assert key is not None
    content_type = request.header(b"content-type")
    if path in UPLOAD_PATHS:
        call = _read_upload(path, content_type, request.body)
    else:
        content_type = "application/json"
        call = _read_json(path, request.body)
    deployment = openai.deployment_of_kind(call.model, key, request.named_path, route.kind)
    refuse_lacking_route(deployment, route.feature)
    return InferenceRequest(
        request_id=RequestId(request.request_id),
        client_request_id=request.client_request_id,
        key=key,
        deployment=deployment,
        path=path,
        body=request.body,
        # A sound is read in parts that fit.
        text_bytes=min(call.text_bytes, 2 * deployment.context_tokens),
        answer_count=call.answer_count,
        output_tokens_max=_expected_output(call, route, deployment),
        is_stream=call.is_stream,
        wants_usage=True,
        reject_if_busy=call.rejects_if_busy,
        arrived_s=request.arrived_s,
        started_at=openai.unix_clock(),
        encode_error_event=openai_error_event,
        relayed_headers=relayed_headers(request),
        traceparent=traceparent_of(request),
        ttft_ms=ttft_ms_of(request),
        content_type=content_type,
        is_media=True,
    )


def _read_json(path: str, body: bytes) -> _MediaCall:
    if path == SPEECH_PATH:
        speech = decode(body, _SPEECH)
        rejects = speech.options is not None and speech.options.reject_if_busy
        return _MediaCall(speech.model, len(speech.input.encode()), 1, True, rejects)
    image = decode(body, _IMAGE)
    if image.partial_images and not image.stream:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot use field 'partial_images': only a stream has partial images, add 'stream'",
            param="partial_images",
        )
    rejects = image.options is not None and image.options.reject_if_busy
    return _MediaCall(
        *(image.model, len(image.prompt.encode()), image.n or 1),
        bool(image.stream),
        rejects,
    )


def _read_upload(path: str, content_type: str, body: bytes) -> _MediaCall:
    """Read a form with a sound. Raises ApiError 400."""
    form = read_form(content_type, body)
    if form.file_field != "file" or not form.file_bytes:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "cannot use field 'file': expected a sound file that is not empty, with its name",
            param="file",
        )
    values: dict[str, Any] = {
        name: given if name.endswith("[]") else given[0] for name, given in form.fields.items()
    }
    kind = TranscriptionRequest if path == TRANSCRIPTIONS_PATH else TranslationRequest
    try:
        read: Any = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(codec.describe(error), kind) from None
    audio_bytes = form.file_bytes // AUDIO_BYTES_PER_TEXT_BYTE
    return _MediaCall(read.model, 1 + audio_bytes, 1, read.stream, False)


def _expected_output(call: _MediaCall, route: MediaRoute, deployment: DeploymentEntry) -> int:
    tokens = route.output_tokens * call.answer_count
    return tokens if route.kind == "image" else max(1, min(tokens, deployment.context_tokens // 2))

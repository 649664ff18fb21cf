"""`POST /ai/run/{model}`: translated to an OpenAI request on the way in, back on the way out."""

import re
from functools import partial
from typing import Final
from urllib.parse import unquote

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.routes import DeploymentEntry
from router.apis.openai.moderations import classes_of
from router.apis.openai.schema import CLASSIFY_PATH, EMBEDDINGS_PATH
from router.apis.openai.surface import OpenAiSurface
from router.apis.query_flags import flag
from router.apis.responses.surface import read_responses_request
from router.apis.translating_writer import TranslatingWriter
from router.apis.workers_ai.translate import (
    encode_error_event,
    in_envelope,
    is_responses_request,
    to_openai,
    translate_body,
    translate_frame,
    translate_refusal,
    with_model,
)
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

REJECT_IF_BUSY: Final = "rejectIfBusy"
_PATH: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?/ai/run/(.*)$")


_WORKERS_AI: Final = re.compile(r"^/(?:client/v4|ai)/")


def is_workers_ai(path: str) -> bool:
    """Return whether a path is Workers AI's, and not OpenAI's below it."""
    return _WORKERS_AI.match(path) is not None


def model_of(path: str) -> str | None:
    """Return the model that a path of this surface names; None for any other path.

    Cloudflare's SDKs percent-encode the model's slashes and `@`, other clients do not.
    """
    match = _PATH.match(path)
    return unquote(match.group(1), errors="replace") if match else None


def read_run_request(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return the inference request, and a writer that translates its response.

    Raises ApiError if the request is invalid.
    """
    inference, translating = _read(openai, request, writer)
    # The AI SDK's provider sends options in the query, which are in the body for other clients.
    if request.query and flag(request.query, REJECT_IF_BUSY):
        inference.reject_if_busy = True
    return inference, translating


def _read(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    if is_responses_request(request.body):
        return _read_responses_request(openai, request, writer)
    model = model_of(request.path) or ""
    translated = to_openai(request.body, model)
    if translated.path == EMBEDDINGS_PATH:
        assert request.key is not None
        deployment = openai.base_deployment(model, request.key)
        if deployment.kind == "classify":
            return _read_classification(openai, request, deployment, translated.body, writer)
    inference = openai.read(request, translated.path, translated.body, encode_error_event)
    translating = TranslatingWriter(
        writer,
        translate_frame=translate_frame,
        translate_body=partial(
            translate_body, is_json=translated.is_json, text_field=translated.text_field
        ),
        translate_refusal=translate_refusal,
    )
    return inference, translating


def _read_classification(
    openai: OpenAiSurface,
    request: HttpRequest,
    deployment: DeploymentEntry,
    body: bytes,
    writer: ResponseWriter,
) -> tuple[InferenceRequest, ResponseWriter]:
    """Read a text to classify: `body` is that of a request for its embedding."""
    if not isinstance(msgspec.json.decode(body)["input"], str):
        reason = "a model that classifies takes one text"
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot use field 'text': {reason}")
    inference = openai.read(request, CLASSIFY_PATH, body, encode_error_event)
    translating = TranslatingWriter(
        writer,
        translate_frame=bytes,
        translate_body=lambda answer: in_envelope(classes_of(answer, deployment.labels)),
        translate_refusal=translate_refusal,
    )
    return inference, translating


def _read_responses_request(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Read a body of the Responses surface. Its answer is the result, its events are unchanged."""
    request.body = with_model(request.body, model_of(request.path) or "")
    enveloped = TranslatingWriter(
        writer,
        translate_frame=bytes,
        translate_body=in_envelope,
        translate_refusal=translate_refusal,
    )
    return read_responses_request(openai, request, enveloped)

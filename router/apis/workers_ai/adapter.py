"""`POST /ai/run/{model}`: translated to an OpenAI request on the way in, back on the way out."""

import re
from functools import partial
from typing import Final
from urllib.parse import unquote

from router.apis.openai.surface import OpenAiSurface
from router.apis.translating_writer import TranslatingWriter
from router.apis.workers_ai.translate import (
    encode_error_event,
    to_openai,
    translate_body,
    translate_frame,
    translate_refusal,
)
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

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
    translated = to_openai(request.body, model_of(request.path) or "")
    inference = openai.read(request, translated.path, translated.body, encode_error_event)
    translating = TranslatingWriter(
        writer,
        translate_frame=translate_frame,
        translate_body=partial(translate_body, is_json=translated.is_json),
        translate_refusal=translate_refusal,
    )
    return inference, translating

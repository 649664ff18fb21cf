"""`/ai/run/{model}`: translated on the way in and out, and the same corridor between."""

import re
from functools import partial
from typing import Final

from router.apis.openai.surface import OpenAiSurface
from router.apis.translating_writer import TranslatingWriter
from router.apis.workers_ai.translate import (
    error_event,
    frame_of,
    refusal_of,
    to_openai,
    whole_of,
)
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

_PATH: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?/ai/run/(.*)$")


def model_of(path: str) -> str | None:
    """Return the model that a path of this surface names; None for any other path."""
    found = _PATH.match(path)
    return found.group(1) if found else None


def asked_by_run(
    openai: OpenAiSurface, request: HttpRequest, client: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return what a request asks for, and its client as one who is told in envelopes."""
    path, body, is_json = to_openai(request.body, model_of(request.path) or "")
    asked = openai.asked(request, path, body, error_event)
    whole = partial(whole_of, is_json=is_json)
    return asked, TranslatingWriter(client, frame=frame_of, whole=whole, refusal=refusal_of)

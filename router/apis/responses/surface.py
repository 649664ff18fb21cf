"""`POST /v1/responses`: translated to a chat completion on the way in, and back on the way out."""

from typing import Final

from isochrone.wire.errors import unusable_field
from router.apis.openai.decode import decode
from router.apis.openai.surface import OpenAiSurface
from router.apis.responses.events import ResponseEvents, new_response
from router.apis.responses.translate import RESPONSES_REQUEST, ResponsesRequest, to_chat
from router.apis.translating_writer import TranslatingWriter
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

RESPONSES_PATH: Final = "/v1/responses"


def refuse_stored(request: ResponsesRequest) -> None:
    """Raise ApiError 400 for fields that store the response or need a stored one."""
    for field in ("store", "background", "previous_response_id", "conversation"):
        if getattr(request, field):
            reason = "responses of batches and of /ai/run are not stored; use POST /v1/responses"
            raise unusable_field(field, reason)


def read_responses_request(
    openai: OpenAiSurface, request: HttpRequest, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return the inference request, and a writer that translates its response.

    Raises ApiError if the request is invalid, or needs what is stored.
    """
    responses_request = decode(request.body, RESPONSES_REQUEST)
    refuse_stored(responses_request)
    response_id = f"resp_{request.request_id}"
    response = new_response(responses_request, response_id, int(openai.unix_clock()))
    events = ResponseEvents(responses_request, response)
    chat = to_chat(responses_request, may_link=openai.may_link)
    inference = openai.read_translated(request, chat, events.failed, "input")
    return inference, responses_writer(writer, events)


def responses_writer(writer: ResponseWriter, events: ResponseEvents) -> ResponseWriter:
    """Return a writer that writes to `writer` what `events` makes of a chat completion."""
    return TranslatingWriter(
        writer,
        translate_frame=events.translate_frame,
        translate_body=events.translate_body,
        # A refusal is in OpenAI's format already.
        translate_refusal=bytes,
    )

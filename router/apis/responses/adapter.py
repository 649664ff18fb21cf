"""`/v1/responses`: translated on the way in and out, and the same corridor between."""

from typing import Final

from router.apis.openai.decode import decode
from router.apis.openai.schema import CHAT_PATH
from router.apis.openai.surface import OpenAiSurface
from router.apis.responses.events import ResponseEvents, opened
from router.apis.responses.translate import RESPONSES_REQUEST, to_chat
from router.apis.translating_writer import TranslatingWriter
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.inference_request import InferenceRequest

PATH: Final = "/v1/responses"


def asked_by_response(
    openai: OpenAiSurface, request: HttpRequest, client: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter]:
    """Return what a request asks for, and its client as one who is told in events."""
    wish = decode(request.body, RESPONSES_REQUEST)
    events = ResponseEvents(opened(wish, f"resp_{request.request_id}", int(openai.unix_clock())))
    asked = openai.asked(request, CHAT_PATH, to_chat(wish), events.failed)
    # A refusal is in OpenAI's shape already.
    return asked, TranslatingWriter(client, frame=events.take, whole=events.whole, refusal=bytes)

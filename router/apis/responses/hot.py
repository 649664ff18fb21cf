"""`/v1/responses`: translated on the way in and out, and the same corridor between."""

from typing import Final

from router.apis.openai.decode import decode
from router.apis.openai.hot import OpenAiSurface
from router.apis.openai.schema import CHAT_PATH
from router.apis.responses.events import Events, opened
from router.apis.responses.translate import WISH, to_chat
from router.apis.translated import Translated
from router.asked import Asked
from router.dataplane.message import Client, Request

PATH: Final = "/v1/responses"


def asked_by_response(
    openai: OpenAiSurface, request: Request, client: Client
) -> tuple[Asked, Client]:
    """Return what a request asks for, and its client as one who is told in events."""
    wish = decode(request.body, WISH)
    events = Events(opened(wish, f"resp_{request.request_id}", int(openai.unix_clock())))
    asked = openai.asked(request, CHAT_PATH, to_chat(wish), events.failed)
    # A refusal is in OpenAI's shape already.
    return asked, Translated(client, frame=events.take, whole=events.whole, refusal=bytes)

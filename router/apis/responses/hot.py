"""`/v1/responses`: translated on the way in and out, and the same corridor between."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError
from router.apis.openai.decode import decode
from router.apis.openai.hot import OpenAiSurface, only_post
from router.apis.responses.answer import opened, whole
from router.apis.responses.events import Events
from router.apis.responses.translate import WISH, to_chat
from router.dataplane import sse
from router.dataplane.exchange import Exchange
from router.dataplane.message import Reply, Request
from router.dataplane.server import ClientConnection
from router.serve import Corridor

PATH: Final = "/v1/responses"
CHAT_PATH: Final = "/v1/chat/completions"


class ResponsesSurface:
    """Answers the hot route of the Responses API."""

    def __init__(
        self, openai: OpenAiSurface, corridor: Corridor, unix_clock: Callable[[], float]
    ) -> None:
        """Ask as the OpenAI surface would."""
        self._openai = openai
        self._corridor = corridor
        self._unix_clock = unix_clock

    def answer(self, request: Request, client: ClientConnection) -> Awaitable[None]:
        """Return the answering of one request."""
        self._openai.identify(request)
        only_post(request)
        wish = decode(request.body, WISH)
        response = opened(wish, f"resp_{request.request_id}", int(self._unix_clock()))
        translator = Translator(client, response)
        asked = self._openai.asked(request, CHAT_PATH, to_chat(wish), translator.error_event)
        return self._corridor.serve(asked, translator)


class Translator:
    """The client's end of the corridor: what comes as a chat goes out as a response."""

    def __init__(self, client: ClientConnection, response: dict[str, Any]) -> None:
        """Answer `client` with the response as `opened`, filled."""
        self._client = client
        self._response = response
        self._events = Events(response)

    def begin(self, status: int, content_type: str, lines: str) -> None:
        """Send the head of a stream."""
        self._client.begin(status, content_type, lines)
        self._client.send(self._events.begin())

    def send(self, data: bytes) -> None:
        """Send whole frames, each translated."""
        told = b"".join([self._events.take(frame) for frame in sse.split(data)])
        if told:
            self._client.send(told)

    def error_event(self, error: ApiError) -> bytes:
        """Return the event that ends a stream which is not whole."""
        return self._events.failed(error)

    def end(self) -> None:
        """End the stream."""
        self._client.end()

    def reply(self, reply: Reply) -> None:
        """Send a whole answer, or a replica's refusal of the request as it is."""
        if reply.status == 200:
            body = msgspec.json.encode(whole(self._response, reply.body))
            reply = Reply(reply.status, body, reply.lines)
        self._client.reply(reply)

    def reads_from(self, source: Exchange | None) -> None:
        """Tie the source of the stream."""
        self._client.reads_from(source)

    async def drained(self) -> None:
        """Return when the client has read what was sent."""
        await self._client.drained()

"""`/ai/run/{model}`: translated on the way in and out, and the same corridor between."""

import re
from collections.abc import Awaitable
from typing import Final

import msgspec

from isochrone.wire.errors import MEANINGS, ApiError, ErrorCode
from router.apis.openai.hot import OpenAiSurface, only_post
from router.apis.workers_ai.translate import (
    ERROR_EVENT,
    envelope,
    error_envelope,
    frame_of,
    result_of,
    to_openai,
)
from router.dataplane import sse
from router.dataplane.exchange import Exchange
from router.dataplane.message import Reply, Request
from router.dataplane.server import ClientConnection
from router.serve import Corridor

_PATH: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?/ai/run/(.*)$")


class WorkersAiSurface:
    """Answers the hot route of the Workers AI surface."""

    def __init__(self, openai: OpenAiSurface, corridor: Corridor) -> None:
        """Ask as the OpenAI surface would."""
        self._openai = openai
        self._corridor = corridor

    def takes(self, path: str) -> bool:
        """Say whether a path is this surface's."""
        return _PATH.match(path) is not None

    def answer(self, request: Request, client: ClientConnection) -> Awaitable[None]:
        """Return the answering of one request."""
        self._openai.identify(request)
        found = _PATH.match(request.path)
        assert found is not None
        only_post(request)
        path, body, is_json = to_openai(request.body, found.group(1))
        asked = self._openai.asked(request, path, body, _error_event)
        return self._corridor.serve(asked, Translator(client, is_json=is_json))

    def encode_error(self, error: ApiError) -> Reply:
        """Count an error and write it in this surface's shape."""
        plain = self._openai.encode_error(error)
        body = error_envelope(error.message, error.meaning.number)
        return Reply(plain.status, body, plain.lines)


class Translator:
    """The client's end of the corridor: what comes as OpenAI goes out as Workers AI."""

    def __init__(self, client: ClientConnection, *, is_json: bool) -> None:
        """Answer `client`; with `is_json` a whole answer's text is the value it spells."""
        self._client = client
        self._is_json = is_json

    def begin(self, status: int, content_type: str, lines: str) -> None:
        """Send the head of a stream."""
        self._client.begin(status, content_type, lines)

    def send(self, data: bytes) -> None:
        """Send whole frames, each translated."""
        told = b"".join([frame_of(frame) for frame in sse.split(data)])
        if told:
            self._client.send(told)

    def end(self) -> None:
        """End the stream."""
        self._client.end()

    def reply(self, reply: Reply) -> None:
        """Send a whole answer, or a replica's refusal of the request."""
        if reply.status == 200:
            body = envelope(result_of(reply.body, is_json=self._is_json))
            self._client.reply(Reply(reply.status, body, reply.lines))
            return
        error = msgspec.json.decode(reply.body)["error"]
        code = error.get("code") if isinstance(error, dict) else None
        known = {one.value: one for one in ErrorCode}
        meaning = MEANINGS[known.get(str(code), ErrorCode.INVALID_REQUEST)]
        message = str(error.get("message") if isinstance(error, dict) else error)[:400]
        body = error_envelope(message, meaning.number)
        self._client.reply(Reply(reply.status, body, reply.lines))

    def reads_from(self, source: Exchange | None) -> None:
        """Tie the source of the stream."""
        self._client.reads_from(source)

    async def drained(self) -> None:
        """Return when the client has read what was sent."""
        await self._client.drained()


def _error_event(error: ApiError) -> bytes:
    """Write an error within a stream, in a frame that `frame_of` leaves as it is."""
    body = error_envelope(error.message, error.meaning.number)
    return ERROR_EVENT + b"data: " + body + b"\n\n"

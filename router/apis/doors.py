"""Which path is whose: hot routes go straight to the corridor, all others to aiohttp within.

Both come in at one port. A cold request is asked of an aiohttp server in this same process, over a
pair of sockets that nobody else can reach: one parser stands before both, and aiohttp keeps
everything in which a microsecond does not matter.
"""

import re
from collections.abc import Awaitable
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.headers import REQUEST_ID
from isochrone.wire.ids import NodeId
from isochrone.wire.routes import KeyEntry
from router.apis.openai.hot import READERS, OpenAiSurface
from router.apis.responses.hot import PATH as RESPONSES
from router.apis.responses.hot import ResponsesSurface
from router.apis.workers_ai.hot import WorkersAiSurface
from router.dataplane.exchange import AttemptFailed
from router.dataplane.http1 import Fields, lines_of
from router.dataplane.message import Reply, Request
from router.dataplane.server import ClientConnection
from router.dataplane.upstream import Upstream

HOT: Final = frozenset(READERS) | {RESPONSES}
COLD: Final = NodeId("_cold")
COLD_TIMEOUT_S: Final = 30.0
COLD_BYTES_MAX: Final = 64 * 1024 * 1024

_OPENAI_OF_WORKERS_AI: Final = re.compile(r"^(?:/client/v4/accounts/[^/]{1,64})?/ai(/v1/.+)$")
"""Where Workers AI offers OpenAI's surface: its clients change the host of their base URL alone."""

_OURS: Final = frozenset(
    {b"connection", b"content-length", b"content-type", b"date", b"server", b"transfer-encoding"}
)
"""Headers of a cold answer that are written anew: those of one hop, and those of every answer."""


class Doors:
    """What the listener hands each request to."""

    def __init__(
        self,
        openai: OpenAiSurface,
        responses: ResponsesSurface,
        workers_ai: WorkersAiSurface,
        upstream: Upstream,
    ) -> None:
        """Answer hot routes by their surface."""
        self._openai = openai
        self._responses = responses
        self._workers_ai = workers_ai
        self._upstream = upstream

    def gate(self, method: bytes, path: str, headers: Fields) -> KeyEntry | None:
        """Let a head in before its body is read, or raise ApiError."""
        if method == b"POST" and (
            path in HOT or self._workers_ai.takes(path) or _plain(path) in HOT
        ):
            return self._openai.gate(headers)
        return None

    def encode_error(self, error: ApiError, path: str, request_id: str) -> Reply:
        """Write what went wrong in the shape of the surface, with the id of who has one."""
        surface = self._workers_ai if self._workers_ai.takes(path) else self._openai
        reply = surface.encode_error(error)
        if request_id:
            reply.lines += lines_of({REQUEST_ID: request_id})
        return reply

    def answer(self, request: Request, client: ClientConnection) -> Awaitable[None]:
        """Return the answering of one request, to be awaited."""
        if request.path in READERS:
            return self._openai.answer(request, client)
        if self._workers_ai.takes(request.path):
            return self._workers_ai.answer(request, client)
        request.path = _plain(request.path)
        if request.path in READERS:
            return self._openai.answer(request, client)
        if request.path == RESPONSES:
            return self._responses.answer(request, client)
        return self._ask_within(request, client)

    async def _ask_within(self, request: Request, client: ClientConnection) -> None:
        """Have a cold request answered by aiohttp."""
        target = f"{request.path}?{request.query}" if request.query else request.path
        # A HEAD is asked as a GET: its answer has no body to wait for, and `reply` sends none.
        method = "GET" if request.method == b"HEAD" else request.method.decode()
        sent = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in request.headers.items()
            if name in (b"authorization", b"content-type", b"accept", b"x-request-id")
        }
        try:
            exchange = self._upstream.ask(
                COLD,
                COLD,
                (method, target, lines_of(sent), request.body),
                COLD_TIMEOUT_S,
                COLD_BYTES_MAX,
            )
            try:
                await exchange.opened
                head = exchange.answer()
            finally:
                exchange.leave()
        except AttemptFailed as error:
            raise ApiError(ErrorCode.INTERNAL, f"cannot answer: {error}") from error
        extra = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in head.fields.items()
            if name not in _OURS
        }
        client.reply(Reply(head.status, exchange.body, lines_of(extra), head.content_type))


def _plain(path: str) -> str:
    """Return the path on OpenAI's surface of one that Workers AI offers below an account."""
    found = _OPENAI_OF_WORKERS_AI.match(path)
    return found.group(1) if found else path

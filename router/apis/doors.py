"""Which path is whose: hot routes go straight to the corridor, all others to aiohttp within.

Both come in at one port. A cold request is asked of an aiohttp server in this same process, over a
pair of sockets that nobody else can reach: one parser stands before both, and aiohttp keeps
everything in which a microsecond does not matter.
"""

from collections.abc import Awaitable, Mapping
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.headers import REQUEST_ID
from isochrone.wire.ids import NodeId
from isochrone.wire.routes import KeyEntry
from router.apis.openai.hot import READERS, OpenAiSurface
from router.apis.workers_ai.hot import WorkersAiSurface
from router.dataplane.exchange import AttemptFailed
from router.dataplane.http1 import lines_of
from router.dataplane.message import Reply, Request
from router.dataplane.server import ClientConnection
from router.dataplane.upstream import Upstream

COLD: Final = "cold"
COLD_TIMEOUT_S: Final = 30.0
COLD_BYTES_MAX: Final = 64 * 1024 * 1024

_OURS: Final = frozenset(
    {b"connection", b"content-length", b"content-type", b"date", b"server", b"transfer-encoding"}
)
"""Headers of a cold answer that are written anew: those of one hop, and those of every answer."""


class Doors:
    """What the listener hands each request to."""

    def __init__(
        self, openai: OpenAiSurface, workers_ai: WorkersAiSurface, upstream: Upstream
    ) -> None:
        """Answer hot routes by their surface."""
        self._openai = openai
        self._workers_ai = workers_ai
        self._upstream = upstream

    def gate(self, method: bytes, path: str, headers: Mapping[bytes, bytes]) -> KeyEntry | None:
        """Let a head in before its body is read, or raise ApiError."""
        if method == b"POST" and (path in READERS or self._workers_ai.takes(path)):
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
                NodeId(COLD),
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

"""Holds back the end of a response until it is stored."""

from collections.abc import Callable

from isochrone.wire.errors import ApiError
from router.dataplane.http_messages import HttpResponse, PausableSource, ResponseWriter


class FinishingWriter:
    """A ResponseWriter that passes a stream on until its end is known, and keeps what follows."""

    def __init__(self, writer: ResponseWriter, has_ended: Callable[[], bool]) -> None:
        """Write to `writer`. `has_ended` says whether the last event is among what was sent."""
        self._writer = writer
        self._has_ended = has_ended
        self._is_stream = False
        self._held: list[bytes] = []
        self._response: HttpResponse | None = None

    @property
    def is_refused(self) -> bool:
        """Whether a replica refused the request."""
        return self._response is not None and self._response.status != 200

    def begin(self, status: int, content_type: str, header_lines: str) -> None:
        """Write the head of a stream."""
        self._is_stream = True
        self._writer.begin(status, content_type, header_lines)

    def send(self, data: bytes) -> None:
        """Write a part of the stream, unless it holds the last event."""
        if self._has_ended():
            self._held.append(data)
        else:
            self._writer.send(data)

    def end(self) -> None:
        """Keep the end back."""

    def reply(self, response: HttpResponse) -> None:
        """Keep a complete response back."""
        self._response = response

    def set_source(self, source: PausableSource | None) -> None:
        """Pause `source` whenever the client reads more slowly than it sends."""
        self._writer.set_source(source)

    async def drained(self) -> None:
        """Wait until the client has read what was written."""
        await self._writer.drained()

    def chunk_sink(self) -> None:
        """Return nothing: the last event is held back."""

    def release(self) -> None:
        """Write what was kept back."""
        if self._response is not None:
            self._writer.reply(self._response)
            return
        for data in self._held:
            self._writer.send(data)
        self._writer.end()

    def fail(self, error: ApiError, event: bytes) -> None:
        """End a stream with `event` instead; raise `error` if nothing was written yet."""
        if not self._is_stream:
            raise error
        self._writer.send(event)
        self._writer.end()

"""Writes the pipeline's OpenAI responses to a client in the format of another API surface."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode
from router.dataplane import sse
from router.dataplane.exchange import AttemptFailed
from router.dataplane.generated_text import TEXT_CHARS_MAX
from router.dataplane.http_messages import HttpResponse, ResponseWriter
from router.decide.attempt import FailureCause

Translate = Callable[[bytes], bytes]
ITEM_CHARS: Final = 1024
"""What an item or block of an answer counts for, besides its text."""


def read_token_count(body: bytes) -> int:
    """Return an engine's count of tokens. Raises ApiError if there is none."""
    answer: Any = msgspec.json.decode(body)
    count = answer.get("count")
    if not isinstance(count, int):
        raise ApiError(ErrorCode.UPSTREAM, "cannot answer: the replica did not count the tokens")
    return count


class KeptOutput:
    """Limits what a surface keeps of a stream for its last event: a node's stream may not end."""

    def __init__(self) -> None:
        self.is_limited = True
        """False for a complete answer, which has a limit of its own."""
        self._chars = 0

    def add(self, chars: int) -> None:
        """Count characters. Raises AttemptFailed beyond TEXT_CHARS_MAX."""
        self._chars += chars
        if self.is_limited and self._chars > TEXT_CHARS_MAX:
            raise AttemptFailed(
                FailureCause.BROKEN, f"an answer has more than {TEXT_CHARS_MAX} characters"
            )


class TranslatingWriter:
    """A ResponseWriter that translates stream frames, complete responses and refusals."""

    def __init__(
        self,
        writer: ResponseWriter,
        *,
        translate_frame: Translate,
        translate_body: Translate,
        translate_refusal: Translate,
        header_lines: str = "",
    ) -> None:
        """Write to `writer`. `translate_frame` may return no frame or several.

        `translate_refusal` takes the body of a replica's 4xx response. `header_lines` are added to
        every response.
        """
        self._writer = writer
        self._translate_frame = translate_frame
        self._translate_body = translate_body
        self._translate_refusal = translate_refusal
        self._header_lines = header_lines
        # These methods are the same on every surface.
        self.end = writer.end
        self.set_source, self.drained = writer.set_source, writer.drained

    def begin(self, status: int, content_type: str, header_lines: str) -> None:
        """Write the head of a stream."""
        self._writer.begin(status, content_type, header_lines + self._header_lines)

    def send(self, data: bytes) -> None:
        """Write complete frames, each translated."""
        frames = b"".join([self._translate_frame(frame) for frame in sse.split_frames(data)])
        if frames:
            self._writer.send(frames)

    def chunk_sink(self) -> None:
        """Return nothing: no frame stays as it is."""

    def reply(self, response: HttpResponse) -> None:
        """Write a complete response, or a replica's refusal of the request."""
        translate = self._translate_body if response.status == 200 else self._translate_refusal
        body = translate(response.body)
        self._writer.reply(
            HttpResponse(response.status, body, response.header_lines + self._header_lines)
        )

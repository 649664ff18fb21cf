"""Relays streams that are no chat: sounds, and events of transcriptions, speech and images.

Rule 1: bytes go to the client as they come. The stream cannot be resumed elsewhere.
Rule 2: a stream ends with its response. One that breaks off before has failed.
Rule 3: usage is read from the last event, if that reports it.
"""

import re
from typing import Final

from isochrone.wire.http import headers
from router.dataplane.media_usage import read_media_usage
from router.dataplane.sse import GeneratedOutput, StreamRelay

USAGE_TAIL_BYTES: Final = 4 * 1024
"""How much of the end of a stream is kept for its usage, which its last event ends with."""

_ENGINE_LOST: Final = f'"code":"{headers.ENGINE_LOST_CODE}"'.encode()
NO_TEXT: Final = GeneratedOutput(0, "", False, None)
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class MediaRelay(StreamRelay):
    """The relay of such a stream."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        super().__init__(wants_usage=True)
        self.takes_any_content = True
        self._tail = b""

    def feed(self, data: bytes) -> bytes:
        """Return the bytes as they are."""
        self.has_begun = True
        tail = self._tail + data if len(data) < USAGE_TAIL_BYTES else data
        self._tail = tail[-USAGE_TAIL_BYTES:]
        return data

    def pumped_frame(self, frame: bytes) -> None:
        """Return nothing: these are no frames of tokens."""

    def end_of_body(self) -> None:
        """End the stream, and read what it used."""
        if _ENGINE_LOST in self._tail:
            # The node's last event, which the client has got.
            self.has_failed = self.is_engine_lost = True
            return
        self.is_done = True
        found = _USAGE.findall(self._tail)
        if found:
            self.usage = read_media_usage(found[-1])

    def generated(self) -> GeneratedOutput:
        """Return nothing: a part of a sound cannot be continued."""
        return NO_TEXT

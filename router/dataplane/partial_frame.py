"""Finds the ends of frames, and joins a frame that comes in pieces in time linear in its length."""

from typing import Final

_BLANKS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_SEAM_BYTES: Final = 3
"""The most bytes of a blank line that may have come before its last piece."""


class PartialFrame:
    """The bytes behind the last complete frame."""

    __slots__ = ("_grown", "_seam", "size_bytes")

    def __init__(self) -> None:
        self._grown = bytearray()
        self._seam = b""
        self.size_bytes = 0

    def hold(self, received: bytes) -> None:
        """Start with what has come of a frame."""
        self._grown = bytearray(received)
        self._seam = received[-_SEAM_BYTES:]
        self.size_bytes = len(received)

    def join(self, data: bytes) -> bytes:
        """Return all bytes and become empty if a frame ends in `data`; else keep them, return none.

        Only the new bytes are searched.
        """
        seam = self._seam + data
        self._grown += data
        if not data.endswith(b"\n\n") and frames_end(seam) == 0:
            self._seam = seam[-_SEAM_BYTES:]
            self.size_bytes += len(data)
            return b""
        received = bytes(self._grown)
        self.clear()
        return received

    def clear(self) -> None:
        """Forget the bytes."""
        self._grown = bytearray()
        self._seam = b""
        self.size_bytes = 0


def frames_end(received: bytes) -> int:
    """Return where the last complete frame ends; 0 if there is none."""
    end = 0
    for blank in _BLANKS:
        position = received.rfind(blank)
        if position >= 0:
            end = max(end, position + len(blank))
    return end

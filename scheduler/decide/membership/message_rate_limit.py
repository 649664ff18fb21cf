"""How fast one peer is read: so much a second, and what it says beyond that waits in its socket.

An agent that reports in a circle would otherwise have the event loop and the database to itself.
"""

from typing import Final

BURST_S: Final = 10.0
MESSAGE_BYTES: Final = 64 * 1024


class MessageRateLimit:
    """What one peer has said, as time. It knows no clock: each message tells it."""

    def __init__(self, messages_per_s: float) -> None:
        self._message_s = 1.0 / messages_per_s
        self._until = float("-inf")

    def wait_s(self, size_bytes: int, now: float) -> float:
        """Return how long this message should wait; a large one counts as several."""
        said_s = self._message_s * (1 + size_bytes // MESSAGE_BYTES)
        self._until = max(self._until, now - BURST_S) + said_s
        return max(0.0, self._until - now)

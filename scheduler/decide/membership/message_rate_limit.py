"""Message rate limit of one peer: messages beyond it wait in the peer's socket.

Without it, an agent that reports in a loop would take the event loop and the database for itself.
"""

from typing import Final

BURST_S: Final = 10.0
"""A peer may send the messages of this many seconds at once."""

MESSAGE_BYTES: Final = 64 * 1024
"""A message counts once, and once more for each full multiple of this size."""


class MessageRateLimit:
    """A token bucket for the messages of one peer, kept as a time. The caller passes the time."""

    def __init__(self, messages_per_s: float) -> None:
        self._message_s = 1.0 / messages_per_s
        self._until = float("-inf")

    def wait_s(self, size_bytes: int, now: float) -> float:
        """Count a message that arrives at `now`, and return how long to wait before the next."""
        cost_s = self._message_s * (1 + size_bytes // MESSAGE_BYTES)
        self._until = max(self._until, now - BURST_S) + cost_s
        return max(0.0, self._until - now)

"""Names for requests, by which they are counted: no two ever have the same."""

from typing import Final

from isochrone.wire.ids import BootId, RequestId

LIFE_CHARS: Final = 16
SENT_CHARS_MAX: Final = 36
"""With what follows it, a name is no longer than the 64 that a node takes; a UUID fits."""


class RequestIds:
    """Makes request ids: what a client calls its request, this life of the router, and a number.

    What the client sent alone would name it too, but whoever sent the same one with every request
    would be counted once.
    """

    def __init__(self, boot_id: BootId) -> None:
        """Begin at one."""
        self._life = boot_id[:LIFE_CHARS]
        self._count = 0

    def __call__(self, sent: str) -> RequestId:
        """Return the next, of a client that `sent` one or none."""
        self._count += 1
        return RequestId(f"{sent[:SENT_CHARS_MAX] or 'req'}-{self._life}-{self._count}")

"""Names for requests, by which they are counted: no two ever have the same."""

from typing import Final

from isochrone.wire.ids import BootId, RequestId, is_request_id

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

    def next(self, sent: str) -> tuple[RequestId, str]:
        """Return a new id, and that which its client knows: what it `sent`, if well formed."""
        own = sent if sent and is_request_id(sent) else ""
        self._count += 1
        request_id = RequestId(f"{own[:SENT_CHARS_MAX] or 'req'}-{self._life}-{self._count}")
        return request_id, own or request_id

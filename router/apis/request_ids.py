"""Request ids. The id by which a request is counted is unique across routers and restarts."""

from typing import Final

from isochrone.wire.ids import BootId, RequestId, is_request_id

BOOT_CHARS: Final = 16
CLIENT_CHARS_MAX: Final = 36
"""The length of a UUID. A whole id has at most 64 characters, which is the limit of a node."""


class RequestIds:
    """Makes request ids of the client's own id, this start of the router, and a number.

    The client's id alone is not enough: a client that sends the same one with every request would
    be counted once.
    """

    def __init__(self, boot_id: BootId) -> None:
        """Start counting. `boot_id` is unique to this start of the router."""
        self._boot = boot_id[:BOOT_CHARS]
        self._count = 0

    def next(self, sent: str) -> tuple[RequestId, str]:
        """Return a new id, and the id for the response.

        The latter is the id that the client `sent` if that is well formed, else the new id.
        """
        client_id = sent if sent and is_request_id(sent) else ""
        self._count += 1
        prefix = client_id[:CLIENT_CHARS_MAX] or "req"
        request_id = RequestId(f"{prefix}-{self._boot}-{self._count}")
        return request_id, client_id or request_id

"""What answering an item of a batch and a background response have in common.

The scheduler leases both to this router, and no client of the router waits for their answers.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.errors import MEANINGS, ApiError, ErrorCode
from isochrone.wire.peers.batches import LeasedItem
from isochrone.wire.peers.responses import LeasedResponse
from isochrone.wire.peers.routes import KeyEntry
from router.dataplane.http_messages import HttpRequest, HttpResponse, PausableSource
from router.decide.attempt import NoNodeReached

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5.0

NOT_NOW: Final = frozenset(
    {
        *(ErrorCode.RATE_LIMITED, ErrorCode.QUOTA_EXCEEDED, ErrorCode.OUT_OF_CAPACITY),
        ErrorCode.UNAVAILABLE,
    }
)
"""Errors that say nothing about the work: it waits, and its client never sees them."""

_FAILED: Final = frozenset({ErrorCode.UPSTREAM, ErrorCode.INTERNAL})
"""Errors after which the work is tried again a few times."""


class LaterAttempt(NamedTuple):
    """When work that a client does not wait for is tried again, and whether this attempt counts.

    An attempt does not count if the work cannot have been the cause: without capacity, beyond a
    limit of its key, or while its nodes are not reached.
    """

    after_s: float
    counts: bool


class CollectingWriter:
    """A ResponseWriter that keeps the one complete response."""

    def __init__(self) -> None:
        self.response: HttpResponse | None = None

    def begin(self, status: int, content_type: str, header_lines: str) -> None:
        """Refuse a stream: leased work is not streamed."""
        raise RuntimeError("leased work is not streamed")

    def send(self, data: bytes) -> None:
        """Take no stream."""

    def end(self) -> None:
        """Take no stream."""

    def reply(self, response: HttpResponse) -> None:
        """Keep the response."""
        self.response = response

    def set_source(self, source: PausableSource | None) -> None:
        """Never pause a source."""

    async def drained(self) -> None:
        """Return at once."""

    def chunk_sink(self) -> None:
        """Return nothing: there is no client."""


def key_of_work(
    keys: KeyTable, leased: LeasedItem | LeasedResponse, now: float, kind: str
) -> KeyEntry:
    """Return the key that began leased work. Raises ApiError if it may not be answered, or not yet.

    `now` is Unix time. A key reaches routers one after the other, and another one has accepted it.
    """
    key = keys.get(leased.key_id)
    if key is None and leased.is_key_valid:
        raise ApiError(ErrorCode.UNAVAILABLE, "cannot answer yet: the key is not known here")
    if key is None or key.tenant_id != leased.tenant_id:
        reason = "is revoked"
    elif key.expires_at and key.expires_at <= now:
        reason = "has expired"
    else:
        return key
    raise ApiError(ErrorCode.INVALID_KEY, f"cannot answer: the key that began the {kind} {reason}")


@contextmanager
def unexpected_as_internal(request: HttpRequest) -> Iterator[None]:
    """Turn every other exception into an ApiError, by which the attempt counts.

    Without an answer the work would be leased again each minute, and counted as no attempt.
    """
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        log.exception("leased work failed", extra={"fields": {"request": request.request_id}})
        raise ApiError(ErrorCode.INTERNAL, "cannot answer: internal error") from error


def later_attempt(error: ApiError, after_max_s: float) -> LaterAttempt | None:
    """Return when to try again after an error; None if it is the answer."""
    if error.code not in NOT_NOW and error.code not in _FAILED:
        return None
    after_s = min(max(error.retry_after_s or RETRY_AFTER_S, 1.0), after_max_s)
    return LaterAttempt(after_s, error.code in _FAILED and not isinstance(error, NoNodeReached))


def check_capacity(response: HttpResponse | None) -> None:
    """Raise ApiError if the response is an engine's own 429, which the pipeline passes on."""
    if response is not None and response.status == MEANINGS[ErrorCode.OUT_OF_CAPACITY].status:
        raise ApiError(ErrorCode.OUT_OF_CAPACITY, "cannot answer: the engine has no capacity")

"""Answers one item of a batch through the pipeline, like a request of its key's client."""

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.errors import MEANINGS, ApiError, ErrorCode, openai_error
from isochrone.wire.http import headers
from isochrone.wire.peers.batches import ANSWER_BYTES_MAX, ItemResult, LeasedItem
from isochrone.wire.peers.responses import LeasedResponse
from isochrone.wire.peers.routes import KeyEntry
from router.apis.request_ids import RequestIds
from router.dataplane.http_messages import (
    HttpRequest,
    HttpResponse,
    PausableSource,
    ResponseWriter,
)
from router.decide.admission.batch_capacity import PreemptedItem
from router.decide.attempt import NoNodeReached
from router.inference_request import InferenceRequest

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 5.0
RETRY_AFTER_MAX_S: Final = 60.0
"""An operator may raise a limit or a quota earlier than the error says. Until then the scheduler
leases no item of a key whose quota is spent."""

NOT_NOW: Final = frozenset(
    {
        *(ErrorCode.RATE_LIMITED, ErrorCode.QUOTA_EXCEEDED, ErrorCode.OUT_OF_CAPACITY),
        ErrorCode.UNAVAILABLE,
    }
)
"""Errors that say nothing about the item: it waits, and its client never sees them."""

_FAILED: Final = frozenset({ErrorCode.UPSTREAM, ErrorCode.INTERNAL})
"""Errors after which the item is tried again a few times."""


ReadInference = Callable[
    [HttpRequest, str, ResponseWriter], tuple[InferenceRequest, ResponseWriter]
]
Serve = Callable[[InferenceRequest, ResponseWriter], Awaitable[None]]


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
        """Refuse a stream: items of batches are not streamed."""
        raise RuntimeError("an item of a batch is not streamed")

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


class ItemAnswerer:
    """Answers items for the loop that leases them."""

    def __init__(
        self,
        *,
        keys: Callable[[], KeyTable],
        read: ReadInference,
        serve: Serve,
        request_ids: RequestIds,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        """`clock` returns monotonic seconds, `unix_clock` Unix time."""
        self._unix_clock = unix_clock
        self._keys = keys
        self._read = read
        self._serve = serve
        self._request_ids = request_ids
        self._clock = clock

    async def answer(self, item: LeasedItem, preemptions: int) -> ItemResult | PreemptedItem:
        """Return the result of an item that was preempted `preemptions` times before.

        It raises nothing but CancelledError.
        """
        request = HttpRequest()
        request.method, request.path, request.body = b"POST", item.endpoint, item.body
        request.headers = {headers.PRIORITY.encode(): headers.PRIORITY_LOWEST.encode()}
        request.arrived_s = self._clock()
        request.request_id, request.client_request_id = self._request_ids.next("")
        writer = CollectingWriter()
        try:
            with unexpected_as_internal(request):
                request.key = self._key_of(item)
                inference, translating = self._read(request, item.endpoint, writer)
                # Interactive requests must not wait behind it.
                inference.reject_if_busy = True
                inference.preemptions = preemptions
                try:
                    await self._serve(inference, translating)
                finally:
                    preemptions = inference.preemptions
                check_capacity(writer.response)
        except ApiError as error:
            if preemptions and error.code is ErrorCode.OUT_OF_CAPACITY:
                return PreemptedItem(preemptions)
            return _result_of(item, request, error)
        response = writer.response
        if response is None or len(response.body) > ANSWER_BYTES_MAX:
            too_large = ApiError(ErrorCode.TOO_LARGE, "cannot store the answer: it is too large")
            return _result_of(item, request, too_large)
        return ItemResult(
            ref=item.ref,
            status_code=response.status,
            request_id=request.client_request_id,
            body=response.body,
        )

    def _key_of(self, item: LeasedItem) -> KeyEntry:
        return key_of_work(self._keys(), item, self._unix_clock(), "batch")


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


def _result_of(item: LeasedItem, request: HttpRequest, error: ApiError) -> ItemResult:
    """Return an error as the item's result, or let it be tried again."""
    later = later_attempt(error, RETRY_AFTER_MAX_S)
    if later is not None:
        return ItemResult(ref=item.ref, retry_after_s=later.after_s, counts_as_attempt=later.counts)
    return ItemResult(
        ref=item.ref,
        status_code=error.meaning.status,
        request_id=request.client_request_id,
        body=msgspec.json.encode(openai_error(error)),
    )

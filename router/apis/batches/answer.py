"""Answers one item of a batch through the pipeline, like a request of its key's client."""

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.errors import ApiError, ErrorCode, openai_error
from isochrone.wire.http import headers
from isochrone.wire.peers.batches import ANSWER_BYTES_MAX, ItemResult, LeasedItem
from router.apis.leased_work import (
    CollectingWriter,
    check_capacity,
    key_of_work,
    later_attempt,
    unexpected_as_internal,
)
from router.apis.request_ids import RequestIds
from router.dataplane.http_messages import (
    HttpRequest,
    ResponseWriter,
)
from router.decide.admission.batch_capacity import PreemptedItem
from router.inference_request import InferenceRequest

RETRY_AFTER_MAX_S: Final = 60.0
"""An operator may raise a limit or a quota earlier than the error says. Until then the scheduler
leases no item of a key whose quota is spent."""

ReadInference = Callable[
    [HttpRequest, str, ResponseWriter], tuple[InferenceRequest, ResponseWriter]
]
Serve = Callable[[InferenceRequest, ResponseWriter], Awaitable[None]]


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
                request.key = key_of_work(self._keys(), item, self._unix_clock(), "batch")
                inference, translating = self._read(request, item.endpoint, writer)
                if inference.reject_if_busy:
                    message = "cannot use 'options.rejectIfBusy': an item waits for capacity"
                    raise ApiError(ErrorCode.INVALID_REQUEST, message, param="options")
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

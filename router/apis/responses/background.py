"""Answers one background response through the pipeline, like a request of its key's client."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from isochrone.wire.client_keys.key_table import KeyTable
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.responses import FinishResponse, LeasedResponse
from router.apis.leased_work import (
    CollectingWriter,
    check_capacity,
    key_of_work,
    later_attempt,
    unexpected_as_internal,
)
from router.apis.openai.surface import OpenAiSurface
from router.apis.request_ids import RequestIds
from router.apis.responses.stored import BackgroundRun, Serve, finish_message, read_background
from router.apis.responses.surface import RESPONSES_PATH
from router.dataplane.http_messages import HttpRequest

RETRY_AFTER_MAX_S: Final = 600.0

_RUN: Final = msgspec.msgpack.Decoder(BackgroundRun)


@dataclass(eq=False)
class BackgroundAnswerer:
    """Answers background responses for the loop that leases them.

    `clock` returns monotonic seconds.
    """

    openai: OpenAiSurface
    serve: Serve
    keys: Callable[[], KeyTable]
    request_ids: RequestIds
    clock: Callable[[], float]

    async def answer(self, leased: LeasedResponse) -> FinishResponse:
        """Return how a response ended. It raises nothing but CancelledError.

        Without capacity, or over a limit of its key, it waits and is tried again.
        """
        request = self._request_of(leased)
        try:
            with unexpected_as_internal(request):
                return await self._answer(leased, request)
        except ApiError as error:
            later = later_attempt(error, RETRY_AFTER_MAX_S)
            if later is not None:
                return FinishResponse(
                    ref=leased.ref, retry_after_s=later.after_s, counts_as_attempt=later.counts
                )
            failure = {"code": "invalid_prompt", "message": error.message}
            body = {**msgspec.json.decode(leased.body), "status": "failed", "error": failure}
            return finish_message(leased.ref, body)

    async def _answer(self, leased: LeasedResponse, request: HttpRequest) -> FinishResponse:
        """Return the end of a response that is answered. Raises ApiError for any other."""
        writer, now = CollectingWriter(), self.openai.unix_clock()
        request.key = key_of_work(self.keys(), leased, now, "response")
        inference, translating, events = read_background(self.openai, request, leased, writer)
        await self.serve(inference, translating)
        response = writer.response
        check_capacity(response)
        if response is None or response.status != 200 or events.final is None:
            text = b"" if response is None else response.body[:300]
            message = f"cannot answer: the replica refused it: {text.decode(errors='replace')}"
            raise ApiError(ErrorCode.INVALID_REQUEST, message)
        return finish_message(leased.ref, events.final)

    def _request_of(self, leased: LeasedResponse) -> HttpRequest:
        run = _RUN.decode(leased.run)
        request = HttpRequest()
        request.method, request.path, request.body = b"POST", RESPONSES_PATH, run.body
        request.headers = {
            name.encode(): value.encode("latin-1") for name, value in run.headers.items() if value
        }
        request.arrived_s = self.clock()
        request.request_id, request.client_request_id = self.request_ids.next("")
        return request

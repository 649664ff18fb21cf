"""`/v1/responses/{id}` and `/v1/conversations`: relayed to the scheduler, on behalf of a key."""

import asyncio
import re
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http import headers
from router.apis.openai.decode import decode
from router.apis.query_flags import flag
from router.apis.relay import in_a_task, relay_to_scheduler
from router.apis.responses.items import identified, parse_items
from router.apis.responses.references import (
    may_have_references,
    referenced_responses,
    with_items,
)
from router.apis.responses.replay import FINAL, closing_events, opening_events
from router.apis.responses.stored import StoredResponses
from router.apis.responses.surface import RESPONSES_PATH
from router.apis.responses.translate import refuse_links
from router.dataplane.http_messages import HttpRequest, ResponseWriter
from router.dataplane.inline_task import inline_sleep
from router.scheduler_client import SchedulerClient

FOLLOW_S: Final = 3600.0
"""How long a client may follow a background response; then it connects again."""

POLL_MIN_S: Final = 0.25
POLL_MAX_S: Final = 2.0
READ_AT_ONCE: Final = 4
"""Stored responses that are read at once for one request, of at most a body's size each."""
KEEP_ALIVE: Final = b": waiting\n\n"

_ID: Final = r"[A-Za-z0-9_-]{1,64}"
_RESPONSE: Final = re.compile(rf"/v1/responses/{_ID}")
_PATHS: Final = re.compile(
    rf"/v1/responses/{_ID}(?:/cancel|/input_items)?"
    rf"|/v1/conversations(?:/{_ID}(?:/items(?:/{_ID})?)?)?"
)
_WITH_ITEMS: Final = re.compile(rf"/v1/conversations(?:/{_ID}/items)?")
_NOT_HONOURED: Final = ("include", "include[]")


class _Given(msgspec.Struct, frozen=True):
    items: list[dict[str, Any]] | None = None


_GIVEN: Final = msgspec.json.Decoder(_Given)
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def is_stored_path(path: str) -> bool:
    """Return whether a path is one of stored responses or conversations."""
    return path.startswith("/v1/") and _PATHS.fullmatch(path) is not None


@dataclass(eq=False)
class StoredRoutes:
    """Answers requests for what is stored."""

    client: SchedulerClient
    stored: StoredResponses

    def is_needed(self, request: HttpRequest) -> bool:
        """Return whether a request for a new response is answered here. Raises ApiError 400."""
        return may_have_references(request.body) or self.stored.is_needed(request.body)

    async def create(self, request: HttpRequest, writer: ResponseWriter) -> None:
        """Answer `POST /v1/responses`. Raises ApiError. An inline task."""
        if may_have_references(request.body):
            items: dict[str, Any] = {}
            if response_ids := referenced_responses(request.body):
                items = await in_a_task(self._output_of(request, response_ids))
            request.body = with_items(request.body, items)
            if not self.stored.is_needed(request.body):
                await self.stored.answer_unstored(request, writer)
                return
        followed = await self.stored.create(request, writer)
        if followed is not None:
            request.path = f"{RESPONSES_PATH}/{followed.response_id}"
            await self._follow(request, -1, writer)

    async def answer(self, request: HttpRequest, writer: ResponseWriter) -> None:
        """Answer a request for what is stored. Raises ApiError. An inline task."""
        query = parse_qs(request.query)
        for name in _NOT_HONOURED:
            if any(value != "reasoning.encrypted_content" for value in query.get(name, ())):
                raise _invalid("include", "no other fields of an item are stored")
        is_stream = flag(request.query, "stream")
        if flag(request.query, "include_obfuscation"):
            raise _invalid("include_obfuscation", "events are not padded")
        if request.method == b"GET" and is_stream and _RESPONSE.fullmatch(request.path):
            await self._follow(request, _starting_after(query), writer)
            return
        if request.method == b"POST" and _WITH_ITEMS.fullmatch(request.path):
            request.body = _with_ids(request, may_link=self.stored.may_link)
        await relay_to_scheduler(self.client, request, writer)

    async def _follow(
        self, request: HttpRequest, starting_after: int, writer: ResponseWriter
    ) -> None:
        """Stream the events of a stored response; the client may begin after any of them."""
        response = await in_a_task(self._read(request, request.path))
        lines = f"{headers.REQUEST_ID}: {request.client_request_id}\r\ncache-control: no-store\r\n"
        writer.begin(200, "text/event-stream; charset=utf-8", lines)
        for frame in opening_events(response, starting_after):
            writer.send(frame)
        pause_s, waited_s = POLL_MIN_S, 0.0
        while response["status"] not in FINAL and waited_s < FOLLOW_S:
            await inline_sleep(pause_s)
            waited_s += pause_s
            pause_s = min(1.5 * pause_s, POLL_MAX_S)
            try:
                response = await in_a_task(self._read(request, request.path))
            except ApiError as error:
                if error.code is not ErrorCode.UNAVAILABLE:
                    # The response was deleted meanwhile.
                    response = {**response, "status": "cancelled"}
            if response["status"] not in FINAL:
                writer.send(KEEP_ALIVE)
                await writer.drained()
        if response["status"] in FINAL:
            for frame in closing_events(response, starting_after):
                writer.send(frame)
        writer.end()
        await writer.drained()

    async def _output_of(self, request: HttpRequest, response_ids: list[str]) -> dict[str, Any]:
        """Return the output items of stored responses, by id. Raises ApiError 503."""
        items: dict[str, Any] = {}

        async def read(response_id: str) -> None:
            try:
                stored = await self._fetch(request, f"{RESPONSES_PATH}/{response_id}")
            except ApiError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
            else:
                assert request.key is not None
                self.stored.charge(request.key, len(stored))
                response = msgspec.json.decode(stored)
                items.update((item["id"], item) for item in response["output"])

        for start in range(0, len(response_ids), READ_AT_ONCE):
            await asyncio.gather(*map(read, response_ids[start : start + READ_AT_ONCE]))
        return items

    async def _read(self, request: HttpRequest, path: str) -> dict[str, Any]:
        """Return a stored response. Raises ApiError."""
        read: dict[str, Any] = msgspec.json.decode(await self._fetch(request, path))
        return read

    async def _fetch(self, request: HttpRequest, path: str) -> bytes:
        """Return a stored response as JSON. Raises ApiError."""
        key = request.key
        assert key is not None
        async with self.client.relay(key, "GET", path) as response:
            return await response.read()


def _with_ids(request: HttpRequest, *, may_link: bool) -> bytes:
    """Return the body of a request that adds items, each with an id. Raises ApiError 400.

    `may_link` says whether images may be links.
    """
    items = decode(request.body, _GIVEN).items
    if items is None:
        return request.body
    parsed = parse_items(items, "items")
    if not may_link:
        refuse_links(parsed, "items")
    # The router's own part of the id: the client's may be that of other requests, or no part of a
    # path.
    own_id = "-".join(request.request_id.rsplit("-", 2)[1:])
    stored = identified(items, own_id, "items")
    return msgspec.json.encode(_FIELDS.decode(request.body) | {"items": stored})


def _starting_after(query: dict[str, list[str]]) -> int:
    text = query.get("starting_after", ["-1"])[-1]
    number = -1 if text == "-1" else parse_digits(text)
    if number is not None:
        return number
    raise _invalid("starting_after", f"expected the number of an event, got {text[:20]!r}")


def _invalid(field: str, reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, f"cannot use '{field}': {reason}", param=field)

"""Responses that are stored: `store`, `previous_response_id`, `conversation` and `background`.

Rule 1: a response is stored before its id is sent to a client, and its end before the last event.
Rule 2: it ends once. If this router dies, the scheduler ends it; if the scheduler does, the end is
sent again until another scheduler has stored it.
Rule 3: only requests that ask for it wait for the scheduler.
"""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, ErrorCode, unusable_field
from isochrone.wire.http import headers
from isochrone.wire.ids import KeyId, TenantId
from isochrone.wire.peers import responses as wire
from isochrone.wire.peers.routes import KeyEntry
from router.apis.openai.decode import decode
from router.apis.openai.surface import OpenAiSurface
from router.apis.relay import in_a_task
from router.apis.responses.events import ResponseEvents, new_response
from router.apis.responses.finishing_writer import FinishingWriter
from router.apis.responses.items import input_of, parse_items
from router.apis.responses.surface import read_responses_request, responses_writer
from router.apis.responses.translate import RESPONSES_REQUEST, ResponsesRequest, to_chat
from router.dataplane.http_messages import HttpRequest, HttpResponse, ResponseWriter
from router.inference_request import InferenceRequest
from router.recording.metrics import Metrics
from router.response_client import ResponseClient

_FIELDS: Final = (b'"store"', b'"background"', b'"previous_response_id"', b'"conversation"')
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[4-7]")
"""An ASCII letter or `_` as an escape, with which the name of a field may be written, too."""
_RELAYED: Final = (headers.SESSION_AFFINITY, headers.PRIORITY, headers.TRACEPARENT)

Serve = Callable[[InferenceRequest, ResponseWriter], Awaitable[None]]
Charge = Callable[[KeyEntry, int], None]
"""Charges stored JSON of so many bytes to a key's parse budget. Raises LimitExceeded."""


class BackgroundRun(msgspec.Struct, frozen=True, array_like=True):
    """The stored parts of a request, until it is answered in the background.

    The body, and the headers that change how it is answered.
    """

    body: bytes
    headers: dict[str, str]


@dataclass(eq=False, kw_only=True)
class StoredResponses:
    """Answers requests whose responses are stored, or that continue stored ones.

    `is_default` says whether responses are stored whose request does not say.
    """

    client: ResponseClient
    openai: OpenAiSurface
    serve: Serve
    metrics: Metrics
    is_default: bool
    charge: Charge
    open: set[wire.ResponseRef] = field(default_factory=set, init=False)
    """The responses that clients of this process wait for; their leases are renewed."""
    _finishing: set[asyncio.Task[bool]] = field(default_factory=set, init=False)

    @property
    def may_link(self) -> bool:
        """Whether the images of items may be links."""
        return self.openai.may_link

    def is_needed(self, body: bytes) -> bool:
        """Return whether a request's response is to be stored, or continues a stored one."""
        is_named = any(field in body for field in _FIELDS) or _ESCAPED_LETTER.search(body)
        if not (self.is_default or is_named):
            return False
        given = decode(body, RESPONSES_REQUEST)
        return self._is_stored(given) or _has_state(given)

    def _is_stored(self, given: ResponsesRequest) -> bool:
        if given.store is not None:
            return given.store
        return _has_state(given) or self.is_default

    async def create(self, request: HttpRequest, writer: ResponseWriter) -> wire.ResponseRef | None:
        """Answer `POST /v1/responses`; return a background response instead of answering it.

        Raises ApiError if nothing was written yet. An inline task.
        """
        given = decode(request.body, RESPONSES_REQUEST)
        is_stored = self._is_stored(given)
        _refuse_contradictions(given, is_stored)
        response_id = f"resp_{secrets.token_hex(16)}"
        response = new_response(
            given, response_id, int(self.openai.unix_clock()), is_stored=is_stored
        )
        # Everything that can be refused is refused before anything is stored.
        encode_error = ResponseEvents(given, response).failed
        chat = to_chat(given, may_link=self.may_link)
        self.openai.read_translated(request, chat, encode_error, "input")
        items = input_of(request.body, f"{response_id}_in")
        begun = await in_a_task(self._begin(request, given, response, items, is_stored))
        ref = wire.ResponseRef(response_id, begun.lease_id)
        if given.background:
            self.metrics.stored_responses.labels("background").inc()
            if not given.stream:
                writer.reply(
                    HttpResponse(200, msgspec.json.encode(_queued(response)), _id(request))
                )
                return None
            return ref
        events = ResponseEvents(given, response)
        try:
            assert request.key is not None
            self.charge(request.key, len(begun.context_items))
            chat = _whole_chat(given, begun.context_items, items)
            inference = self.openai.read_translated(request, chat, events.failed, "input")
        except ApiError:
            if is_stored:
                self._discard_in_a_task(ref, request)
            raise
        if not is_stored:
            await self.serve(inference, responses_writer(writer, events))
        else:
            await self._answer(ref, inference, events, request, writer)
        return None

    async def answer_unstored(self, request: HttpRequest, writer: ResponseWriter) -> None:
        """Answer a request that stores nothing and needs nothing more. Raises ApiError."""
        await self.serve(*read_responses_request(self.openai, request, writer))

    async def _begin(
        self,
        request: HttpRequest,
        given: ResponsesRequest,
        response: dict[str, Any],
        items: list[dict[str, Any]],
        is_stored: bool,
    ) -> wire.BegunResponse:
        """Store the response that begins; return what it builds on. Raises ApiError."""
        key = request.key
        assert key is not None
        run = b""
        if given.background:
            relayed = {name: request.header(name.encode()) for name in _RELAYED}
            run = msgspec.msgpack.encode(BackgroundRun(request.body, relayed))
            response = _queued(response)
        message = wire.BeginResponse(
            response_id=response["id"],
            tenant_id=TenantId(key.tenant_id),
            key_id=KeyId(key.key_id),
            body=msgspec.json.encode(response),
            input_items=msgspec.json.encode(items),
            run=run,
            previous_response_id=given.previous_response_id or "",
            conversation_id=given.conversation_id,
            is_stored=is_stored,
        )
        return await self.client.begin(message)

    async def _answer(
        self,
        ref: wire.ResponseRef,
        inference: InferenceRequest,
        events: ResponseEvents,
        request: HttpRequest,
        writer: ResponseWriter,
    ) -> None:
        """Answer a response that has begun, and store its end before the client gets it.

        If the client gets an error, with which no id comes, the response is deleted: at a limit, or
        without capacity, such responses would soon be all that their tenant may store.
        """
        self.open.add(ref)
        holding = FinishingWriter(writer, lambda: events.final is not None)
        outcome, is_error = "cancelled", False
        try:
            await self.serve(inference, responses_writer(holding, events))
            if holding.is_refused:
                outcome, is_error = "failed", True
                holding.release()
            else:
                outcome = "lost"
                outcome = await self._store_end(ref, events, holding)
        except ApiError:
            outcome, is_error = "failed", True
            raise
        finally:
            self.metrics.stored_responses.labels(outcome).inc()
            if is_error:
                self._discard_in_a_task(ref, request)
            elif outcome == "cancelled":
                self._finish_soon(ref, events)

    async def _store_end(
        self, ref: wire.ResponseRef, events: ResponseEvents, holding: FinishingWriter
    ) -> str:
        """Store how a response ended, then send its end; return its status, or "lost"."""
        if events.final is None:
            message = "cannot answer: the replica sent no end"
            events.failed(ApiError(ErrorCode.UPSTREAM, message))
        assert events.final is not None
        # A client that leaves now must not end this.
        if await in_a_task(_result_of(self._finish_in_a_task(ref, events.final))):
            holding.release()
            return str(events.final["status"])
        lost = ApiError(
            ErrorCode.UNAVAILABLE,
            "cannot store the response: it was deleted, or no scheduler was reachable;"
            " send the request again",
            retry_after_s=1.0,
        )
        holding.fail(lost, events.failed(lost))
        return "lost"

    def _finish_soon(self, ref: wire.ResponseRef, events: ResponseEvents) -> None:
        """Store that a client has left, without waiting for it."""
        if events.final is None:
            events.failed(ApiError(ErrorCode.REQUEST_TIMEOUT, "the client disconnected"))
        self._finish_in_a_task(ref, {**(events.final or {}), "status": "cancelled"})

    def _discard_in_a_task(self, ref: wire.ResponseRef, request: HttpRequest) -> None:
        """Delete a response whose client gets an error; its lease is renewed until then."""
        assert request.key is not None
        self._keep(ref, self.client.discard(ref.response_id, request.key))

    def _finish_in_a_task(
        self, ref: wire.ResponseRef, response: dict[str, Any]
    ) -> asyncio.Task[bool]:
        """Store the end of a response; its lease is renewed until then."""
        return self._keep(ref, self.client.finish(finish_message(ref, response)))

    def _keep(
        self, ref: wire.ResponseRef, message: Coroutine[Any, Any, bool]
    ) -> asyncio.Task[bool]:
        """Send a response's last message in a task, and renew its lease until that has ended."""
        task = asyncio.get_running_loop().create_task(message)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        task.add_done_callback(lambda _: self.open.discard(ref))
        return task


def finish_message(ref: wire.ResponseRef, response: dict[str, Any]) -> wire.FinishResponse:
    """Return the message about the end of a response."""
    body = msgspec.json.encode(response)
    return wire.FinishResponse(ref=ref, status=response["status"], body=body)


def read_background(
    openai: OpenAiSurface, request: HttpRequest, leased: wire.LeasedResponse, writer: ResponseWriter
) -> tuple[InferenceRequest, ResponseWriter, ResponseEvents]:
    """Return the inference request of a background response, and the translator of its answer."""
    given = msgspec.structs.replace(decode(request.body, RESPONSES_REQUEST), stream=None)
    chat = _whole_chat(given, leased.context_items, input_of(request.body, "in"))
    response = {**msgspec.json.decode(leased.body), "status": "in_progress"}
    events = ResponseEvents(given, response)
    inference = openai.read_translated(request, chat, events.failed, "input")
    return inference, responses_writer(writer, events), events


def _whole_chat(
    given: ResponsesRequest, context_items: bytes, items: list[dict[str, Any]]
) -> bytes:
    """Return a request as a chat, with the stored items that it builds on before its own."""
    stored = msgspec.json.decode(context_items, type=list[msgspec.Raw])
    earlier, own = parse_items(stored, "previous_response_id"), parse_items(items, "input")
    return to_chat(msgspec.structs.replace(given, input=[*earlier, *own]))


async def _result_of(task: asyncio.Task[bool]) -> bool:
    """Return a task's result; it goes on if this is cancelled."""
    return await asyncio.shield(task)


def _has_state(given: ResponsesRequest) -> bool:
    """Return whether a request needs what is stored."""
    return bool(given.previous_response_id or given.conversation or given.background)


def _refuse_contradictions(given: ResponsesRequest, is_stored: bool) -> None:
    """Raise ApiError 400 for fields that exclude each other."""
    if given.previous_response_id and given.conversation:
        field, reason = "conversation", "it excludes 'previous_response_id'"
    elif not is_stored and (given.background or given.conversation):
        field, reason = "store", "a background response or a conversation is always stored"
    else:
        return
    raise unusable_field(field, reason)


def _queued(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "status": "queued"}


def _id(request: HttpRequest) -> str:
    return f"{headers.REQUEST_ID}: {request.client_request_id}\r\n"

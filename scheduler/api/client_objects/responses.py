"""Stored responses of the public API: begun, ended and leased by routers, read by clients."""

import secrets
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_response
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.responses import (
    BeginResponse,
    BegunResponse,
    FinishedResponse,
    FinishResponse,
    LeasedResponses,
    LeaseResponses,
)
from scheduler.api.client_objects.batch_files import parse_limit, parse_order, require_after
from scheduler.api.client_objects.relayed import ClientTurns
from scheduler.decide.response_items import (
    ItemPage,
    ended_body,
    join_items,
    output_items,
    page_of,
    storage_refusal,
    stored_items,
)
from scheduler.decide.response_limits import ResponseLimits
from scheduler.store.accounts.keys import live_keys
from scheduler.store.client_objects.conversations import (
    add_items,
    all_items,
    read_conversation,
)
from scheduler.store.client_objects.responses import (
    ResponseRow,
    add_response,
    delete_response,
    end_response,
    lease_responses,
    postpone_response,
    read_response,
    renew_responses,
    tenant_use,
)
from scheduler.store.pool import Connection, Pool, transaction, using

LIST_LIMIT_DEFAULT: Final = 20
LIST_LIMIT_MAX: Final = 100

_BEGIN: Final = msgspec.msgpack.Decoder(BeginResponse)
_FINISH: Final = msgspec.msgpack.Decoder(FinishResponse)
_LEASE: Final = msgspec.msgpack.Decoder(LeaseResponses)


class ResponseWork:
    """Handles messages of routers: a response begins, ends, or is leased."""

    def __init__(self, pool: Pool, limits: ResponseLimits, turns: ClientTurns) -> None:
        self._pool = pool
        self._limits = limits
        self._turns = turns

    async def begin(self, body: bytes) -> BegunResponse:
        """Store a response before it is answered, and return what it builds on."""
        begin = _BEGIN.decode(body)
        lease_id = "" if begin.run else secrets.token_hex(8)
        # Those of one tenant wait for each other in the database, each with a connection.
        async with self._turns.turn(begin.tenant_id), transaction(self._pool) as connection:
            context_items = await self._context(connection, begin)
            new_bytes = len(context_items) + len(begin.input_items)
            self._check_context(begin, new_bytes)
            if not begin.is_stored:
                return BegunResponse(context_items=context_items)
            new_bytes += len(begin.body) + len(begin.run)
            await check_storage(connection, begin.tenant_id, new_bytes, self._limits)
            # A router that repeats the message got no answer: it begins with another id.
            if not await add_response(connection, begin, context_items, lease_id, self._limits):
                raise ApiError(
                    ErrorCode.CONFLICT, f"cannot store {begin.response_id}: it is stored already"
                )
        return BegunResponse(context_items=context_items, lease_id=lease_id)

    async def finish(self, body: bytes) -> FinishedResponse:
        """Store how a response ended, unless it had ended before."""
        finish = _FINISH.decode(body)
        ref = finish.ref
        async with transaction(self._pool) as connection:
            row = await read_response(connection, ref.response_id, lock=True)
            if row is None or not row.is_open:
                is_repeated = (
                    row is not None and bool(ref.lease_id) and row.lease_id == ref.lease_id
                )
                return FinishedResponse(is_stored=is_repeated)
            if finish.retry_after_s > 0:
                if not await postpone_response(connection, finish, self._limits.attempts_max):
                    message = f"cannot answer: {self._limits.attempts_max} attempts failed"
                    failed = ended_body(row.body, "failed", message)
                    await end_response(connection, ref.response_id, "failed", failed)
                return FinishedResponse(is_stored=True)
            await end_response(
                connection, ref.response_id, finish.status, finish.body, ref.lease_id
            )
            if row.conversation_id and finish.status in ("completed", "incomplete"):
                await self._extend_conversation(connection, row, finish.body)
        return FinishedResponse(is_stored=True)

    async def lease(self, body: bytes) -> LeasedResponses:
        """Renew a router's leases, and lease background responses to it."""
        message = _LEASE.decode(body)
        async with transaction(self._pool) as connection:
            lost = await renew_responses(connection, message.holds, self._limits.lease_s)
            leased = await lease_responses(
                connection, message.wanted, secrets.token_hex(8), self._limits.lease_s
            )
            keys = await live_keys(connection, sorted({response.key_id for response in leased}))
        valid = {key.key_id for key in keys}
        leased = [
            msgspec.structs.replace(response, is_key_valid=response.key_id in valid)
            for response in leased
        ]
        return LeasedResponses(responses=tuple(leased), lost=tuple(lost))

    async def _context(self, connection: Connection, begin: BeginResponse) -> bytes:
        """Return the items before a response's own. Raises ApiError."""
        if begin.conversation_id:
            conversation_id = begin.conversation_id
            found = await read_conversation(connection, conversation_id, begin.tenant_id)
            if found is None:
                raise ApiError(
                    ErrorCode.NOT_FOUND,
                    f"cannot find the conversation {conversation_id[:64]!r}",
                    param="conversation",
                )
            # Before its items are read: a conversation may be as large as all that a tenant stores.
            self._check_context(begin, found.size_bytes + len(begin.input_items))
            items = await all_items(connection, conversation_id)
            return msgspec.json.encode([msgspec.Raw(item) for item in items])
        previous_id = begin.previous_response_id
        if not previous_id:
            return b"[]"
        previous = await read_response(connection, previous_id, tenant_id=begin.tenant_id)
        if previous is None:
            reason = f"there is no stored response {previous_id[:64]!r}"
        elif previous.status not in ("completed", "incomplete"):
            reason = f"the status of {previous_id[:64]!r} is {previous.status!r}"
        else:
            return join_items(
                previous.context_items, previous.input_items, output_items(previous.body)
            )
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"cannot use field 'previous_response_id': {reason}",
            param="previous_response_id",
        )

    def _check_context(self, begin: BeginResponse, context_bytes: int) -> None:
        """Raise ApiError 400 if a response would build on too many bytes of items."""
        if context_bytes > self._limits.context_bytes_max:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot continue: the items before this request and its own have {context_bytes}"
                f" bytes, more than {self._limits.context_bytes_max}; start a new one",
                param="previous_response_id" if begin.previous_response_id else "input",
            )

    async def _extend_conversation(
        self, connection: Connection, row: ResponseRow, body: bytes
    ) -> None:
        """Append a response's input and output to its conversation, if that still exists."""
        assert row.conversation_id is not None
        conversation = await read_conversation(connection, row.conversation_id, None, lock=True)
        if conversation is None:
            return
        items = stored_items(join_items(row.input_items, output_items(body)))
        left = max(0, self._limits.conversation_items_max - conversation.item_count)
        await add_items(connection, conversation, items[:left], self._limits.keep_days)


class ResponseEndpoints:
    """The endpoints of stored responses. The tenant is the one that a router has authenticated."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def show(self, request: web.Request, tenant_id: str) -> web.Response:
        """Return a response as it is now."""
        return _json(_body(await self._response(request, tenant_id)))

    async def delete(self, request: web.Request, tenant_id: str) -> web.Response:
        """Delete a response. This cancels a response that is being answered."""
        response_id = request.match_info["response_id"]
        async with transaction(self._pool) as connection:
            if not await delete_response(connection, response_id, tenant_id):
                raise _not_found(response_id)
        deleted = {"id": response_id, "object": "response", "deleted": True}
        return json_response(deleted)

    async def cancel(self, request: web.Request, tenant_id: str) -> web.Response:
        """Cancel a background response; one that is cancelled already stays so."""
        response_id = request.match_info["response_id"]
        async with transaction(self._pool) as connection:
            row = await read_response(connection, response_id, tenant_id=tenant_id, lock=True)
            if row is None:
                raise _not_found(response_id)
            if not row.is_background:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    "cannot cancel the response: only background responses can be cancelled;"
                    " disconnect to end another one",
                )
            body = row.body
            if row.is_open:
                body = ended_body(row.body, "cancelled")
                await end_response(connection, response_id, "cancelled", body)
            elif row.status != "cancelled":
                raise ApiError(
                    ErrorCode.CONFLICT, f"cannot cancel the response: its status is {row.status!r}"
                )
        return _json(body)

    async def input_items(self, request: web.Request, tenant_id: str) -> web.Response:
        """List the items that a response was generated from, those before its own included."""
        limit = parse_limit(request, LIST_LIMIT_DEFAULT, LIST_LIMIT_MAX)
        row = await self._response(request, tenant_id)
        after = request.query.get("after", "")
        page = page_of(
            join_items(row.context_items, row.input_items),
            after=after,
            is_ascending=parse_order(request),
            limit=limit,
        )
        require_after(page, after)
        return items_response(page or ItemPage([], has_more=False))

    async def _response(self, request: web.Request, tenant_id: str) -> ResponseRow:
        response_id = request.match_info["response_id"]
        async with using(self._pool) as connection:
            row = await read_response(connection, response_id, tenant_id=tenant_id)
        if row is None:
            raise _not_found(response_id)
        return row


async def check_storage(
    connection: Connection, tenant_id: str, new_bytes: int, limits: ResponseLimits
) -> None:
    """Raise ApiError if a tenant may not store this much more."""
    if limits.tenant_bytes_max == 0:
        reason = storage_refusal(0, 0, 0, limits)
        raise ApiError(ErrorCode.INVALID_REQUEST, f"cannot store: {reason}", param="store")
    use = await tenant_use(connection, tenant_id)
    reason = storage_refusal(use.count, use.size_bytes, new_bytes, limits)
    if reason is not None:
        raise ApiError(ErrorCode.QUOTA_EXCEEDED, f"cannot store: {reason}")


def items_response(page: ItemPage) -> web.Response:
    """Return OpenAI's list of a page of items."""
    ids = [item.item_id for item in stored_items(msgspec.json.encode(page.items))]
    body: dict[str, Any] = {
        "object": "list",
        "data": page.items,
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": page.has_more,
    }
    return json_response(body)


def _body(row: ResponseRow) -> bytes:
    """Return the response as it is now: a background response begins as queued."""
    if row.is_open and row.is_background:
        response: dict[str, Any] = msgspec.json.decode(row.body)
        return msgspec.json.encode({**response, "status": row.status})
    return row.body


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _not_found(response_id: str) -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find the stored response {response_id[:64]!r}")

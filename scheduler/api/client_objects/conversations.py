"""Conversations of the public API. Routers have checked the items, and given each an id."""

import secrets
from typing import Any, Final

import msgspec
from aiohttp import web

from isochrone.service.network.http_server import json_response, read_body
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.http.invalid_field import decode_public
from isochrone.wire.http.public_bodies import AddItems, CreateConversation, UpdateConversation
from scheduler.api.client_objects.batch_files import parse_limit, parse_order, require_after
from scheduler.api.client_objects.responses import (
    LIST_LIMIT_DEFAULT,
    LIST_LIMIT_MAX,
    check_storage,
    items_response,
)
from scheduler.decide.response_items import ItemPage, stored_items
from scheduler.decide.response_limits import ResponseLimits
from scheduler.store.client_objects.conversations import (
    StoredConversation,
    add_conversation,
    add_items,
    delete_conversation,
    delete_item,
    list_items,
    read_conversation,
    read_item,
    set_metadata,
)
from scheduler.store.pool import Connection, Pool, transaction, using

BODY_TIMEOUT_S: Final = 30.0
PAGE_BYTES_MAX: Final = 1024 * 1024
"""A page of items ends with the one that reaches this: many clients may read pages at once, and
each page is whole in memory."""


class ConversationEndpoints:
    """The endpoints of conversations. The tenant is the one that a router has authenticated."""

    def __init__(self, pool: Pool, limits: ResponseLimits) -> None:
        self._pool = pool
        self._limits = limits

    async def create(self, request: web.Request, tenant_id: str) -> web.Response:
        """Begin a conversation."""
        given = await self._read(request, CreateConversation)
        conversation_id = f"conv_{secrets.token_hex(16)}"
        async with transaction(self._pool) as connection:
            await check_storage(connection, tenant_id, _size(given.items or []), self._limits)
            await add_conversation(
                connection,
                conversation_id,
                tenant_id,
                given.metadata or {},
                self._limits.keep_days,
            )
            conversation = await _find(connection, conversation_id, tenant_id, lock=True)
            await self._add(connection, conversation, given.items or [])
        return json_response(_body(conversation))

    async def show(self, request: web.Request, tenant_id: str) -> web.Response:
        """Return a conversation."""
        async with using(self._pool) as connection:
            conversation = await _find(connection, _id(request), tenant_id)
        return json_response(_body(conversation))

    async def update(self, request: web.Request, tenant_id: str) -> web.Response:
        """Replace a conversation's metadata."""
        given = await self._read(request, UpdateConversation)
        async with transaction(self._pool) as connection:
            await _find(connection, _id(request), tenant_id, lock=True)
            await set_metadata(connection, _id(request), given.metadata or {})
            conversation = await _find(connection, _id(request), tenant_id, lock=True)
        return json_response(_body(conversation))

    async def delete(self, request: web.Request, tenant_id: str) -> web.Response:
        """Delete a conversation with its items; responses stay."""
        async with transaction(self._pool) as connection:
            if not await delete_conversation(connection, _id(request), tenant_id):
                raise _not_found(_id(request))
        deleted = {"id": _id(request), "object": "conversation.deleted", "deleted": True}
        return json_response(deleted)

    async def list_items(self, request: web.Request, tenant_id: str) -> web.Response:
        """List items, the newest first by default."""
        limit = parse_limit(request, LIST_LIMIT_DEFAULT, LIST_LIMIT_MAX)
        async with using(self._pool) as connection:
            await _find(connection, _id(request), tenant_id)
            items, has_more = await list_items(
                connection,
                _id(request),
                after=request.query.get("after", ""),
                is_ascending=parse_order(request),
                limit=limit,
                bytes_max=PAGE_BYTES_MAX,
            )
            if not items and (after := request.query.get("after")):
                require_after(await read_item(connection, _id(request), after), after)
        return items_response(ItemPage([msgspec.Raw(item.item) for item in items], has_more))

    async def add_items(self, request: web.Request, tenant_id: str) -> web.Response:
        """Append items; return them."""
        given = await self._read(request, AddItems)
        async with transaction(self._pool) as connection:
            await check_storage(connection, tenant_id, _size(given.items), self._limits)
            conversation = await _find(connection, _id(request), tenant_id, lock=True)
            await self._add(connection, conversation, given.items)
        return items_response(ItemPage(given.items, has_more=False))

    async def show_item(self, request: web.Request, tenant_id: str) -> web.Response:
        """Return one item."""
        item_id = request.match_info["item_id"]
        async with using(self._pool) as connection:
            await _find(connection, _id(request), tenant_id)
            item = await read_item(connection, _id(request), item_id)
        if item is None:
            raise _item_not_found(item_id)
        return web.Response(body=item.item, content_type="application/json")

    async def delete_item(self, request: web.Request, tenant_id: str) -> web.Response:
        """Delete one item; return the conversation."""
        item_id = request.match_info["item_id"]
        async with transaction(self._pool) as connection:
            conversation = await _find(connection, _id(request), tenant_id, lock=True)
            if not await delete_item(connection, _id(request), item_id):
                raise _item_not_found(item_id)
        return json_response(_body(conversation))

    async def _read(self, request: web.Request, kind: type[Any]) -> Any:
        """Return the decoded body. Raises ApiError 400."""
        raw = await read_body(
            request, bytes_max=self._limits.context_bytes_max, timeout_s=BODY_TIMEOUT_S
        )
        return decode_public(raw, msgspec.json.Decoder(kind))

    async def _add(
        self, connection: Connection, conversation: StoredConversation, items: list[msgspec.Raw]
    ) -> None:
        """Append items to a locked conversation. Raises ApiError if it would have too many."""
        limit = self._limits.conversation_items_max
        if conversation.item_count + len(items) > limit:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot add items: a conversation has at most {limit}; begin another one",
                param="items",
            )
        added = stored_items(msgspec.json.encode(items))
        if len(await add_items(connection, conversation, added, self._limits.keep_days)) < len(
            items
        ):
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                "cannot add items: the conversation has an item with the id of one of them",
                param="items",
            )


def _size(items: list[msgspec.Raw]) -> int:
    return sum(len(bytes(item)) for item in items)


def _body(conversation: StoredConversation) -> dict[str, Any]:
    """Return OpenAI's object of a conversation."""
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }


def _id(request: web.Request) -> str:
    return request.match_info["conversation_id"]


async def _find(
    connection: Connection, conversation_id: str, tenant_id: str, *, lock: bool = False
) -> StoredConversation:
    """Return a tenant's conversation. Raises ApiError 404."""
    conversation = await read_conversation(connection, conversation_id, tenant_id, lock=lock)
    if conversation is None:
        raise _not_found(conversation_id)
    return conversation


def _not_found(conversation_id: str) -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find the conversation {conversation_id[:64]!r}")


def _item_not_found(item_id: str) -> ApiError:
    return ApiError(ErrorCode.NOT_FOUND, f"cannot find the item {item_id[:64]!r}")

"""Items of responses and conversations, as JSON; and responses that end without an answer. Pure."""

from typing import Any, Literal

import msgspec

from scheduler.decide.response_limits import ResponseLimits


class StoredItem(msgspec.Struct, frozen=True):
    """An item: its id, and the whole of it as JSON."""

    item_id: str
    item: bytes


class ItemPage(msgspec.Struct, frozen=True):
    """A part of a list of items."""

    items: list[msgspec.Raw]
    has_more: bool


class _Identified(msgspec.Struct):
    id: str


class _Output(msgspec.Struct):
    output: list[msgspec.Raw] = []


def join_items(*arrays: bytes) -> bytes:
    """Return one JSON array with the items of all of them."""
    return msgspec.json.encode([item for array in arrays for item in raw_items(array)])


def raw_items(array: bytes) -> list[msgspec.Raw]:
    """Return the items of a JSON array, each as JSON."""
    return msgspec.json.decode(array, type=list[msgspec.Raw])


def output_items(body: bytes) -> bytes:
    """Return the output of a response as a JSON array."""
    return msgspec.json.encode(msgspec.json.decode(body, type=_Output).output)


def stored_items(array: bytes) -> list[StoredItem]:
    """Return the items of a JSON array with their ids. Raises msgspec.DecodeError without one."""
    return [
        StoredItem(msgspec.json.decode(item, type=_Identified).id, bytes(item))
        for item in raw_items(array)
    ]


def page_of(array: bytes, *, after: str, is_ascending: bool, limit: int) -> ItemPage | None:
    """Return up to `limit` items after the item `after`; None if there is no such item."""
    items = stored_items(array)
    if not is_ascending:
        items.reverse()
    if after:
        places = [place for place, item in enumerate(items) if item.item_id == after]
        if not places:
            return None
        items = items[places[0] + 1 :]
    return ItemPage([msgspec.Raw(item.item) for item in items[:limit]], len(items) > limit)


def ended_body(
    body: bytes, status: Literal["failed", "cancelled"], error_message: str = ""
) -> bytes:
    """Return a response that ends without an answer."""
    response: dict[str, Any] = msgspec.json.decode(body)
    response["status"] = status
    if error_message:
        response["error"] = {"code": "server_error", "message": error_message}
    return msgspec.json.encode(response)


def storage_refusal(
    count: int, size_bytes: int, new_bytes: int, limits: ResponseLimits
) -> str | None:
    """Return why a tenant that has `size_bytes` in `count` objects may not store `new_bytes`."""
    if limits.tenant_bytes_max == 0:
        return "the operator does not store responses; send store: false and the items as 'input'"
    if count >= limits.tenant_count_max:
        stored = f"{limits.tenant_count_max} responses or conversations"
    elif size_bytes + new_bytes > limits.tenant_bytes_max:
        stored = f"{limits.tenant_bytes_max // 2**20} MiB of responses and conversations"
    else:
        return None
    return f"this tenant has {stored} stored, which is its limit; delete some, or store no more"

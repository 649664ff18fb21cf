"""Items as they are stored: each with an id, a type and a status. Pure."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from isochrone.wire.errors import unusable_field
from isochrone.wire.http.invalid_field import invalid_field
from router.apis.responses.translate import ITEMS_MAX, InputItem, check_items

_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}
"""The prefix of an item's id, by its type."""

_ItemId = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]


class _GivenItem(msgspec.Struct):
    id: _ItemId | None = None


class _GivenInput(msgspec.Struct):
    input: str | list[dict[str, Any]]


def input_of(body: bytes, id_suffix: str) -> list[dict[str, Any]]:
    """Return the items of a checked request's input, as they are stored."""
    input_items = msgspec.json.decode(body, type=_GivenInput).input
    if isinstance(input_items, str):
        input_items = [{"type": "message", "role": "user", "content": input_items}]
    return identified(input_items, id_suffix, "input")


def identified(items: list[dict[str, Any]], id_suffix: str, field: str) -> list[dict[str, Any]]:
    """Return items with ids, those of the client where it gave any. Raises ApiError 400."""
    stored: list[dict[str, Any]] = []
    known: set[str] = set()
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        try:
            item_id = msgspec.convert(item, _GivenItem).id
        except msgspec.ValidationError:
            raise unusable_field(
                f"{field}[{number}].id", "expected up to 64 of A-Z a-z 0-9 _ -"
            ) from None
        item_id = item_id or f"{_PREFIXES.get(kind, 'item')}_{id_suffix}_{number}"
        if item_id in known:
            raise unusable_field(f"{field}[{number}].id", f"an earlier item has the id {item_id!r}")
        known.add(item_id)
        stored.append({"status": "completed", **item, "id": item_id, "type": kind})
        if kind == "message" and isinstance(item.get("content"), str):
            part = {"type": "input_text", "text": item["content"]}
            if item.get("role") == "assistant":
                part = {"type": "output_text", "text": item["content"], "annotations": []}
            stored[-1]["content"] = [part]
    return stored


def parse_items(items: list[dict[str, Any]] | list[msgspec.Raw], field: str) -> list[InputItem]:
    """Return items as the translation reads them. Raises ApiError 400."""
    if len(items) > ITEMS_MAX:
        raise unusable_field(field, f"it has {len(items)} items, more than {ITEMS_MAX}")
    try:
        parsed = msgspec.json.decode(msgspec.json.encode(items), type=list[InputItem])
    except msgspec.DecodeError as error:
        reason = str(error).replace("`$", f"`$.{field}")
        raise invalid_field(reason, dict[str, list[InputItem]]) from None
    check_items(parsed, field)
    return parsed

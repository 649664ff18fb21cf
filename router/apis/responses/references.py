"""References of an input to items of stored responses, which take the items' place. Pure.

`@ai-sdk/openai` refers to texts and reasoning of earlier answers, unless its option `store` is
false.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from isochrone.wire.errors import ApiError, unusable_field
from router.apis.responses.translate import ITEMS_MAX

RESPONSES_MAX: Final = 64
"""Responses that one input may refer to: each is read from a scheduler."""

ITEMS_BYTES_MAX: Final = 8 * 1024 * 1024
"""The most bytes of the items together: as many as of a body, and of the items before a
response."""

_TYPE: Final = "item_reference"
_QUOTED_TYPE: Final = b'"item_reference"'
_REASONING: Final = "rs_"
"""The prefix of the ids of reasoning. An answer goes on without reasoning that is not stored."""
_STORED_ID: Final = re.compile(r"(?:msg|fc|rs)_(resp_[0-9a-f]{32})_\d{1,5}")
"""The id of an output item of a stored response."""


class _Item(msgspec.Struct, frozen=True):
    type: str = "message"
    id: str = ""


_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_ITEM: Final = msgspec.json.Decoder(_Item)


def may_have_references(body: bytes) -> bool:
    """Return whether a body may refer to items. Costs one search."""
    return _QUOTED_TYPE in body


def referenced_responses(body: bytes) -> list[str]:
    """Return the ids of the stored responses whose items an input refers to. Raises ApiError 400.

    A body that cannot be decoded refers to none: its error is found when the request is read.
    """
    found = {}
    for number, raw in enumerate(_input_of(body)):
        reference = _reference(raw)
        stored = _STORED_ID.fullmatch(reference)
        if stored is not None:
            found[stored[1]] = True
        elif reference and not reference.startswith(_REASONING):
            raise _not_stored(number, reference)
    if len(found) > RESPONSES_MAX:
        reason = f"it refers to items of {len(found)} responses, more than {RESPONSES_MAX}"
        raise unusable_field("input", f"{reason}; send the items themselves")
    return list(found)


def with_items(body: bytes, items: Mapping[str, Any]) -> bytes:
    """Return a body whose input has the stored items, by id, in place of references to them.

    References to reasoning that is not among them are left out. Raises ApiError 400 for any other
    item that is not, and for more than `ITEMS_BYTES_MAX`.
    """
    whole: list[msgspec.Raw] = []
    items_bytes = 0
    for number, raw in enumerate(_input_of(body)):
        reference = _reference(raw)
        if not reference:
            whole.append(raw)
        elif reference in items:
            whole.append(msgspec.Raw(msgspec.json.encode(items[reference])))
            items_bytes += len(bytes(whole[-1]))
            if items_bytes > ITEMS_BYTES_MAX:
                reason = f"the items that it refers to have more than {ITEMS_BYTES_MAX} bytes"
                raise unusable_field("input", f"{reason}; start a new conversation")
        elif not reference.startswith(_REASONING):
            raise _not_stored(number, reference)
    if not whole:
        return body
    return msgspec.json.encode(_FIELDS.decode(body) | {"input": whole})


def _input_of(body: bytes) -> list[msgspec.Raw]:
    """Return the items of an input. Raises ApiError 400 if it has too many."""
    try:
        items = _ITEMS.decode(_FIELDS.decode(body)["input"])
    except (msgspec.DecodeError, RecursionError, KeyError):
        return []
    if len(items) > ITEMS_MAX:
        raise unusable_field("input", f"it has {len(items)} items, more than {ITEMS_MAX}")
    return items


def _reference(raw: msgspec.Raw) -> str:
    """Return the id that an item refers to; "" if it is no reference."""
    try:
        item = _ITEM.decode(raw)
    except msgspec.DecodeError:
        return ""
    return item.id if item.type == _TYPE else ""


def _not_stored(number: int, item_id: str) -> ApiError:
    reason = f"no stored response has the item {item_id[:80]!r}; send the item itself"
    hint = "with `store: false`, the AI SDK does), or store responses with `store: true`"
    return unusable_field(f"input[{number}]", f"{reason} ({hint}")

"""The admin API's part on clients' keys: who may ask, and how much."""

import secrets
from typing import Final

import msgspec

from isochrone.wire.admin import KeyBody, KeyView, LimitsBody
from isochrone.wire.ids import KeyId
from isochrone.wire.keys import format_key, parse_key
from scheduler.api.endpoint import Call, Endpoint, Page, found, missing, new_id
from scheduler.store import keys


async def create_key(call: Call) -> KeyView:
    """Make a client's key; its text is shown once."""
    body: KeyBody = call.body
    key_id = KeyId(new_id())
    text = format_key(key_id, secrets.token_bytes(32))
    parsed = parse_key(text)
    assert parsed is not None
    made = await keys.add_key(call.connection, key_id=key_id, secret_sha256=parsed[1], body=body)
    await call.record("key.create", key_id, after=made)
    return msgspec.structs.replace(made, key=text)


async def list_keys(call: Call) -> Page:
    """Keys, without their secrets."""
    rows = await keys.list_keys(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: row.key_id)


async def get_key(call: Call) -> KeyView:
    """One key, without its secret."""
    name = call.part("key_id")
    return found(await keys.get_key(call.connection, name), "key", name)


async def limit_key(call: Call) -> KeyView:
    """Set what a key may ask, whole: routers hold to it as soon as they have the next table."""
    limits: LimitsBody = call.body
    before = await get_key(call)
    after = await keys.set_limits(call.connection, before.key_id, limits, call.etag)
    await call.record("key.limit", before.key_id, before=before, after=after)
    return after


async def revoke_key(call: Call) -> None:
    """Revoke a key: routers refuse it as soon as they hold the next table."""
    name = call.part("key_id")
    if not await keys.revoke_key(call.connection, name):
        raise missing("key", name)
    await call.record("key.revoke", name)


KEY_ENDPOINTS: Final = (
    Endpoint("GET", "/v1/keys", list_keys, "List keys", KeyView, is_list=True),
    Endpoint("POST", "/v1/keys", create_key, "Make a key", KeyView, KeyBody, status=201),
    Endpoint("GET", "/v1/keys/{key_id}", get_key, "Read a key", KeyView),
    Endpoint("PUT", "/v1/keys/{key_id}/limits", limit_key, "Limit a key", KeyView, LimitsBody),
    Endpoint("DELETE", "/v1/keys/{key_id}", revoke_key, "Revoke a key", status=204),
)

"""The admin API's part on clients' keys: who may ask, and how much."""

import secrets
from typing import Final

import msgspec

from isochrone.wire.admin import KeyBody, KeyView, LimitsBody
from isochrone.wire.ids import KeyId
from isochrone.wire.keys import format_key, parse_key
from scheduler.api.endpoint import (
    AdminRequest,
    Endpoint,
    list_endpoint,
    new_id,
    read_endpoint,
    require_found,
)
from scheduler.store import keys
from scheduler.store.deployments import get_deployment


async def create_key(call: AdminRequest) -> KeyView:
    """Make a client's key; its text is shown once."""
    body: KeyBody = call.body
    for name in body.deployments:
        require_found(await get_deployment(call.connection, name), "deployment", name)
    key_id = KeyId(new_id())
    text = format_key(key_id, secrets.token_bytes(32))
    parsed = parse_key(text)
    assert parsed is not None
    made = await keys.add_key(call.connection, key_id=key_id, secret_sha256=parsed[1], body=body)
    await call.record("key.create", key_id, after=made)
    return msgspec.structs.replace(made, key=text)


async def limit_key(call: AdminRequest) -> KeyView:
    """Set what a key may ask, whole: routers hold to it as soon as they have the next table."""
    limits: LimitsBody = call.body
    before = require_found(await keys.get_key(call.connection, call.name), "key", call.name)
    after = await keys.set_limits(call.connection, before.key_id, limits, call.etag)
    await call.record("key.limit", before.key_id, before=before, after=after)
    return after


async def revoke_key(call: AdminRequest) -> None:
    """Revoke a key: routers refuse it as soon as they hold the next table."""
    require_found(await keys.get_key(call.connection, call.name), "key", call.name)
    await keys.revoke_key(call.connection, call.name, call.etag)
    await call.record("key.revoke", call.name)


KEY_ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/v1/keys",
        list_endpoint(keys.list_keys, "key_id"),
        "List keys",
        KeyView,
        is_list=True,
    ),
    Endpoint("POST", "/v1/keys", create_key, "Make a key", KeyView, KeyBody, status=201),
    Endpoint("GET", "/v1/keys/{key_id}", read_endpoint(keys.get_key, "key"), "Read a key", KeyView),
    Endpoint("PUT", "/v1/keys/{key_id}/limits", limit_key, "Limit a key", KeyView, LimitsBody),
    Endpoint("DELETE", "/v1/keys/{key_id}", revoke_key, "Revoke a key", status=204),
)

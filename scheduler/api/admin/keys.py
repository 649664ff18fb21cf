"""The admin API of clients' API keys and their limits."""

import secrets
from typing import Final

import msgspec

from isochrone.wire.admin import KeyBody, KeyView, LimitsBody
from isochrone.wire.client_keys.keys import format_key, parse_key
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import KeyId
from scheduler.api.admin.endpoint import (
    AdminRequest,
    Endpoint,
    list_endpoint,
    new_id,
    read_endpoint,
    require_found,
)
from scheduler.store.accounts import keys
from scheduler.store.cluster import read_pops
from scheduler.store.deployments import find_deployment


async def create_key(request: AdminRequest) -> KeyView:
    """Create an API key; its text is shown only in this response."""
    body: KeyBody = request.body
    # Routers compare ids: a deployment's name can change.
    deployments = tuple(
        [
            require_found(
                await find_deployment(request.connection, named), "deployment", named
            ).deployment_id
            for named in body.deployments
        ]
    )
    body = msgspec.structs.replace(body, deployments=deployments)
    await _check_regions(request, body.regions)
    key_id = KeyId(new_id())
    text = format_key(key_id, secrets.token_bytes(32))
    parsed = parse_key(text)
    assert parsed is not None
    created = await keys.add_key(
        request.connection, key_id=key_id, secret_sha256=parsed[1], body=body
    )
    await request.record("key.create", key_id, after=created)
    return msgspec.structs.replace(created, key=text)


async def limit_key(request: AdminRequest) -> KeyView:
    """Replace a key's limits. Routers apply them with the next route table."""
    limits: LimitsBody = request.body
    before = require_found(
        await keys.get_key(request.connection, request.name), "key", request.name
    )
    after = await keys.set_limits(request.connection, before.key_id, limits, request.etag)
    await request.record("key.limit", before.key_id, before=before, after=after)
    return after


async def revoke_key(request: AdminRequest) -> None:
    """Revoke a key. Routers refuse it with the next route table."""
    require_found(await keys.get_key(request.connection, request.name), "key", request.name)
    await keys.revoke_key(request.connection, request.name, request.etag)
    await request.record("key.revoke", request.name)


async def _check_regions(request: AdminRequest, regions: tuple[str, ...]) -> None:
    """Raise ApiError 400 if a region is neither a PoP nor the country of one."""
    pops = await read_pops(request.connection)
    known = {str(pop.pop) for pop in pops} | {pop.country for pop in pops}
    for region in regions:
        if region not in known:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot create the key: region {region[:60]!r} is neither a PoP nor the country of"
                f" one; use one of {', '.join(sorted(known)) or 'none: add a PoP first'}",
                param="regions",
            )


KEY_ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/v1/keys",
        list_endpoint(keys.list_keys, "key_id"),
        "List keys",
        KeyView,
        is_list=True,
    ),
    Endpoint(
        "POST",
        "/v1/keys",
        create_key,
        "Create a key",
        KeyView,
        KeyBody,
        status=201,
        changes_key=True,
    ),
    Endpoint("GET", "/v1/keys/{key_id}", read_endpoint(keys.get_key, "key"), "Read a key", KeyView),
    Endpoint(
        "PUT",
        "/v1/keys/{key_id}/limits",
        limit_key,
        "Replace a key's limits",
        KeyView,
        LimitsBody,
        changes_key=True,
    ),
    Endpoint(
        "DELETE", "/v1/keys/{key_id}", revoke_key, "Revoke a key", status=204, changes_key=True
    ),
)

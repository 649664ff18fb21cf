"""The admin API's part on who may be of this cluster: join tokens and revocations."""

import secrets

import msgspec

from isochrone.service.identity import format_join_token
from isochrone.wire.admin import JoinTokenBody, JoinTokenView, RevocationBody, RevocationView
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.keys import base62, secret_sha256
from scheduler.api.endpoint import AdminRequest, Page, new_id
from scheduler.store import identities


async def create_join_token(call: AdminRequest) -> JoinTokenView:
    """Make a right to join, once or a few times; its text is shown once."""
    body: JoinTokenBody = call.body
    token_id = new_id()
    secret = base62(int.from_bytes(secrets.token_bytes(32)), 43)
    made = await identities.add_join_token(
        call.connection,
        token_id=token_id,
        secret_sha256=secret_sha256(secret),
        role=body.role.value,
        pop=body.pop,
        ttl_s=body.ttl_s,
        name=body.name,
        uses_max=body.uses_max,
    )
    if made is None:
        raise ApiError(ErrorCode.NOT_FOUND, f"cannot make a token: no PoP {body.pop}", param="pop")
    await call.record("join_token.create", token_id, after=made)
    token = format_join_token(call.acting.authority.fingerprint, token_id, secret)
    return msgspec.structs.replace(made, token=token)


async def create_revocation(call: AdminRequest) -> RevocationView:
    """Refuse one certificate by its serial, or, without one, a name and all it was issued."""
    body: RevocationBody = call.body
    made = await identities.revoke(
        call.connection, body.role, body.name, serial=body.serial, reason=body.reason
    )
    await call.changed(f"{body.role.value}.revoke", body.name, after=made)
    call.acting.nudge_turn_away()
    return made


async def list_revocations(call: AdminRequest) -> Page:
    """Revocations that still stand."""
    rows = await identities.list_revocations(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: f"{row.role.value}/{row.name}/{row.serial}")

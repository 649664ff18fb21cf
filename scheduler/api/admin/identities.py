"""The admin API of join tokens and revocations."""

import secrets

import msgspec

from isochrone.service.trust.identity import format_join_token
from isochrone.wire.admin import JoinTokenBody, JoinTokenView, RevocationBody, RevocationView
from isochrone.wire.client_keys.keys import encode_secret, secret_sha256
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import PopId
from scheduler.api.admin.endpoint import AdminRequest, Page, new_id, require_found
from scheduler.store.fleet import identities


async def create_join_token(request: AdminRequest) -> JoinTokenView:
    """Create a join token for one or several uses; its text is shown only in this response."""
    body: JoinTokenBody = request.body
    token_id = new_id()
    secret = encode_secret(secrets.token_bytes(32))
    created = await identities.add_join_token(
        request.connection,
        token_id=token_id,
        secret_sha256=secret_sha256(secret),
        role=body.role.value,
        pop=body.pop,
        ttl_s=body.ttl_s,
        name=body.name,
        uses_max=body.uses_max,
    )
    if created is None:
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot create a token: no PoP {body.pop}; `isochrone pops list` shows all,"
            " `isochrone pops add` adds one",
            param="pop",
        )
    if body.name is not None:
        await _check_name(request, body, body.name)
    await request.record("join_token.create", token_id, after=created)
    token = format_join_token(request.context.authority.fingerprint, token_id, secret)
    return msgspec.structs.replace(created, token=token)


async def delete_join_token(request: AdminRequest) -> None:
    """Delete a join token, so that nothing can join with it any more."""
    deleted = await identities.delete_join_token(request.connection, request.name)
    before = require_found(deleted, "join token", request.name)
    await request.record("join_token.delete", before.token_id, before=before)


async def _check_name(request: AdminRequest, body: JoinTokenBody, name: str) -> None:
    """Raise ApiError 409 if a token bound to this name would be refused."""
    try:
        await identities.check_name(request.connection, body.role, name, PopId(body.pop))
    except (identities.NameRevoked, identities.NameTaken) as error:
        raise ApiError(
            ErrorCode.CONFLICT, f"cannot create a token: {error}", param="name"
        ) from error


async def create_revocation(request: AdminRequest) -> RevocationView:
    """Revoke one certificate by its serial or, without a serial, all certificates of a name."""
    body: RevocationBody = request.body
    is_known = await identities.is_known_name(request.connection, body.role, body.name)
    if not is_known and not body.may_be_unknown:
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot revoke {body.name}: no {body.role.value} of this name has joined; if the"
            " database lost it, for example restored from a backup, repeat with --unknown",
            param="name",
        )
    # Certificates are compared by serials as Python prints them; OpenSSL prints `0A`.
    serial = f"{int(body.serial, 16):x}" if body.serial else ""
    if serial and not body.may_be_unknown:
        await _check_serial(request, body, serial)
    created = await identities.revoke(
        request.connection, body.role, body.name, serial=serial, reason=body.reason
    )
    await request.record_change(f"{body.role.value}.revoke", body.name, after=created)
    request.context.nudge_disconnect()
    return created


async def _check_serial(request: AdminRequest, body: RevocationBody, serial: str) -> None:
    """Raise ApiError 404 if the peer last used a certificate with another serial."""
    last = await identities.last_serial(request.connection, body.role, body.name)
    if serial != last:
        raise ApiError(
            ErrorCode.NOT_FOUND,
            f"cannot revoke serial {serial}: {body.name} last used certificate"
            f" {last or '(none yet)'}; if it had this one before, repeat with --unknown",
            param="serial",
        )


async def list_revocations(request: AdminRequest) -> Page:
    """List the revocations in force."""
    rows = await identities.list_revocations(request.connection, request.after, request.limit + 1)
    return request.page(rows, lambda row: f"{row.role.value}/{row.name}/{row.serial}")

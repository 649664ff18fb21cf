"""The admin API's part on who may be of this cluster: join tokens, revocations, readmission."""

import secrets

import msgspec

from isochrone.service.identity import format_join_token
from isochrone.wire.admin import (
    JoinTokenBody,
    JoinTokenView,
    NodeView,
    RevocationBody,
    RevocationView,
)
from isochrone.wire.control import PeerRole
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.keys import base62, secret_sha256
from scheduler.api.endpoint import Call, Page, found, new_id
from scheduler.store import catalogue, identities


async def create_join_token(call: Call) -> JoinTokenView:
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


async def list_join_tokens(call: Call) -> Page:
    """Join tokens, without their secrets."""
    rows = await identities.list_join_tokens(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: row.token_id)


async def revoke_node(call: Call) -> NodeView:
    """Turn a node away for good; its routes are withdrawn and its conversation cut."""
    name = call.part("node_id")
    before = await _node(call, name)
    await identities.revoke(call.connection, PeerRole.AGENT, name, reason="by the node's name")
    await catalogue.touch(call.connection)
    after = await _node(call, name)
    await call.record("node.revoke", name, before=before, after=after)
    call.acting.nudge_turn_away()
    return after


async def readmit_node(call: Call) -> NodeView:
    """Let a revoked node join again, with a new token and a new certificate."""
    name = call.part("node_id")
    before = await _node(call, name)
    await identities.readmit(call.connection, PeerRole.AGENT, name)
    await catalogue.touch(call.connection)
    after = await _node(call, name)
    await call.record("node.readmit", name, before=before, after=after)
    return after


async def create_revocation(call: Call) -> RevocationView:
    """Refuse one certificate by its serial, or, without one, a name and all it was issued."""
    body: RevocationBody = call.body
    made = await identities.revoke(
        call.connection, body.role, body.name, serial=body.serial, reason=body.reason
    )
    await catalogue.touch(call.connection)
    await call.record(f"{body.role.value}.revoke", body.name, after=made)
    call.acting.nudge_turn_away()
    return made


async def list_revocations(call: Call) -> Page:
    """Revocations that still stand."""
    rows = await identities.list_revocations(call.connection, call.after, call.limit + 1)
    return call.page(rows, lambda row: f"{row.role.value}/{row.name}/{row.serial}")


async def _node(call: Call, name: str) -> NodeView:
    return found(await catalogue.get_node(call.connection, name), "node", name)

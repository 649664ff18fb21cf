"""`POST /v1/join`: a one-time token for a certificate."""

from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.http_server import read_body
from isochrone.service.identity import IdentityError, parse_join_token
from isochrone.wire import codec
from isochrone.wire.control import JoinReply, JoinRequest, PeerRole
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NAME_PATTERN, WORDS, PopId, is_name
from isochrone.wire.keys import secret_sha256
from scheduler.acting import Acting, now
from scheduler.store.events import record_event
from scheduler.store.identities import (
    NameRevoked,
    NameTaken,
    add_peer,
    issue_not_before,
    use_join_token,
)
from scheduler.store.pool import UNAVAILABLE, Connection, transaction

_reader = msgspec.json.Decoder(JoinRequest)

JOINS_PER_S: Final = 20.0
BURST_S: Final = 15.0
"""300 servers may join in one moment. A flood without tokens slows joins, and nothing else."""


class JoinEndpoint:
    """The door for those who have no certificate yet."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._free_at = float("-inf")

    async def handle(self, request: web.Request) -> web.Response:
        """Spend the token, enter the peer, issue its certificate: all or nothing."""
        body = await read_body(request, bytes_max=64 * 1024, timeout_s=5.0)
        try:
            asked = codec.decode_json(body, _reader)
        except codec.MalformedFrame as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error
        token = parse_join_token(asked.token)
        if token is None:
            raise ApiError(ErrorCode.FORBIDDEN, "cannot join: malformed token", param="token")
        # With nothing between two dots it can be no server's name in TLS, and so never proven.
        if not is_name(asked.name) or ".." in asked.name:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot join: a name has {WORDS[NAME_PATTERN]}",
                param="name",
            )
        self._take_turn(self._acting.clock())
        try:
            return await self._join(asked, token.token_id, token.secret)
        except UNAVAILABLE as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot join: the database is away", retry_after_s=2
            ) from error

    def _take_turn(self, now: float) -> None:
        at = max(self._free_at, now - BURST_S)
        if at > now:
            raise ApiError(
                ErrorCode.RATE_LIMITED,
                f"cannot join now: {JOINS_PER_S:g} may in a second; try again",
                retry_after_s=1,
            )
        self._free_at = at + 1 / JOINS_PER_S

    async def _join(self, asked: JoinRequest, token_id: str, secret: str) -> web.Response:
        async with transaction(self._acting.pool) as connection:
            spent = await use_join_token(
                connection,
                token_id=token_id,
                secret_sha256=secret_sha256(secret),
                role=asked.role,
                name=asked.name,
            )
            if spent is None:
                raise ApiError(
                    ErrorCode.FORBIDDEN,
                    "cannot join: the token is unknown, used, expired or for another role or name; "
                    "ask for a new one (`isochrone nodes join-token`)",
                    param="token",
                )
            try:
                await add_peer(
                    connection, asked.role, asked.name, spent.pop, is_bound=spent.is_bound
                )
                certificate = await issue_certificate(
                    self._acting, connection, asked.role, asked.name, spent.pop, asked.csr_pem
                )
            except NameTaken as error:
                raise ApiError(ErrorCode.CONFLICT, f"cannot join: {error}", param="name") from error
            except NameRevoked as error:
                raise ApiError(
                    ErrorCode.FORBIDDEN, f"cannot join: {error}", param="name"
                ) from error
            except IdentityError as error:
                raise ApiError(ErrorCode.INVALID_REQUEST, str(error), param="csr_pem") from error
            await record_event(
                connection,
                actor=f"{asked.role.value}:{asked.name}",
                kind=f"{asked.role.value}.joined",
                subject=asked.name,
                reason=f"token {token_id}, PoP {spent.pop}",
            )
        reply = JoinReply(
            cluster_id=self._acting.cluster_id,
            name=asked.name,
            pop=spent.pop,
            certificate_pem=certificate,
            ca_pem=self._acting.authority.ca_pem,
        )
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")


async def issue_certificate(
    acting: Acting, connection: Connection, role: PeerRole, name: str, pop: PopId, csr_pem: str
) -> str:
    """Issue a certificate that outlives the revocations of its name; raises IdentityError."""
    at = now()
    refused_until = await issue_not_before(connection, role, name)
    return acting.authority.issue(
        csr_pem,
        role=role,
        name=name,
        pop=pop,
        now=at if refused_until is None else max(at, refused_until),
        lifetime_s=acting.config.certificate_lifetime_s,
    )

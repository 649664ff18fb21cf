"""`POST /v1/join`: trades a join token for a certificate."""

from collections.abc import Callable
from typing import Final

import msgspec
from aiohttp import web

from isochrone.service.network.connection_count import ConnectionCount, client_network
from isochrone.service.network.http_server import json_response, read_body
from isochrone.service.trust.identity import IdentityError, JoinToken, parse_join_token
from isochrone.wire import codec
from isochrone.wire.client_keys.keys import secret_sha256
from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.ids import NAME_PATTERN, PATTERN_DESCRIPTIONS, ClusterId, is_name
from isochrone.wire.peers.control import JoinReply, JoinRequest, join_token_command
from scheduler.api.control.certificates import CertificateIssuer
from scheduler.store.events import record_event
from scheduler.store.fleet.identities import NameRevoked, NameTaken, add_peer, use_join_token
from scheduler.store.pool import UNAVAILABLE, Pool, transaction

_decoder = msgspec.json.Decoder(JoinRequest)

BODY_BYTES_MAX: Final = 16 * 1024
"""Several times a request to be signed, with its token."""

READING_MAX: Final = 256
READING_PER_NETWORK_MAX: Final = 128
"""Bodies that are read at the same time, in all and from one network: anyone may send one."""

BODY_TIMEOUT_S: Final = 5.0
JOINS_PER_S: Final = 20.0
BURST_S: Final = 15.0
"""300 servers may join at once. A flood of wrong tokens slows joins and nothing else."""


class JoinEndpoint:
    """Serves peers that have no certificate yet."""

    def __init__(
        self,
        *,
        pool: Pool,
        issuer: CertificateIssuer,
        cluster_id: ClusterId,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._issuer = issuer
        self._cluster_id = cluster_id
        self._clock = clock
        self._reading = ConnectionCount(READING_MAX, READING_PER_NETWORK_MAX)
        self._next_join_at = float("-inf")

    async def handle(self, request: web.Request) -> web.Response:
        """Use the token, add the peer and issue its certificate: all of it or nothing."""
        body = await self._read_body(request)
        try:
            join = codec.decode_json(body, _decoder)
        except codec.MalformedFrame as error:
            raise ApiError(ErrorCode.INVALID_REQUEST, str(error)) from error
        token = parse_join_token(join.token)
        if token is None:
            raise ApiError(ErrorCode.FORBIDDEN, "cannot join: malformed token", param="token")
        # TLS accepts no server name with an empty label, so such a node could never be verified.
        if not is_name(join.name) or ".." in join.name:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"cannot join: a name has {PATTERN_DESCRIPTIONS[NAME_PATTERN]}",
                param="name",
            )
        self._limit_rate()
        try:
            return await self._join(join, token)
        except UNAVAILABLE as error:
            raise ApiError(
                ErrorCode.UNAVAILABLE, "cannot join: the database is unreachable", retry_after_s=2
            ) from error

    async def _read_body(self, request: web.Request) -> bytes:
        network = client_network(request.transport) if request.transport else ""
        try:
            if not self._reading.add(network):
                raise ApiError(
                    ErrorCode.RATE_LIMITED,
                    "cannot join now: many requests to join arrive at once; try again",
                    retry_after_s=1,
                )
            return await read_body(request, bytes_max=BODY_BYTES_MAX, timeout_s=BODY_TIMEOUT_S)
        finally:
            self._reading.remove(network)

    def _limit_rate(self) -> None:
        now = self._clock()
        starts_at = max(self._next_join_at, now - BURST_S)
        if starts_at > now:
            raise ApiError(
                ErrorCode.RATE_LIMITED,
                f"cannot join now: more than {JOINS_PER_S:g} joins a second; try again",
                retry_after_s=1,
            )
        self._next_join_at = starts_at + 1 / JOINS_PER_S

    async def _join(self, join: JoinRequest, token: JoinToken) -> web.Response:
        async with transaction(self._pool) as connection:
            used = await use_join_token(
                connection,
                token_id=token.token_id,
                secret_sha256=secret_sha256(token.secret),
                role=join.role,
                name=join.name,
            )
            if used is None:
                raise ApiError(
                    ErrorCode.FORBIDDEN,
                    "cannot join: the token is unknown, used, expired or for another role or name; "
                    f"ask for a new one (`{join_token_command(join.role)}`)",
                    param="token",
                )
            try:
                await add_peer(connection, join.role, join.name, used.pop, is_bound=used.is_bound)
                certificate_pem = await self._issuer.issue(
                    connection, join.role, join.name, used.pop, join.csr_pem
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
                actor=f"{join.role.value}:{join.name}",
                kind=f"{join.role.value}.joined",
                subject=join.name,
                reason=f"token {token.token_id}, PoP {used.pop}",
            )
        reply = JoinReply(
            cluster_id=self._cluster_id,
            name=join.name,
            pop=used.pop,
            certificate_pem=certificate_pem,
            ca_pem=self._issuer.authority.ca_pem,
        )
        return json_response(reply)

"""The first words with any peer: who it is, proven, before anything it says is read."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import WSMsgType, web

from isochrone.service import identity
from isochrone.service.identity import Certificate, IdentityError
from isochrone.wire import codec
from isochrone.wire.control import (
    Challenge,
    PeerRole,
    Refused,
    RefusedCode,
    Register,
    Renew,
    Renewed,
    Welcome,
    register_payload,
)
from isochrone.wire.ids import NodeId
from scheduler import metrics
from scheduler.acting import INTAKE_TIMEOUT_S, Acting, NotActing, now
from scheduler.api.join import issue_certificate
from scheduler.connected import Connected
from scheduler.decide.pace import Pace
from scheduler.store.events import record_event
from scheduler.store.identities import may_renew
from scheduler.store.lease import (
    acquire_or_renew_lease,
    raise_epoch_and_generation,
    read_cluster_row,
)
from scheduler.store.nodes import UnknownPeer, record_registration
from scheduler.store.pool import UNAVAILABLE, transaction, using

REGISTER_TIMEOUT_S: Final = 5.0
REGISTER_BYTES_MAX: Final = 64 * 1024
PEERS_MAX: Final = 10_000
ALIVE_S: Final = 6.0
PING_S: Final = 10.0
RENEW_FROM_SHARE: Final = 1 / 2
AGENT_MESSAGES_PER_S: Final = 5.0
ROUTER_MESSAGES_PER_S: Final = 50.0
"""A router's demand and usage are what thousands of requests came to, and may have waited long."""

LEAP_MAX: Final = 2**40
"""How far ahead of the store a peer may be: more than any lost history, far less than what would
use up the numbers that only rise."""


class PeerRefused(Exception):
    """A peer is turned away."""

    def __init__(self, code: RefusedCode, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.refused = Refused(code=code, reason=reason, retry_after_s=retry_after_s)


MessageHandler = Callable[[Connected, Any], Awaitable[None]]


async def serve_peer(
    request: web.Request, acting: Acting, role: PeerRole, incoming: Any, hear: MessageHandler
) -> web.StreamResponse:
    """Talk with one peer until either side ends it: `hear` gets each of its messages, None first.

    It raises PeerRefused where the peer is to be turned away.
    """
    # What a stranger sends must cost no more than it did to send: nothing is inflated.
    socket = web.WebSocketResponse(
        max_msg_size=codec.FRAME_BYTES_MAX, heartbeat=PING_S, compress=False
    )
    await socket.prepare(request)
    reader = codec.decoder(incoming)
    try:
        peer = await _register(socket, request.transport, acting, role, reader)
    except PeerRefused as turned:
        metrics.REFUSED.labels(turned.refused.code.value).inc()
        await socket.send_bytes(codec.encode(turned.refused))
        await socket.close()
        return web.Response()
    sender = asyncio.create_task(peer.empty_outbox())
    pace = Pace(AGENT_MESSAGES_PER_S if role is PeerRole.AGENT else ROUTER_MESSAGES_PER_S)
    before = acting.add_peer(peer)
    try:
        if before is not None:
            reason = "the same peer dialled again"
            await before.end(Refused(code=RefusedCode.DUPLICATE, reason=reason))
        await hear(peer, None)
        while (frame := await _receive(socket)) is not None:
            await asyncio.sleep(pace.wait_s(len(frame), acting.clock()))
            message = _read(frame, reader)
            if isinstance(message, Register):
                raise PeerRefused(RefusedCode.MALFORMED, "cannot register twice")
            if isinstance(message, Renew):
                await _renew(peer, acting, message)
            else:
                await hear(peer, message)
    except PeerRefused as turned:
        await peer.end(turned.refused)
    finally:
        acting.remove_peer(peer)
        acting.has_entered(peer.role, peer.name)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
    return web.Response()


async def _register(
    socket: web.WebSocketResponse,
    transport: asyncio.Transport | None,
    acting: Acting,
    role: PeerRole,
    reader: Any,
) -> Connected:
    if not acting.is_acting:
        raise _not_acting(acting)
    if len(acting.peers) >= PEERS_MAX:
        raise PeerRefused(
            RefusedCode.NOT_ACTING, f"{PEERS_MAX} peers are connected", retry_after_s=10
        )
    nonce = secrets.token_bytes(32)
    challenge = Challenge(protocol=codec.PROTOCOL, cluster_id=acting.cluster_id, nonce=nonce)
    await socket.send_bytes(codec.encode(challenge))
    try:
        async with asyncio.timeout(REGISTER_TIMEOUT_S):
            frame = await _receive(socket)
    except TimeoutError:
        frame = None
    if frame is None:
        raise PeerRefused(RefusedCode.MALFORMED, "no registration in time")
    if len(frame) > REGISTER_BYTES_MAX:
        reason = f"cannot read frame: a registration has at most {REGISTER_BYTES_MAX} bytes"
        raise PeerRefused(RefusedCode.MALFORMED, reason)
    register = _read(frame, reader)
    if not isinstance(register, Register):
        raise PeerRefused(RefusedCode.MALFORMED, "the first message must be a registration")
    # Before anything is kept of it: strangers would take the places of a fleet.
    certificate = _prove(register, acting, role, nonce)
    wait_s = acting.wait_outside_s(role, register.name)
    if wait_s > 0:
        raise PeerRefused(RefusedCode.BUSY, "many dial at once; come at your time", wait_s)
    has_entered = False
    try:
        _refuse_twin(register, acting)
        await _enter(register, acting, certificate)
        has_entered = True
    except UnknownPeer as error:
        raise PeerRefused(RefusedCode.IDENTITY, str(error), retry_after_s=30) from error
    except NotActing as error:
        raise PeerRefused(RefusedCode.NOT_ACTING, str(error)) from error
    except UNAVAILABLE as error:
        raise PeerRefused(
            RefusedCode.NOT_ACTING, "the database is away", retry_after_s=2
        ) from error
    finally:
        if not has_entered or role is PeerRole.ROUTER:
            acting.has_entered(role, register.name)
    peer = Connected(
        socket,
        transport,
        role=role,
        name=register.name,
        pop=register.pop,
        boot_id=register.boot_id,
        certificate=certificate,
        large=acting.large,
    )
    peer.generation = register.generation
    welcome = Welcome(
        cluster_id=acting.cluster_id,
        epoch=acting.epoch,
        redial_spread_s=acting.redial_spread_s,
    )
    peer.tell(welcome)
    return peer


def _not_acting(acting: Acting) -> PeerRefused:
    """Send a peer to the scheduler that acts; where none does, tell it when to come back here."""
    now = acting.clock()
    if acting.next_acting_at <= now:
        # Who has no other to ask returns soon; not the whole of a large fleet each second.
        wait_s = max(1.0, acting.redial_spread_s)
        return PeerRefused(
            RefusedCode.NOT_ACTING, "this scheduler is not acting; ask the other", wait_s
        )
    wait_s = acting.line_outside.place(acting.next_acting_at) - now
    return PeerRefused(
        RefusedCode.BUSY, "no scheduler acts; come back at your time", max(0.5, wait_s)
    )


def _prove(register: Register, acting: Acting, role: PeerRole, nonce: bytes) -> Certificate:
    if register.protocol != codec.PROTOCOL:
        raise PeerRefused(
            RefusedCode.PROTOCOL,
            f"this scheduler speaks protocol {codec.PROTOCOL}, the peer {register.protocol}",
            retry_after_s=60,
        )
    try:
        certificate = identity.verify_certificate(
            register.certificate_pem, acting.authority.ca_pem, now()
        )
        payload = register_payload(
            cluster_id=acting.cluster_id,
            nonce=nonce,
            name=register.name,
            boot_id=register.boot_id,
        )
        proven = identity.verify_signature(register.certificate_pem, payload, register.signature)
    except IdentityError as error:
        raise PeerRefused(RefusedCode.IDENTITY, str(error), retry_after_s=30) from error
    peer = certificate.peer
    if not proven or peer != (role, register.name, register.pop) or register.role is not role:
        raise PeerRefused(
            RefusedCode.IDENTITY,
            f"cannot register as {register.role.value} {register.name!r}: the certificate is for "
            f"{peer.role.value} {peer.name!r} in {peer.pop}, or its key did not sign",
            retry_after_s=30,
        )
    return certificate


def _refuse_twin(register: Register, acting: Acting) -> None:
    """Refuse a second machine under a name whose first is alive: a cloned disk, a copied state."""
    twin = acting.peers.get((register.role, register.name))
    if twin is None or twin.boot_id == register.boot_id or register.role is not PeerRole.AGENT:
        return
    if acting.silent_s(NodeId(register.name)) < ALIVE_S:
        raise PeerRefused(
            RefusedCode.DUPLICATE,
            f"{register.name} is already connected with boot {twin.boot_id}: is its disk cloned?",
            retry_after_s=ALIVE_S,
        )


async def _enter(register: Register, acting: Acting, certificate: Certificate) -> None:
    """Write the registration; lift a store that is behind what this peer has seen."""
    async with transaction(
        acting.intake, timeout_s=INTAKE_TIMEOUT_S, async_commit=True
    ) as connection:
        cluster = await read_cluster_row(connection)
        newest = cluster.generation if register.role is PeerRole.AGENT else cluster.route_generation
        if register.generation - newest > LEAP_MAX or register.epoch - acting.epoch > LEAP_MAX:
            raise PeerRefused(
                RefusedCode.MALFORMED,
                f"cannot believe generation {register.generation} and epoch {register.epoch}: the "
                f"store is at {newest} and {acting.epoch}",
                retry_after_s=30,
            )
        behind = register.generation > newest or register.epoch > acting.epoch
        if behind:
            await raise_epoch_and_generation(
                connection,
                holder=acting.holder,
                generation=register.generation,
                epoch=register.epoch,
            )
        await record_registration(
            connection,
            register.role,
            register.name,
            register.boot_id,
            register.generation,
            certificate,
        )
    if behind:
        asked_at = acting.clock()
        async with using(acting.reserved) as connection:
            lease = await acquire_or_renew_lease(
                connection, acting.holder, acting.config.lease_ttl_s
            )
        if lease is not None:
            acting.renewed(lease, asked_at)
    if not acting.is_acting:
        raise _not_acting(acting)


async def _renew(peer: Connected, acting: Acting, asked: Renew) -> None:
    """Give a peer its next certificate, of the same name; a revoked one is turned away."""
    held = peer.certificate
    if now() < held.issued_at + (held.expires_at - held.issued_at) * RENEW_FROM_SHARE:
        # Far too early: a peer may not have us sign all day. It asks again when it is time.
        return
    try:
        async with transaction(acting.intake, timeout_s=INTAKE_TIMEOUT_S) as connection:
            if not await may_renew(connection, peer.role, peer.name, held.serial):
                raise PeerRefused(
                    RefusedCode.IDENTITY,
                    f"cannot renew the certificate {held.serial}: it is revoked; join again",
                    retry_after_s=30,
                )
            renewed_pem = await issue_certificate(
                acting, connection, peer.role, peer.name, peer.pop, asked.csr_pem
            )
            renewed = identity.read_certificate(renewed_pem)
            await record_event(
                connection,
                actor=f"{peer.role.value}:{peer.name}",
                kind=f"{peer.role.value}.renewed",
                subject=peer.name,
                reason=f"certificate {renewed.serial} after {held.serial}",
            )
    except IdentityError as error:
        raise PeerRefused(RefusedCode.IDENTITY, str(error), retry_after_s=30) from error
    except UNAVAILABLE:
        # Not answered: it asks again, with a third of its certificate's life left.
        return
    peer.certificate = renewed
    peer.tell(Renewed(certificate_pem=renewed_pem))


async def _receive(socket: web.WebSocketResponse) -> bytes | None:
    """Return the next frame; None where there is none any more."""
    frame = await socket.receive()
    if frame.type is WSMsgType.BINARY:
        return bytes(frame.data)
    if frame.type is WSMsgType.TEXT:
        raise PeerRefused(RefusedCode.MALFORMED, "cannot read frame: text, expected msgpack")
    return None


def _read(frame: bytes, reader: Any) -> Any:
    try:
        return codec.decode(frame, reader)
    except codec.MalformedFrame as error:
        raise PeerRefused(RefusedCode.MALFORMED, str(error)) from error

"""The control connection of any peer: authenticate, register, then pass on its messages.

Nothing that a peer sends is stored or decoded further before its certificate is verified.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web

from isochrone.service.clock import utc_now
from isochrone.service.failure_log import RepeatedWarning
from isochrone.service.network.connection_count import ConnectionCount, client_network
from isochrone.service.trust import identity
from isochrone.service.trust.identity import Certificate, IdentityError
from isochrone.wire import codec
from isochrone.wire.ids import ClusterId, Epoch
from isochrone.wire.peers.control import (
    CacheSaltSecret,
    Challenge,
    PeerRole,
    RefusedCode,
    Register,
    RegistrationRefused,
    Renew,
    Renewed,
    Welcome,
    register_payload,
)
from isochrone.wire.peers.suspicions import SUSPICIONS, FleetSuspicions
from scheduler.api.control.certificates import CertificateIssuer
from scheduler.api.control.control_socket import ControlSocket
from scheduler.api.control.counter_raises import CounterRaises
from scheduler.api.control.peer_frames import (
    RETRY_REFUSED_S,
    PeerRefused,
    decode,
    receive,
    receive_registration,
    send_refusal,
    too_many_unregistered,
)
from scheduler.decide.membership import MessageRateLimit
from scheduler.state.leadership import Leadership
from scheduler.state.lease_state import LeaseState, NotActing
from scheduler.state.peers.peer_admission import PeerAdmission, TurnTaken
from scheduler.state.peers.peer_connection import PeerConnection
from scheduler.state.peers.peer_registry import PeerRegistry
from scheduler.state.peers.relay_tokens import RelayTokens
from scheduler.store.events import record_event
from scheduler.store.fleet.identities import may_renew
from scheduler.store.fleet.nodes import UnknownPeer, record_registration
from scheduler.store.lease import (
    ClusterRow,
    acquire_or_renew_lease,
    raise_epoch_and_generation,
    read_cluster_row,
)
from scheduler.store.pool import (
    INTAKE_TIMEOUT_S,
    UNAVAILABLE,
    Pool,
    transaction,
    using,
)

log = logging.getLogger(__name__)

TURN_TIMEOUT_S: Final = 240.0
"""The longest wait for a turn to register; a peer waits somewhat longer (WELCOME_TIMEOUT_S)."""

PEERS_MAX: Final = 10_000
ALIVE_S: Final = {PeerRole.AGENT: 6.0, PeerRole.ROUTER: 15.0}
"""A peer heard within this time is alive: another machine of its name is refused. Three times the
interval in which it has something to say: a node's pulse, a router's demand."""

CLONED: Final = (
    "another machine has this identity: is this disk cloned? Then delete identity.json from the"
    " state folder of one, and join with a name of its own"
)
RENEW_FROM_SHARE: Final = 1 / 2
"""The share of a certificate's lifetime that must have passed before it is renewed."""
AGENT_MESSAGES_PER_S: Final = 5.0
ROUTER_MESSAGES_PER_S: Final = 50.0
"""A router's demand and usage sum up thousands of requests, and may have waited for long."""

MessageHandler = Callable[[PeerConnection, Any], Awaitable[None]]
"""Called with None when the peer has registered, then with each message; may raise PeerRefused."""


class PeerServer:
    """Serves the control connections of agents and routers alike."""

    def __init__(
        self,
        *,
        intake: Pool,
        reserved: Pool,
        cluster_id: ClusterId,
        issuer: CertificateIssuer,
        lease: LeaseState,
        leadership: Leadership,
        peers: PeerRegistry,
        admission: PeerAdmission,
        unregistered: ConnectionCount,
        relay_tokens: Mapping[PeerRole, RelayTokens] | None = None,
        has_batches: bool = False,
    ) -> None:
        """Serve with the parts of the state. A role without `relay_tokens` gets none."""
        self._relay_tokens = relay_tokens or {}
        self._has_batches = has_batches
        self._twins = RepeatedWarning(log, "refused a second machine of one name")
        self._intake = intake
        self._reserved = reserved
        self._cluster_id = cluster_id
        self._issuer = issuer
        self._lease = lease
        self._leadership = leadership
        self._peers = peers
        self._admission = admission
        self._unregistered = unregistered
        self._raises = CounterRaises(lease.clock)

    async def serve(
        self, request: web.Request, role: PeerRole, incoming: Any, handle: MessageHandler
    ) -> web.StreamResponse:
        """Register one peer and pass its messages (of the union `incoming`) to `handle`."""
        socket = ControlSocket()
        decoder = codec.decoder(incoming)
        network = client_network(request.transport) if request.transport else ""
        try:
            try:
                if not self._unregistered.add(network):
                    return too_many_unregistered()
                await socket.prepare(request)
                register, certificate = await self._verify_peer(socket, role, decoder)
            finally:
                self._unregistered.remove(network)
            await self._wait_turn(socket, register)
            peer = await self._register(socket, request.transport, register, certificate)
        except PeerRefused as refusal:
            await send_refusal(socket, refusal)
            return web.Response()
        socket.accept_large_messages(request)
        sender = asyncio.create_task(peer.send_queued())
        previous = self._peers.add(peer)
        try:
            if previous is not None:
                is_same = previous.boot_id == peer.boot_id
                reason = "the same peer connected again" if is_same else CLONED
                await previous.refuse(
                    RegistrationRefused(code=RefusedCode.DUPLICATE, reason=reason)
                )
            await handle(peer, None)
            await self._pass_on(socket, peer, decoder, handle)
        except PeerRefused as refusal:
            await peer.refuse(refusal.refused)
        finally:
            if role in self._relay_tokens:
                self._relay_tokens[role].revoke(peer.relay_token)
            self._peers.remove(peer)
            self._admission.release(peer.role, peer.name)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        return web.Response()

    async def _pass_on(
        self,
        socket: web.WebSocketResponse,
        peer: PeerConnection,
        decoder: Any,
        handle: MessageHandler,
    ) -> None:
        """Handle messages until the peer leaves, no faster than its role may send them."""
        is_agent = peer.role is PeerRole.AGENT
        pace = MessageRateLimit(AGENT_MESSAGES_PER_S if is_agent else ROUTER_MESSAGES_PER_S)
        while (frame := await receive(socket)) is not None:
            peer.heard_at_s = self._lease.clock()
            await asyncio.sleep(pace.wait_s(len(frame), self._lease.clock()))
            message = decode(frame, decoder)
            if isinstance(message, Register):
                raise PeerRefused(RefusedCode.MALFORMED, "cannot register twice")
            if isinstance(message, Renew):
                await self._renew_certificate(peer, message)
            else:
                await handle(peer, message)

    async def _verify_peer(
        self, socket: web.WebSocketResponse, role: PeerRole, decoder: Any
    ) -> tuple[Register, Certificate]:
        """Challenge a peer and verify its certificate and signature. Raises PeerRefused."""
        if not self._lease.is_acting:
            raise self._redirect()
        if len(self._peers) + self._admission.waiting >= PEERS_MAX:
            reason = f"{PEERS_MAX} peers are connected"
            raise PeerRefused(RefusedCode.BUSY, reason, retry_after_s=10)
        nonce = secrets.token_bytes(32)
        challenge = Challenge(protocol=codec.PROTOCOL, cluster_id=self._cluster_id, nonce=nonce)
        await socket.send_bytes(codec.encode(challenge))
        register = await receive_registration(socket, decoder)
        return register, self._verify(register, role, nonce)

    async def _wait_turn(self, socket: web.WebSocketResponse, register: Register) -> None:
        """Wait until a verified peer may register. Raises PeerRefused.

        Meanwhile the connection is read: pings are answered, and a peer that leaves is noticed.
        """
        turn = asyncio.create_task(self._admission.wait_turn(register.role, register.name))
        frame = asyncio.create_task(receive(socket))
        try:
            await asyncio.wait(
                (turn, frame), timeout=TURN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if turn.done():
                return turn.result()
            if not frame.done():
                reason = f"no turn to register within {TURN_TIMEOUT_S:g} s: many peers connect"
                raise PeerRefused(RefusedCode.BUSY, reason)
            if frame.result() is None:
                raise PeerRefused(RefusedCode.BUSY, "the peer left before its turn")
            reason = "cannot take a message before the welcome to the peer"
            raise PeerRefused(RefusedCode.MALFORMED, reason)
        except TurnTaken as error:
            reason = "the same peer connected again"
            raise PeerRefused(RefusedCode.DUPLICATE, reason) from error
        finally:
            turn.cancel()
            frame.cancel()
            await asyncio.gather(turn, frame, return_exceptions=True)

    async def _register(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        register: Register,
        certificate: Certificate,
    ) -> PeerConnection:
        """Store an admitted peer's registration, and welcome it. Raises PeerRefused."""
        role = register.role
        is_registered = False
        try:
            if not self._lease.is_acting:
                raise self._redirect()
            self._refuse_twin(register)
            cluster = await self._record(register, certificate)
            if socket.closed:
                # The last message that was read while it waited for its turn closed the connection.
                raise PeerRefused(RefusedCode.BUSY, "the peer left before it was registered")
            is_registered = True
        except UnknownPeer as error:
            raise PeerRefused(RefusedCode.IDENTITY, str(error), RETRY_REFUSED_S) from error
        except NotActing as error:
            raise PeerRefused(RefusedCode.NOT_ACTING, str(error)) from error
        except UNAVAILABLE as error:
            reason = "the database is unreachable"
            raise PeerRefused(RefusedCode.NOT_ACTING, reason, retry_after_s=2) from error
        finally:
            # An agent is served only once its first report is stored (`api/control/agents.py`).
            if not is_registered or role is PeerRole.ROUTER:
                self._admission.release(role, register.name)
        peer = PeerConnection(
            socket,
            transport,
            role=role,
            name=register.name,
            pop=register.pop,
            boot_id=register.boot_id,
            certificate=certificate,
            large_frame_slots=self._peers.large_frame_slots,
        )
        peer.heard_at_s = self._lease.clock()
        peer.generation = register.generation
        peer.capabilities = frozenset(register.capabilities)
        peer.last_error = register.last_error
        peer.keys_held = register.keys_held
        if role in self._relay_tokens:
            peer.relay_token = self._relay_tokens[role].issue(peer.name)
        peer.enqueue(
            Welcome(
                cluster_id=self._cluster_id,
                epoch=self._lease.epoch,
                redial_spread_s=self._admission.redial_spread_s,
                relay_token=peer.relay_token,
                has_batches=self._has_batches,
                cache_salt=self._cache_salt(role, cluster.cache_salt_version),
            )
        )
        return peer

    def pass_to_other_routers(self, sender: PeerConnection, message: FleetSuspicions) -> None:
        """Pass a router's message on to all other routers whose version can read it."""
        for router in self._peers.routers():
            if router is not sender and SUSPICIONS in router.capabilities:
                router.enqueue(message)

    def _cache_salt(self, role: PeerRole, version: int) -> CacheSaltSecret | None:
        """Return the secret of the cache salts for an agent; routers must not have it."""
        if role is not PeerRole.AGENT:
            return None
        secret = self._issuer.authority.cache_salt_secret(version)
        return CacheSaltSecret(version=version, secret=secret)

    def _redirect(self) -> PeerRefused:
        """Refuse a peer because this process does not act, and say when to come back."""
        if self._lease.free_at <= self._lease.clock():
            # A peer that knows only this scheduler retries; spread a large fleet over time.
            wait_s = max(1.0, self._admission.redial_spread_s)
            reason = "this scheduler is not acting; ask the other"
            return PeerRefused(RefusedCode.NOT_ACTING, reason, wait_s)
        reason = "no scheduler acts; come back after retry_after_s"
        return PeerRefused(RefusedCode.BUSY, reason, max(0.5, self._admission.appointment_s()))

    def _verify(self, register: Register, role: PeerRole, nonce: bytes) -> Certificate:
        """Return the peer's certificate if it is valid, names this peer, and its key signed."""
        if register.protocol != codec.PROTOCOL:
            raise PeerRefused(
                RefusedCode.PROTOCOL,
                f"this scheduler speaks protocol {codec.PROTOCOL}, the peer {register.protocol}",
                retry_after_s=60,
            )
        payload = register_payload(
            cluster_id=self._cluster_id, nonce=nonce, name=register.name, boot_id=register.boot_id
        )
        pem = register.certificate_pem
        try:
            certificate = identity.verify_certificate(pem, self._issuer.authority.ca_pem, utc_now())
            is_signed = identity.verify_signature(pem, payload, register.signature)
        except IdentityError as error:
            raise PeerRefused(RefusedCode.IDENTITY, str(error), RETRY_REFUSED_S) from error
        subject = certificate.subject
        is_named = subject == (role, register.name, register.pop) and register.role is role
        if not is_signed or not is_named:
            raise PeerRefused(
                RefusedCode.IDENTITY,
                f"cannot register as {register.role.value} {register.name!r}: the certificate is "
                f"for {subject.role.value} {subject.name!r} in {subject.pop}, or its key did not "
                "sign",
                RETRY_REFUSED_S,
            )
        return certificate

    def _refuse_twin(self, register: Register) -> None:
        """Refuse a second machine under the name of a live peer: a cloned disk or copied state."""
        twin = self._peers.by_name.get((register.role, register.name))
        if twin is None or twin.boot_id == register.boot_id:
            return
        now_s, alive_s = self._lease.clock(), ALIVE_S[register.role]
        if now_s - twin.heard_at_s < alive_s:
            self._twins.record(f"another machine has the identity of {register.name}", now_s)
            reason = f"{register.name} is already connected with boot {twin.boot_id}: {CLONED}"
            raise PeerRefused(RefusedCode.DUPLICATE, reason, alive_s)

    async def _record(self, register: Register, certificate: Certificate) -> ClusterRow:
        """Store the registration and return the cluster's row.

        Raise the store's counters if the peer has seen higher ones.
        """
        async with transaction(
            self._intake, timeout_s=INTAKE_TIMEOUT_S, async_commit=True
        ) as connection:
            cluster = await read_cluster_row(connection)
            is_agent = register.role is PeerRole.AGENT
            newest = cluster.generation if is_agent else cluster.route_generation
            epoch = self._lease.epoch
            is_behind = register.generation > newest or register.epoch > epoch
            if is_behind:
                await self._raises.note(connection, register, newest, epoch)
                await raise_epoch_and_generation(
                    connection,
                    holder=self._lease.holder,
                    generation=register.generation,
                    # Raised in any case, so that a new term begins: what this one has published
                    # and believes to be stored is behind the fleet, too.
                    epoch=Epoch(max(register.epoch, epoch + 1)),
                )
            await record_registration(
                connection,
                register.role,
                register.name,
                register.boot_id,
                register.generation,
                certificate,
                register.version,
            )
        if is_behind:
            await self._take_raised_epoch()
        if not self._lease.is_acting:
            raise self._redirect()
        return cluster

    async def _take_raised_epoch(self) -> None:
        requested_at = self._lease.clock()
        async with using(self._reserved) as connection:
            lease = await acquire_or_renew_lease(connection, self._lease.holder, self._lease.ttl_s)
        if lease is not None:
            self._leadership.take(lease, requested_at)

    async def _renew_certificate(self, peer: PeerConnection, renew: Renew) -> None:
        """Send the peer its next certificate; raises PeerRefused if the current one is revoked."""
        current = peer.certificate
        lifetime = current.expires_at - current.issued_at
        if utc_now() < current.issued_at + lifetime * RENEW_FROM_SHARE:
            # Too early, so unanswered: a peer must not keep the authority busy. It asks again.
            return
        try:
            async with transaction(self._intake, timeout_s=INTAKE_TIMEOUT_S) as connection:
                if not await may_renew(connection, peer.role, peer.name, current.serial):
                    raise PeerRefused(
                        RefusedCode.IDENTITY,
                        f"cannot renew the certificate {current.serial}: it is revoked; join again",
                        RETRY_REFUSED_S,
                    )
                renewed_pem = await self._issuer.issue(
                    connection, peer.role, peer.name, peer.pop, renew.csr_pem
                )
                renewed = identity.read_certificate(renewed_pem)
                await record_event(
                    connection,
                    actor=f"{peer.role.value}:{peer.name}",
                    kind=f"{peer.role.value}.renewed",
                    subject=peer.name,
                    reason=f"certificate {renewed.serial} after {current.serial}",
                )
        except IdentityError as error:
            raise PeerRefused(RefusedCode.IDENTITY, str(error), RETRY_REFUSED_S) from error
        except UNAVAILABLE:
            # Unanswered: the peer asks again, with a third of the lifetime left.
            return
        peer.certificate = renewed
        peer.enqueue(Renewed(certificate_pem=renewed_pem))

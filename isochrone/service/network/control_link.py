"""A peer's end of the control connection: one WebSocket to the scheduler that acts.

Without a scheduler a peer keeps using the state it has, and tries to reconnect for ever.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from ssl import SSLContext
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec

from isochrone import __version__
from isochrone.service.clock import utc_now
from isochrone.service.network.connection_errors import describe_connection_error
from isochrone.service.network.name_cache import CachedResolver, NameCache
from isochrone.service.trust import identity as identities
from isochrone.service.trust.certificate_renewal import CertificateRenewal
from isochrone.service.trust.identity import Identity
from isochrone.service.trust.tls import client_context
from isochrone.wire import codec
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation
from isochrone.wire.peers.control import (
    Challenge,
    RefusedCode,
    Register,
    RegistrationRefused,
    Renewed,
    Welcome,
    register_payload,
)

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
ERROR_CHARS_MAX: Final = 300
"""The characters of the last error that a registration carries."""

HANDSHAKE_TIMEOUT_S: Final = 5.0
WELCOME_TIMEOUT_S: Final = 300.0
"""The longest wait for the welcome: a scheduler to which a whole fleet connects takes one peer
after the other. Pings notice meanwhile if it hangs."""

SILENCE_S: Final = 20.0
"""The longest time that a send may take, and twice the interval of pings. The connection is closed
after it."""
BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 10.0
BACKOFF_KNOWN_FLEET_S: Final = 1.0
"""The longest backoff of a peer whose schedulers can register the whole fleet in this time."""
WAIT_MAX_S: Final = 60.0
"""The longest wait that a scheduler may impose by `retry_after_s`."""


class Progress(NamedTuple):
    """The newest state that a peer has stored. The scheduler's counters must not be behind it.

    `keys_held` are the sums of a router's keys.
    """

    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch
    keys_held: bytes = b""


class LinkRefused(Exception):
    """No connection to this scheduler for at least `wait_s` seconds; the message says why."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class SchedulerSilent(LinkRefused):
    """The scheduler does not answer pings, although the connection stands."""


class RedialBackoff:
    """How long a peer waits before it dials the next of its schedulers."""

    def __init__(self) -> None:
        self.window_s = BACKOFF_MIN_S
        """The longest wait now. It doubles after each round in which no scheduler accepted."""
        self._window_max_s = BACKOFF_MAX_S

    def accepted(self, redial_spread_s: float) -> None:
        """Begin again after a connection.

        The schedulers can register the whole fleet in `redial_spread_s` seconds. So it may dial
        that often, and all peers are back soon after a scheduler acts again.
        """
        self.window_s = BACKOFF_MIN_S
        self._window_max_s = min(BACKOFF_MAX_S, max(BACKOFF_KNOWN_FLEET_S, redial_spread_s))

    def round_failed(self) -> None:
        """Wait longer: every scheduler was dialled and none accepted."""
        self.window_s = min(self._window_max_s, 2.0 * self.window_s)


class ControlLink:
    """Stays connected to whichever scheduler acts. One task runs `run()`."""

    def __init__(
        self,
        *,
        urls: Sequence[str],
        identity: Identity,
        boot_id: BootId,
        incoming: Any,
        progress: Callable[[], Progress],
        on_welcome: Callable[[Welcome], Awaitable[None]],
        on_message: Callable[[Any], Awaitable[None]],
        rng: random.Random,
        folder: Path | None = None,
        contexts: Sequence[SSLContext] = (),
        capabilities: Sequence[str] = (),
        on_too_large: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect to one of `urls` (`https://host:port`); `incoming` is a union of message types.

        If the state `folder` is given, the certificate is renewed there and in `contexts`. The
        registration reports the `capabilities` of this version to the scheduler. `on_too_large` is
        called for each message that is not sent because the scheduler would refuse its size.
        """
        self.connected = False
        self.url = ""
        """The scheduler that accepted this peer last."""
        self.last_refusal = ""
        self._on_too_large = on_too_large
        self._capabilities = tuple(capabilities)
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._initial_identity = identity
        self._boot_id = boot_id
        self._decoder = codec.decoder(incoming)
        self._progress = progress
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._rng = rng
        uses_tls = any(url.startswith("https:") for url in urls)
        self._ssl = client_context(identity) if uses_tls else True
        self._renewal: CertificateRenewal | None = None
        if folder is not None:
            all_contexts = [*contexts, self._ssl] if isinstance(self._ssl, SSLContext) else contexts
            self._renewal = CertificateRenewal(
                identity,
                folder=folder,
                contexts=all_contexts,
                rng=rng,
                wall_clock=utc_now,
            )
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next_url = 0
        self._welcome: Welcome | None = None
        self._logged: dict[str, dict[str, str]] = {}
        """By scheduler, since the last connection: what was logged of there being none."""

    @property
    def _identity(self) -> Identity:
        return self._renewal.identity if self._renewal is not None else self._initial_identity

    async def run(self) -> NoReturn:
        """Connect again and again, to each URL in turn, with jittered backoff in between."""
        backoff = RedialBackoff()
        async with (
            aclosing(NameCache()) as names,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=CachedResolver(names), use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            ) as http,
        ):
            while True:
                url = self._urls[self._next_url % len(self._urls)]
                wait_s = 0.0
                try:
                    await self._serve_connection(http, url)
                except (
                    aiohttp.ClientError,
                    OSError,
                    TimeoutError,
                    LinkRefused,
                    codec.MalformedFrame,
                ) as error:
                    wait_s = error.wait_s if isinstance(error, LinkRefused) else 0.0
                    if isinstance(error, SchedulerSilent):
                        # It would accept the next connection, too, and say nothing for 10 s.
                        self._next_url += 1
                    self._log_refusal(url, error, names.known(urlsplit(url).hostname or ""))
                finally:
                    self.connected = False
                    self._socket = None
                if self._welcome is not None:
                    backoff.accepted(self._welcome.redial_spread_s)
                    # The whole fleet may have lost the same scheduler at the same moment.
                    await asyncio.sleep(self._rng.uniform(0.0, self._welcome.redial_spread_s))
                elif not wait_s:
                    self._next_url += 1
                    if self._next_url % len(self._urls) == 0:
                        backoff.round_failed()
                backoff_min_s = 0.0 if wait_s else backoff.window_s / 2
                await asyncio.sleep(wait_s + self._rng.uniform(backoff_min_s, backoff.window_s))

    async def send(self, message: msgspec.Struct) -> bool:
        """Send one message; False if there is no connection, or if it broke.

        A message that the scheduler would refuse for its size is dropped with an error in the log;
        the result is True, because sending it again would not help.
        """
        socket = self._socket
        if socket is None or socket.closed:
            return False
        frame = codec.encode(message)
        try:
            codec.check_size(frame, type(message).__name__.lower())
        except codec.FrameTooLarge as error:
            self._on_too_large()
            log.error("message not sent", extra={"fields": {"reason": str(error)}})
            return True
        try:
            async with asyncio.timeout(SILENCE_S):
                await socket.send_bytes(frame)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            log.warning("cannot send to the scheduler", extra={"fields": {"error": str(error)}})
            await socket.close()
            return False
        return True

    async def _serve_connection(self, http: aiohttp.ClientSession, url: str) -> None:
        self._welcome = None
        path = f"{url}/v1/{self._identity.role.value}"
        async with (
            # The kernel accepts connections for a process that hangs, so the answer to the upgrade
            # has a limit too.
            asyncio.timeout(CONNECT_TIMEOUT_S + HANDSHAKE_TIMEOUT_S) as handshake,
            http.ws_connect(
                path,
                max_msg_size=codec.FRAME_BYTES_MAX,
                heartbeat=SILENCE_S / 2,
                server_hostname=identities.SCHEDULER_NAME,
                ssl=self._ssl,
            ) as socket,
        ):
            welcome = self._welcome = await self._register(socket, handshake)
            handshake.reschedule(None)
            self._socket = socket
            self.url = url
            self.connected = True
            self.last_refusal = ""
            self._logged.clear()
            log.info("registered", extra={"fields": {"scheduler": url, "epoch": welcome.epoch}})
            renewal_task = None
            if self._renewal is not None:
                renewal_task = asyncio.create_task(self._renewal.run(self.send))
            try:
                await self._on_welcome(welcome)
                while True:
                    await self._handle(await self._receive(socket))
            finally:
                if renewal_task is not None:
                    renewal_task.cancel()
                    await asyncio.gather(renewal_task, return_exceptions=True)

    async def _handle(self, message: Any) -> None:
        if isinstance(message, RegistrationRefused):
            raise self._refusal(message)
        if isinstance(message, Renewed):
            if self._renewal is not None:
                await self._renewal.accept(message)
            return
        await self._on_message(message)

    async def _register(
        self, socket: aiohttp.ClientWebSocketResponse, handshake: asyncio.Timeout
    ) -> Welcome:
        challenge = await self._receive(socket)
        if isinstance(challenge, RegistrationRefused):
            raise self._refusal(challenge)
        if not isinstance(challenge, Challenge):
            raise LinkRefused(f"cannot register: expected a challenge, got {type(challenge)}")
        if challenge.protocol != codec.PROTOCOL:
            raise LinkRefused(
                f"cannot register: the scheduler speaks protocol {challenge.protocol}, "
                f"this peer {codec.PROTOCOL}; upgrade the older of the two"
            )
        stored = self._progress()
        cluster_id = stored.cluster_id or self._identity.cluster_id
        if challenge.cluster_id != cluster_id:
            raise LinkRefused(
                f"cannot register: the scheduler belongs to cluster {challenge.cluster_id}, this "
                f"peer to {cluster_id}; going on as before. Was its database replaced?"
            )
        name = self._identity.name
        payload = register_payload(
            cluster_id=cluster_id, nonce=challenge.nonce, name=name, boot_id=self._boot_id
        )
        register = Register(
            protocol=codec.PROTOCOL,
            role=self._identity.role,
            name=name,
            pop=self._identity.pop,
            boot_id=self._boot_id,
            certificate_pem=self._identity.certificate_pem,
            signature=identities.sign(self._identity.key_pem, payload),
            cluster_id=cluster_id,
            generation=stored.generation,
            epoch=stored.epoch,
            version=__version__,
            capabilities=self._capabilities,
            last_error=self.last_refusal[:ERROR_CHARS_MAX],
            keys_held=stored.keys_held,
        )
        await socket.send_bytes(codec.encode(register))
        handshake.reschedule(asyncio.get_running_loop().time() + WELCOME_TIMEOUT_S)
        reply = await self._receive(socket)
        if isinstance(reply, RegistrationRefused):
            raise self._refusal(reply)
        if not isinstance(reply, Welcome):
            raise LinkRefused(f"cannot register: expected a welcome, got {type(reply)}")
        return reply

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> Any:
        frame = await socket.receive()
        if frame.type is aiohttp.WSMsgType.BINARY:
            return codec.decode(frame.data, self._decoder)
        if frame.type is aiohttp.WSMsgType.ERROR:
            broken = socket.exception()
            is_silent = isinstance(broken, aiohttp.ServerTimeoutError)
            refusal = SchedulerSilent if is_silent else LinkRefused
            raise refusal(f"the connection broke: {broken}")
        raise LinkRefused(f"the scheduler closed the connection (code {socket.close_code})")

    def _refusal(self, refused: RegistrationRefused) -> LinkRefused:
        # A standby refers to the other scheduler; if there is only one, wait as long as it says.
        tries_other = refused.code is RefusedCode.NOT_ACTING and len(self._urls) > 1
        wait_s = 0.0 if tries_other else min(WAIT_MAX_S, refused.retry_after_s)
        return LinkRefused(f"{refused.code}: {refused.reason}", wait_s)

    def _log_refusal(self, url: str, error: Exception, addresses: Sequence[str]) -> None:
        # A scheduler's certificate is of the cluster's authority: no other can be set.
        is_certificate = isinstance(error, aiohttp.ClientConnectorCertificateError)
        reason = str(error) if is_certificate else describe_connection_error(url, error)
        fields = {"scheduler": url, "reason": reason}
        if addresses:
            # DNS may still have the address of a server that the scheduler has left.
            fields["addresses"] = ", ".join(addresses)
        # Each reason is logged once: a scheduler that is down for a day must not fill the logs.
        if fields != self._logged.get(url):
            self._logged[url] = fields
            log.warning("no connection to the scheduler", extra={"fields": fields})
        self.last_refusal = reason

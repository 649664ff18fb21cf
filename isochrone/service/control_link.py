"""The peer's end of the control conversation: one WebSocket, redialled for ever.

Losing the scheduler changes nothing for a peer: it goes on with what it has and keeps dialling.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from ssl import SSLContext
from typing import Any, Final, NamedTuple, NoReturn

import aiohttp
import msgspec

from isochrone import __version__
from isochrone.service import identity as papers
from isochrone.service.certificate_renewal import CertificateRenewal
from isochrone.service.identity import Identity
from isochrone.service.tls import client_context
from isochrone.wire import codec
from isochrone.wire.control import (
    Challenge,
    Refused,
    RefusedCode,
    Register,
    Renewed,
    Welcome,
    register_payload,
)
from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
HANDSHAKE_TIMEOUT_S: Final = 5.0
SILENCE_S: Final = 20.0
BACKOFF_MIN_S: Final = 0.2
BACKOFF_MAX_S: Final = 10.0
WAIT_MAX_S: Final = 60.0


class Progress(NamedTuple):
    """The newest a peer has stored: it is told to the scheduler, which must not fall behind it."""

    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch


class LinkRefused(Exception):
    """This scheduler does not take us, nor will for `wait_s`; the reason is its words or ours."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class ControlLink:
    """Keeps a conversation with whichever scheduler acts. One task owns `run()`."""

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
        chance: random.Random,
        folder: Path | None = None,
        contexts: Sequence[SSLContext] = (),
    ) -> None:
        """Take the scheduler URLs (`https://host:port`) and the union of messages to expect.

        With the state `folder` given, the certificate renews itself there, and in `contexts`.
        """
        self.connected = False
        self.last_refusal = ""
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._own = identity
        self._boot_id = boot_id
        self._reader = codec.decoder(incoming)
        self._progress = progress
        self._on_welcome = on_welcome
        self._on_message = on_message
        self._chance = chance
        uses_tls = any(url.startswith("https:") for url in urls)
        self._ssl = client_context(identity) if uses_tls else True
        self._renewal: CertificateRenewal | None = None
        if folder is not None:
            shown = [*contexts, self._ssl] if isinstance(self._ssl, SSLContext) else contexts
            self._renewal = CertificateRenewal(
                identity,
                folder=folder,
                contexts=shown,
                chance=chance,
                wall_clock=lambda: datetime.now(UTC),
            )
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next_url = 0
        self._welcome: Welcome | None = None

    @property
    def _identity(self) -> Identity:
        return self._renewal.identity if self._renewal is not None else self._own

    async def run(self) -> NoReturn:
        """Dial, talk, and dial again, trying each URL in turn, with jittered backoff between."""
        backoff_s = BACKOFF_MIN_S
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        ) as http:
            while True:
                url = self._urls[self._next_url % len(self._urls)]
                at_least_s = 0.0
                try:
                    await self._converse(http, url)
                except (
                    aiohttp.ClientError,
                    OSError,
                    TimeoutError,
                    LinkRefused,
                    codec.MalformedFrame,
                ) as error:
                    at_least_s = error.wait_s if isinstance(error, LinkRefused) else 0.0
                    self._note_refusal(url, error)
                finally:
                    self.connected = False
                    self._socket = None
                if self._welcome is not None:
                    backoff_s = BACKOFF_MIN_S
                    # The whole fleet may have lost the same scheduler in the same moment.
                    await asyncio.sleep(self._chance.uniform(0.0, self._welcome.redial_spread_s))
                elif not at_least_s:
                    self._next_url += 1
                    if self._next_url % len(self._urls) == 0:
                        backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
                least_s = 0.0 if at_least_s else backoff_s / 2
                await asyncio.sleep(at_least_s + self._chance.uniform(least_s, backoff_s))

    async def send(self, message: msgspec.Struct) -> bool:
        """Send one message; False where there is no conversation to carry it."""
        socket = self._socket
        if socket is None or socket.closed:
            return False
        try:
            async with asyncio.timeout(SILENCE_S):
                await socket.send_bytes(codec.encode(message))
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            log.warning("cannot send to the scheduler", extra={"fields": {"error": str(error)}})
            await socket.close()
            return False
        return True

    async def _converse(self, http: aiohttp.ClientSession, url: str) -> None:
        self._welcome = None
        path = f"{url}/v1/{self._identity.role.value}"
        async with http.ws_connect(
            path,
            max_msg_size=codec.FRAME_BYTES_MAX,
            heartbeat=SILENCE_S / 2,
            server_hostname=papers.SCHEDULER_NAME,
            ssl=self._ssl,
        ) as socket:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                welcome = self._welcome = await self._register(socket)
            self._socket = socket
            self.connected = True
            self.last_refusal = ""
            log.info("registered", extra={"fields": {"scheduler": url, "epoch": welcome.epoch}})
            renewing = None
            if self._renewal is not None:
                renewing = asyncio.create_task(self._renewal.run(self.send))
            try:
                await self._on_welcome(welcome)
                while True:
                    await self._take(await self._receive(socket))
            finally:
                if renewing is not None:
                    renewing.cancel()
                    await asyncio.gather(renewing, return_exceptions=True)

    async def _take(self, message: Any) -> None:
        if isinstance(message, Refused):
            raise self._refusal(message)
        if isinstance(message, Renewed):
            if self._renewal is not None:
                await self._renewal.take(message)
            return
        await self._on_message(message)

    async def _register(self, socket: aiohttp.ClientWebSocketResponse) -> Welcome:
        challenge = await self._receive(socket)
        if isinstance(challenge, Refused):
            raise self._refusal(challenge)
        if not isinstance(challenge, Challenge):
            raise LinkRefused(f"cannot register: expected a challenge, got {type(challenge)}")
        if challenge.protocol != codec.PROTOCOL:
            raise LinkRefused(
                f"cannot register: the scheduler speaks protocol {challenge.protocol}, "
                f"this peer {codec.PROTOCOL}; upgrade the older of the two"
            )
        stored = self._progress()
        own = stored.cluster_id or self._identity.cluster_id
        if challenge.cluster_id != own:
            raise LinkRefused(
                f"cannot register: the scheduler is of cluster {challenge.cluster_id}, this peer "
                f"of {own}; going on as before. Was its database replaced?"
            )
        name = self._identity.name
        payload = register_payload(
            cluster_id=own, nonce=challenge.nonce, name=name, boot_id=self._boot_id
        )
        register = Register(
            protocol=codec.PROTOCOL,
            role=self._identity.role,
            name=name,
            pop=self._identity.pop,
            boot_id=self._boot_id,
            certificate_pem=self._identity.certificate_pem,
            signature=papers.sign(self._identity.key_pem, payload),
            cluster_id=own,
            generation=stored.generation,
            epoch=stored.epoch,
            version=__version__,
        )
        await socket.send_bytes(codec.encode(register))
        answer = await self._receive(socket)
        if isinstance(answer, Refused):
            raise self._refusal(answer)
        if not isinstance(answer, Welcome):
            raise LinkRefused(f"cannot register: expected a welcome, got {type(answer)}")
        return answer

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> Any:
        frame = await socket.receive()
        if frame.type is aiohttp.WSMsgType.BINARY:
            return codec.decode(frame.data, self._reader)
        if frame.type is aiohttp.WSMsgType.ERROR:
            raise LinkRefused(f"the connection broke: {socket.exception()}")
        raise LinkRefused(f"the scheduler closed the connection (code {socket.close_code})")

    def _refusal(self, refused: Refused) -> LinkRefused:
        # One that does not act sends us to the other, if there is one; else it says when to return.
        asks_other = refused.code is RefusedCode.NOT_ACTING and len(self._urls) > 1
        wait_s = 0.0 if asks_other else min(WAIT_MAX_S, refused.retry_after_s)
        return LinkRefused(f"{refused.code}: {refused.reason}", wait_s)

    def _note_refusal(self, url: str, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        # Said once per reason: a scheduler away for a day must not fill the logs.
        if reason != self.last_refusal:
            log.warning(
                "no conversation with the scheduler",
                extra={"fields": {"scheduler": url, "reason": reason}},
            )
        self.last_refusal = reason

"""Renews a peer's certificate over the control connection, long before it expires.

Rule 1: renewal is requested after two thirds of the lifetime, plus jitter, so that a fleet that
joined at once does not renew at once. Schedulers may be down for the remaining third.
Rule 2: each certificate has a new key, and both are on disk before they are used.
Rule 3: a certificate for another name, role or PoP, or of another authority, is refused.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from ssl import SSLContext
from typing import Final, NoReturn

import msgspec

from isochrone.service.trust import identity as identities
from isochrone.service.trust import tls
from isochrone.service.trust.identity import Certificate, Identity, IdentityError
from isochrone.wire.peers.control import Renew, Renewed

log = logging.getLogger(__name__)

DUE_SHARE: Final = 2 / 3
JITTER_SHARE: Final = 1 / 20
RETRY_SHARE: Final = 1 / 50
REPLY_TIMEOUT_S: Final = 30.0
CHECK_S: Final = 3600.0

Send = Callable[[msgspec.Struct], Awaitable[bool]]


def renewal_due_at(certificate: Certificate, jitter: float) -> datetime:
    """Return when to renew; `jitter` from 0 to 1 spreads a fleet over JITTER_SHARE."""
    lifetime = certificate.expires_at - certificate.issued_at
    return certificate.issued_at + lifetime * (DUE_SHARE + JITTER_SHARE * jitter)


class CertificateRenewal:
    """Holds a peer's current identity. `run()` lives as long as one control connection."""

    def __init__(
        self,
        identity: Identity,
        *,
        folder: Path,
        contexts: Sequence[SSLContext],
        rng: random.Random,
        wall_clock: Callable[[], datetime],
    ) -> None:
        """Store renewed identities in `folder`, and load them into `contexts`."""
        self.identity = identity
        self._folder = folder
        self._contexts = tuple(contexts)
        self._rng = rng
        self._wall_clock = wall_clock
        self._pending_key_pem = ""
        self._renewed = asyncio.Event()

    async def run(self, send: Send) -> NoReturn:
        """Request a new certificate whenever the current one is due."""
        while True:
            current = identities.read_certificate(self.identity.certificate_pem)
            await self._wait_until(renewal_due_at(current, self._rng.random()))
            self._renewed.clear()
            self._pending_key_pem = identities.new_key_pem()
            csr_pem = identities.make_csr(self._pending_key_pem, self.identity.name)
            try:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    await send(Renew(csr_pem=csr_pem))
                    await self._renewed.wait()
            except TimeoutError:
                log.warning("certificate not renewed: no reply")
                lifetime_s = (current.expires_at - current.issued_at).total_seconds()
                await asyncio.sleep(min(lifetime_s * RETRY_SHARE, CHECK_S))

    async def accept(self, reply: Renewed) -> None:
        """Check, store and use a renewed certificate; ignore one that was not requested."""
        key_pem, self._pending_key_pem = self._pending_key_pem, ""
        if not key_pem:
            return
        current = self.identity
        try:
            certificate = identities.verify_certificate(
                reply.certificate_pem, current.ca_pem, self._wall_clock()
            )
            subject = certificate.subject
            is_ours = subject == (current.role, current.name, current.pop)
            if not is_ours or not identities.is_for_key(reply.certificate_pem, key_pem):
                raise IdentityError(f"cannot use the renewed certificate: it is for {subject}")
        except IdentityError as error:
            log.warning("certificate not renewed", extra={"fields": {"reason": str(error)}})
            return
        renewed = msgspec.structs.replace(
            current, key_pem=key_pem, certificate_pem=reply.certificate_pem
        )
        try:
            await asyncio.to_thread(identities.save_identity, self._folder, renewed)
            for context in self._contexts:
                tls.reload_identity(context, renewed)
        except OSError as error:
            # `run` times out and asks again, with a third of the lifetime left.
            fields = {"folder": str(self._folder), "reason": error.strerror or str(error)}
            log.warning("certificate not renewed: cannot store it", extra={"fields": fields})
            return
        self.identity = renewed
        self._renewed.set()
        log.info("certificate renewed", extra={"fields": {"serial": certificate.serial}})

    async def _wait_until(self, due_at: datetime) -> None:
        # In steps of at most CHECK_S: the wall clock may be set meanwhile.
        while (remaining := due_at - self._wall_clock()) > timedelta(0):  # noqa: ASYNC110
            await asyncio.sleep(min(remaining.total_seconds(), CHECK_S))

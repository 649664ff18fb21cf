"""A peer's certificate renews itself over the control conversation, long before its end.

Rule 1: it is asked for at two thirds of its life, a little later by chance, so that a fleet that
joined at once does not renew at once; a third of its life is what a scheduler may be away.
Rule 2: each certificate has a key of its own, and is on disk before it is used.
Rule 3: who the peer is never changes: another name, role, PoP or authority is refused.
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

from isochrone.service import identity as papers
from isochrone.service import tls
from isochrone.service.identity import Certificate, Identity, IdentityError
from isochrone.wire.control import Renew, Renewed

log = logging.getLogger(__name__)

DUE_SHARE: Final = 2 / 3
JITTER_SHARE: Final = 1 / 20
RETRY_SHARE: Final = 1 / 50
ANSWER_TIMEOUT_S: Final = 30.0
LOOK_S: Final = 3600.0

Send = Callable[[msgspec.Struct], Awaitable[bool]]


def renewal_due_at(certificate: Certificate, chance: float) -> datetime:
    """Return when to renew; `chance` between 0 and 1 spreads a fleet."""
    life = certificate.expires_at - certificate.issued_at
    return certificate.issued_at + life * (DUE_SHARE + JITTER_SHARE * chance)


class CertificateRenewal:
    """Holds a peer's papers as they are now. `run()` lives as long as a conversation."""

    def __init__(
        self,
        identity: Identity,
        *,
        folder: Path,
        contexts: Sequence[SSLContext],
        chance: random.Random,
        wall_clock: Callable[[], datetime],
    ) -> None:
        """Keep renewed papers in `folder`; `contexts` are those that show them."""
        self.identity = identity
        self._folder = folder
        self._contexts = tuple(contexts)
        self._chance = chance
        self._wall_clock = wall_clock
        self._key_pem = ""
        self._answered = asyncio.Event()

    async def run(self, send: Send) -> NoReturn:
        """Ask for a new certificate whenever this one is due."""
        while True:
            held = papers.read_certificate(self.identity.certificate_pem)
            await self._wait_until(renewal_due_at(held, self._chance.random()))
            self._answered.clear()
            self._key_pem = papers.new_key_pem()
            csr_pem = papers.make_csr(self._key_pem, self.identity.name)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await send(Renew(csr_pem=csr_pem))
                    await self._answered.wait()
            except TimeoutError:
                log.warning("certificate not renewed: no answer")
                retry_s = (held.expires_at - held.issued_at).total_seconds() * RETRY_SHARE
                await asyncio.sleep(min(retry_s, LOOK_S))

    async def take(self, answer: Renewed) -> None:
        """Take a new certificate into use, or refuse one that is not ours."""
        key_pem, self._key_pem = self._key_pem, ""
        if not key_pem:
            return
        held = self.identity
        try:
            given = papers.verify_certificate(
                answer.certificate_pem, held.ca_pem, self._wall_clock()
            )
            if given.subject != (held.role, held.name, held.pop) or not papers.is_for_key(
                answer.certificate_pem, key_pem
            ):
                raise IdentityError(
                    f"cannot use the renewed certificate: it is for {given.subject}"
                )
        except IdentityError as error:
            log.warning("certificate not renewed", extra={"fields": {"reason": str(error)}})
            return
        renewed = msgspec.structs.replace(
            held, key_pem=key_pem, certificate_pem=answer.certificate_pem
        )
        try:
            await asyncio.to_thread(papers.save_identity, self._folder, renewed)
        except OSError as error:
            # Not answered: it is asked for again in an hour, with a third of its life left.
            fields = {"folder": str(self._folder), "reason": error.strerror}
            log.warning("certificate not renewed: cannot keep it", extra={"fields": fields})
            return
        self.identity = renewed
        for context in self._contexts:
            tls.reload_identity(context, renewed)
        self._answered.set()
        log.info("certificate renewed", extra={"fields": {"serial": given.serial}})

    async def _wait_until(self, at: datetime) -> None:
        # Looked at again and again: the wall clock may be set while we wait.
        while (left := at - self._wall_clock()) > timedelta(0):  # noqa: ASYNC110
            await asyncio.sleep(min(left.total_seconds(), LOOK_S))

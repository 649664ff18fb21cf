"""Issues certificates to peers, so that each outlives the revocations of its name."""

from isochrone.service.clock import utc_now
from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import PopId
from isochrone.wire.peers.control import PeerRole
from scheduler.store.fleet.identities import issue_not_before
from scheduler.store.pool import Connection


class CertificateIssuer:
    """The cluster's authority, with the lifetime of what it issues."""

    def __init__(self, authority: Authority, *, lifetime_s: float) -> None:
        self.authority = authority
        self._lifetime_s = lifetime_s

    async def issue(
        self, connection: Connection, role: PeerRole, name: str, pop: PopId, csr_pem: str
    ) -> str:
        """Return a PEM certificate for the key of `csr_pem`; raises IdentityError.

        The certificate is dated after the name's newest revocation, which refuses earlier ones.
        """
        now = utc_now()
        dated_after = await issue_not_before(connection, role, name)
        return self.authority.issue(
            csr_pem,
            role=role,
            name=name,
            pop=pop,
            now=now if dated_after is None else max(now, dated_after),
            lifetime_s=self._lifetime_s,
            dated_after=dated_after,
        )

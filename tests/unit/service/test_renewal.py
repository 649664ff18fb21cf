"""A certificate is renewed after two thirds of its lifetime, and a fleet not all at once."""

import asyncio
import errno
import random
import ssl
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.service.trust import identity as identities
from isochrone.service.trust import tls
from isochrone.service.trust.certificate_renewal import CertificateRenewal, renewal_due_at
from isochrone.service.trust.identity import Authority, Certificate, CertificateSubject, Identity
from isochrone.wire.ids import ClusterId, PopId
from isochrone.wire.peers.control import PeerRole, Renew, Renewed
from tests.builders import NOW


@settings(deadline=None, max_examples=50)
@given(life_s=st.floats(2, 1e8), jitter=st.floats(0, 1))
def test_renewal_is_due_late_in_the_lifetime_and_long_before_its_end(
    life_s: float, jitter: float
) -> None:
    life = timedelta(seconds=life_s)
    certificate = Certificate(
        CertificateSubject(PeerRole.AGENT, "n1", PopId("ams")), "1", NOW, NOW + life
    )
    due_at = renewal_due_at(certificate, jitter)
    assert NOW + life * 0.66 < due_at < NOW + life * 0.72


def test_a_fleet_that_joined_at_once_does_not_renew_at_once() -> None:
    certificate = Certificate(
        CertificateSubject(PeerRole.AGENT, "n1", PopId("ams")), "1", NOW, NOW + timedelta(days=90)
    )
    assert renewal_due_at(certificate, 1.0) - renewal_due_at(certificate, 0.0) > timedelta(days=4)


async def test_a_certificate_that_no_context_could_load_is_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the TLS contexts would use the old one until it expires, and the node be lost."""
    authority = Authority.create(tmp_path / "ca", "test", NOW)
    key = identities.new_key_pem()
    subject = CertificateSubject(PeerRole.AGENT, "n1", PopId("ams"))

    def issue(csr_pem: str) -> str:
        return authority.issue(csr_pem, **subject._asdict(), now=NOW)

    identity = Identity(
        **subject._asdict(),
        cluster_id=ClusterId("c"),
        key_pem=key,
        certificate_pem=issue(identities.make_csr(key, "n1")),
        ca_pem=authority.ca_pem,
    )
    context = tls.node_server_context(identity)
    renewal = CertificateRenewal(
        identity,
        folder=tmp_path,
        contexts=[context],
        rng=random.Random(1),
        wall_clock=lambda: NOW + timedelta(days=80),
    )
    requests: asyncio.Queue[msgspec.Struct] = asyncio.Queue()

    async def send(message: msgspec.Struct) -> bool:
        requests.put_nowait(message)
        return True

    def fail(context: ssl.SSLContext, identity: Identity) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def answer_request() -> None:
        running = asyncio.create_task(renewal.run(send))
        request = await requests.get()
        assert isinstance(request, Renew)
        await renewal.accept(Renewed(certificate_pem=issue(request.csr_pem)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    with monkeypatch.context() as full_disk:
        full_disk.setattr(tls, "reload_identity", fail)
        await answer_request()
    assert renewal.identity == identity
    await answer_request()
    assert renewal.identity != identity
    assert identities.load_identity(tmp_path) == renewal.identity

"""A certificate is renewed after two thirds of its lifetime, and a fleet not all at once."""

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.service.trust.certificate_renewal import renewal_due_at
from isochrone.service.trust.identity import Certificate, CertificateSubject
from isochrone.wire.ids import PopId
from isochrone.wire.peers.control import PeerRole
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

"""When a certificate renews itself: after two thirds of its life, and not all at once."""

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.service.identity import Certificate, Peer
from isochrone.service.renewal import due_at
from isochrone.wire.control import PeerRole
from isochrone.wire.ids import PopId
from tests.builders import NOW


@settings(deadline=None, max_examples=50)
@given(life_s=st.floats(2, 1e8), chance=st.floats(0, 1))
def test_it_is_due_late_in_life_and_long_before_its_end(life_s: float, chance: float) -> None:
    life = timedelta(seconds=life_s)
    held = Certificate(Peer(PeerRole.AGENT, "n1", PopId("ams")), "1", NOW, NOW + life)
    at = due_at(held, chance)
    assert NOW + life * 0.66 < at < NOW + life * 0.72


def test_a_fleet_that_joined_at_once_does_not_renew_at_once() -> None:
    held = Certificate(Peer(PeerRole.AGENT, "n1", PopId("ams")), "1", NOW, NOW + timedelta(days=90))
    assert due_at(held, 1.0) - due_at(held, 0.0) > timedelta(days=4)

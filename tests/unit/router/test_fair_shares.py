"""How tenants share a limit of a process."""

from isochrone.fair_shares import FairShares
from isochrone.wire.ids import TenantId

FLOOD, SMALL, OTHER = TenantId("flood"), TenantId("small"), TenantId("other")


def test_a_tenant_leaves_as_much_as_it_holds() -> None:
    held = FairShares(100)
    assert held.take(FLOOD, 30) and held.take(FLOOD, 20)
    assert not held.take(FLOOD, 1)
    assert held.take(SMALL, 25)
    assert not held.take(SMALL, 1)
    held.give_back(FLOOD, 30)
    held.give_back(FLOOD, 20)
    assert held.total == 25
    assert held.take(FLOOD, 37) and not held.take(FLOOD, 2)


def test_it_is_said_whose_bytes_are_the_reason() -> None:
    held = FairShares(100)
    assert held.take(FLOOD, 40)
    assert not held.take(FLOOD, 30) and held.is_own_share(FLOOD, 30)
    assert held.take(SMALL, 25)
    assert not held.take(FLOOD, 15) and not held.is_own_share(FLOOD, 15)
    assert not held.take(OTHER, 36) and not held.is_own_share(OTHER, 36)


def test_nothing_is_kept_of_tenants_that_hold_nothing() -> None:
    held = FairShares(10)
    assert held.take(FLOOD, 0) and held.take(FLOOD, 0)
    held.give_back(FLOOD, 0)
    held.give_back(FLOOD, 0)
    assert held.take(SMALL, 5)
    held.give_back(SMALL, 5)
    assert not held._held

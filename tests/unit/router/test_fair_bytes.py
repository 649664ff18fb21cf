"""How tenants share the memory for sounds that are relayed."""

from isochrone.wire.ids import TenantId
from router.decide.admission.fair_bytes import FairBytes

FLOOD, SMALL = TenantId("flood"), TenantId("small")


def test_a_tenant_leaves_as_much_as_it_holds() -> None:
    held = FairBytes(100)
    assert held.take(FLOOD, 30) and held.take(FLOOD, 20)
    assert not held.take(FLOOD, 1)
    assert held.take(SMALL, 25)
    assert not held.take(SMALL, 1)
    held.give_back(FLOOD, 30)
    held.give_back(FLOOD, 20)
    assert held.total == 25
    assert held.take(FLOOD, 37) and not held.take(FLOOD, 2)


def test_nothing_is_kept_of_tenants_that_hold_nothing() -> None:
    held = FairBytes(10)
    assert held.take(FLOOD, 0) and held.take(FLOOD, 0)
    held.give_back(FLOOD, 0)
    held.give_back(FLOOD, 0)
    assert held.take(SMALL, 5)
    held.give_back(SMALL, 5)
    assert not held._by_tenant

"""Roles of replicas: the ratio holds, one always generates, and `auto` follows the token mix."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.assignment import Role
from isochrone.wire.engine_capabilities import capabilities_of
from isochrone.wire.model import EngineSettings, PlacementPolicy
from nodeagent.drivers import DRIVERS
from scheduler.api.deployments import roles_problem
from scheduler.decide.placement.roles import (
    AUTO_ROUNDING,
    HYSTERESIS,
    RoleCounts,
    TokenMix,
    next_role,
    prefill_share,
    role_of_next,
)

NO_MIX = TokenMix(uncached_per_s=0, output_per_s=0, prefill_rate=1000, decode_rate=100)
AUTO = PlacementPolicy(roles="auto")


def grown(share: float, replicas: int) -> RoleCounts:
    """Return the roles of a PoP that grows one by one."""
    counts = RoleCounts()
    for _ in range(replicas):
        role = next_role(share, counts).value
        counts = msgspec.structs.replace(counts, **{role: getattr(counts, role) + 1})
    return counts


@pytest.mark.parametrize(
    ("roles", "replicas", "expected"),
    [
        ("unified", 4, RoleCounts(unified=4)),
        ("prefill=2,decode=4", 1, RoleCounts(unified=1)),
        ("prefill=2,decode=4", 2, RoleCounts(unified=1, prefill=1)),
        ("prefill=2,decode=4", 6, RoleCounts(unified=1, prefill=2, decode=3)),
        ("prefill=9,decode=1", 3, RoleCounts(unified=1, prefill=2)),
        ("prefill=1,decode=99", 3, RoleCounts(unified=1, prefill=1, decode=1)),
    ],
)
def test_a_ratio_holds_as_a_pop_grows(roles: str, replicas: int, expected: RoleCounts) -> None:
    assert grown(prefill_share(PlacementPolicy(roles=roles), NO_MIX, RoleCounts()), replicas) == (
        expected
    )


@given(
    share=st.floats(0, 1),
    counts=st.builds(
        RoleCounts, unified=st.integers(0, 9), prefill=st.integers(0, 9), decode=st.integers(0, 9)
    ),
)
def test_one_replica_always_generates(share: float, counts: RoleCounts) -> None:
    role = next_role(share, counts)
    assert role is not Role.PREFILL or counts.unified + counts.decode > 0
    assert (role is Role.UNIFIED) == (share <= 0 or not counts.total)


@given(share=st.floats(0.01, 0.99), replicas=st.integers(2, 40))
def test_the_share_is_met_within_one_replica(share: float, replicas: int) -> None:
    counts = grown(share, replicas)
    assert counts.total == replicas
    assert abs(counts.prefill - share * replicas) <= 1 or counts.prefill in (1, replicas - 1)


def mix(uncached: float, output: float) -> TokenMix:
    return TokenMix(
        uncached_per_s=uncached, output_per_s=output, prefill_rate=1000, decode_rate=100
    )


def test_auto_follows_the_demand() -> None:
    assert prefill_share(AUTO, mix(1000, 100), RoleCounts()) == 0.5
    assert prefill_share(AUTO, mix(3000, 100), RoleCounts()) == 0.75
    # Mostly output, or no demand: unified loses nothing.
    assert prefill_share(AUTO, mix(100, 100), RoleCounts()) == 0
    assert prefill_share(AUTO, NO_MIX, RoleCounts()) == 0
    unknown = msgspec.structs.replace(mix(1000, 100), decode_rate=0.0)
    assert prefill_share(AUTO, unknown, RoleCounts()) == 0


@given(uncached=st.floats(0, 1e6), output=st.floats(0, 1e6), replicas=st.integers(1, 20))
def test_auto_gives_no_prefill_replica_less_than_nearly_its_time(
    uncached: float, output: float, replicas: int
) -> None:
    counts = RoleCounts()
    for _ in range(replicas):
        role = role_of_next(AUTO, mix(uncached, output), counts).value
        counts = msgspec.structs.replace(counts, **{role: getattr(counts, role) + 1})
    share = prefill_share(AUTO, mix(uncached, output), RoleCounts())
    assert counts.prefill <= share * replicas + AUTO_ROUNDING + 1e-6
    assert counts.prefill + 1 >= (share - HYSTERESIS) * (replicas - 1)


def test_two_replicas_of_an_output_heavy_deployment_stay_unified() -> None:
    one = RoleCounts(unified=1)
    assert role_of_next(AUTO, mix(400, 60), one) is Role.UNIFIED
    assert role_of_next(AUTO, mix(1000, 60), one) is Role.PREFILL


@given(uncached=st.floats(0, 1e6), output=st.floats(0, 1e6), prefill=st.integers(1, 9))
def test_auto_keeps_the_present_share_while_it_is_near(
    uncached: float, output: float, prefill: int
) -> None:
    counts = RoleCounts(prefill=prefill, decode=10 - prefill)
    share = prefill_share(AUTO, mix(uncached, output), counts)
    best = prefill_share(AUTO, mix(uncached, output), RoleCounts())
    assert 0 <= share <= 1
    assert share in (prefill / 10, best)
    if best and abs(best - prefill / 10) <= HYSTERESIS:
        assert share == prefill / 10


def test_only_engines_that_send_kv_have_roles() -> None:
    for name, driver in DRIVERS.items():
        assert capabilities_of(name).sends_kv == driver.kv_transfer
    split = PlacementPolicy(roles="prefill=1,decode=2")
    assert roles_problem(EngineSettings(driver="embedded"), split) == ""
    assert roles_problem(EngineSettings(driver="vllm"), PlacementPolicy()) == ""
    shared = EngineSettings(driver="vllm", share_kv=True)
    assert roles_problem(shared, PlacementPolicy()).startswith("share_kv needs an engine that")
    assert roles_problem(EngineSettings(share_kv=True), PlacementPolicy()) == ""
    reason = roles_problem(EngineSettings(driver="vllm"), split)
    assert reason.startswith("roles 'prefill=1,decode=2' need an engine that sends the KV")
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"roles": "prefill=0,decode=1"}, PlacementPolicy)

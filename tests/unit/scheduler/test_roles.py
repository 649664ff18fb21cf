"""Roles of replicas: the ratio holds, one always generates, and `auto` follows the token mix."""

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.engines.engine_capabilities import capabilities_of, with_transfer
from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.ids import ReplicaId
from isochrone.wire.models.model import EngineSettings, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from nodeagent.drivers import DRIVERS
from scheduler.api.admin.deployments import roles_problem
from scheduler.decide.capacity.default_sizes import prompt_step_s
from scheduler.decide.capacity.step_time import ITL_TARGET_S
from scheduler.decide.placement.roles import (
    AUTO_ROUNDING,
    AUTO_SHARE_MIN,
    CHANGE_MARGIN,
    HYSTERESIS,
    SHARE_MARGIN,
    STEP_MARGIN,
    ReplicaRole,
    RoleCounts,
    TokenMix,
    next_role,
    prefill_share,
    prefill_wanted,
    role_change,
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


def test_auto_stays_unified_on_a_mix_that_is_mostly_output() -> None:
    def share_of(share: float) -> TokenMix:
        return mix(1000 * share, 100 * (1 - share))

    unified = RoleCounts(unified=8)
    roles = RoleCounts(unified=1, prefill=2, decode=5)
    for share, of_unified, of_roles in (
        (AUTO_SHARE_MIN + 0.01, 3, 3),
        (AUTO_SHARE_MIN - SHARE_MARGIN / 2, 0, 2),
        (AUTO_SHARE_MIN - 2 * SHARE_MARGIN, 0, 0),
    ):
        tokens = share_of(share)
        assert prefill_wanted(AUTO, tokens, unified) == of_unified
        assert prefill_wanted(AUTO, tokens, roles) == of_roles


def test_auto_stays_unified_while_steps_keep_pauses_within_the_target() -> None:
    def steps_of(step_s: float) -> TokenMix:
        return msgspec.structs.replace(mix(4000, 100), prompt_step_s=step_s)

    unified = RoleCounts(unified=4)
    roles = RoleCounts(unified=1, prefill=2, decode=1)
    wanted = [
        [prefill_wanted(AUTO, steps_of(step_s), counts) for counts in (unified, roles)]
        for step_s in (ITL_TARGET_S * 1.01, ITL_TARGET_S * 0.9, ITL_TARGET_S * STEP_MARGIN)
    ]
    # At the border, roles that are there stay.
    assert wanted == [[3, 3], [0, 3], [0, 0]]
    one = RoleCounts(unified=1)
    assert role_of_next(AUTO, steps_of(ITL_TARGET_S), one) is Role.UNIFIED
    assert role_of_next(AUTO, steps_of(ITL_TARGET_S * 1.01), one) is Role.PREFILL
    # An answer to the mix, as ever: decodes need all.
    idle = msgspec.structs.replace(mix(100, 100), prompt_step_s=ITL_TARGET_S * 0.9)
    assert prefill_wanted(AUTO, idle, roles) == 0
    # A ratio, or devices that the policy gives each role, are what the operator wants.
    for policy in (
        PlacementPolicy(roles="prefill=3,decode=1"),
        PlacementPolicy(roles="auto", prefill_devices=("H100",), decode_devices=("H200",)),
    ):
        assert prefill_wanted(policy, steps_of(0.001), roles) == 3


@pytest.mark.parametrize(
    ("driver", "options", "expected_s"),
    [
        ("embedded", {}, inf),
        ("embedded", {"interval_ms": "25"}, 0.025),
        ("embedded", {"batch_tokens_max": "100", "interval_ms": "250"}, 0.1),
        ("vllm", {}, inf),
        ("vllm", {"max_num_batched_tokens": "2k"}, 2.0),
        ("vllm", {"max_num_batched_tokens": "wrong"}, inf),
        ("mock", {"interval_ms": "0"}, inf),
    ],
)
def test_a_step_is_as_long_as_the_options_allow(
    driver: str, options: dict[str, str], expected_s: float
) -> None:
    assert prompt_step_s(EngineSettings(driver=driver, options=options), 1000.0) == expected_s
    if "batch" not in str(options):
        return
    assert prompt_step_s(EngineSettings(driver=driver, options=options), 0.0) in (0.25, inf)


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
    is_at_border = AUTO_SHARE_MIN - SHARE_MARGIN <= share < AUTO_SHARE_MIN
    assert share in (prefill / 10, best) or (is_at_border and not best)
    if best and abs(best - prefill / 10) <= HYSTERESIS:
        assert share == prefill / 10


def test_only_engines_that_send_kv_have_roles() -> None:
    for name, driver in DRIVERS.items():
        own = capabilities_of(name).transfer_option
        has_store = bool(capabilities_of(name).kv_store)
        assert capabilities_of(name).shares_kv == (driver.kv_transfer or has_store)
        assert capabilities_of(name).sends_kv == (driver.kv_transfer or bool(own))
        assert not own or own in ENGINE_OPTIONS[name].values
    split = PlacementPolicy(roles="prefill=1,decode=2")
    assert roles_problem(EngineSettings(driver="embedded"), split) == ""
    assert roles_problem(EngineSettings(driver="vllm"), PlacementPolicy()) == ""
    assert roles_problem(EngineSettings(share_kv=True), PlacementPolicy()) == ""
    for roles in ("unified", "prefill=1,decode=2"):
        old = PlacementPolicy(roles=roles, prefill_share=0.3)
        assert roles_problem(EngineSettings(), old).startswith("prefill_share is of an earlier")
    lone = PlacementPolicy(roles="prefill=1,decode=2", replicas_max=1)
    assert "need two replicas in a PoP, and replicas_max is 1" in roles_problem(
        EngineSettings(), lone
    )
    assert roles_problem(EngineSettings(), PlacementPolicy(roles="auto", replicas_max=1)) == ""
    reason = roles_problem(EngineSettings(driver="llama_cpp"), split)
    assert reason.startswith("roles 'prefill=1,decode=2' need an engine that sends the KV")
    assert roles_problem(EngineSettings(driver="vllm"), split) == ""
    assert roles_problem(EngineSettings(driver="vllm"), AUTO) == ""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"roles": "prefill=0,decode=1"}, PlacementPolicy)


def test_an_engine_that_keeps_its_role_has_no_auto() -> None:
    for driver in ("sglang", "tensorrt_llm"):
        engine = EngineSettings(driver=driver)
        assert roles_problem(engine, PlacementPolicy(roles="prefill=1,decode=2")) == ""
        assert roles_problem(engine, AUTO).startswith("roles 'auto' need an engine whose running")


def test_an_engine_with_roles_is_started_so_that_it_sends_kv() -> None:
    assert with_transfer(EngineSettings()).options == {}
    assert with_transfer(EngineSettings(driver="vllm")).options == {"kv_connector": "nixl"}
    chosen = EngineSettings(driver="vllm", options={"kv_connector": "mooncake"})
    assert with_transfer(chosen) == chosen
    split = PlacementPolicy(roles="prefill=1,decode=2")
    for options, problem in (
        ({"kv_connector": "carrier-pigeon"}, "kv_connector 'carrier-pigeon' is unknown; use one"),
        ({"kv_transfer_config": "{}"}, "kv_connector makes a kv_transfer_config of its own"),
        ({"data_parallel_size": "2"}, "kv_connector does not work with data_parallel_size"),
    ):
        engine = EngineSettings(driver="vllm", options=options)
        assert roles_problem(engine, split).startswith(problem)


def running(unified: int = 0, prefill: int = 0, decode: int = 0) -> list[ReplicaRole]:
    roles = [Role.UNIFIED] * unified + [Role.PREFILL] * prefill + [Role.DECODE] * decode
    return [
        ReplicaRole(ReplicaId(f"r{number}"), role, 100.0 - number)
        for number, role in enumerate(roles)
    ]


def settled(
    policy: PlacementPolicy, replicas: list[ReplicaRole], tokens: TokenMix
) -> list[ReplicaRole]:
    """Apply changes of roles until none is due."""
    for _ in range(len(replicas) + 1):
        change = role_change(policy, tokens, replicas)
        if change is None:
            return replicas
        before = {replica.replica_id: replica.role for replica in replicas}
        assert before[change.replica_id] is not change.role
        replicas = [
            replica._replace(role=change.role)
            if replica.replica_id == change.replica_id
            else replica
            for replica in replicas
        ]
        assert any(replica.role is not Role.PREFILL for replica in replicas)
    raise AssertionError("roles go on changing")


def prefilling(replicas: list[ReplicaRole]) -> int:
    return sum(replica.role is Role.PREFILL for replica in replicas)


@given(
    unified=st.integers(0, 6),
    prefill=st.integers(0, 6),
    decode=st.integers(1, 6),
    uncached=st.floats(1, 1e6),
    output=st.floats(1, 1e6),
)
def test_roles_settle_near_the_mix_and_stay(
    unified: int, prefill: int, decode: int, uncached: float, output: float
) -> None:
    tokens = mix(uncached, output)
    replicas = settled(AUTO, running(unified, prefill, decode), tokens)
    best = prefill_share(AUTO, tokens, RoleCounts()) * len(replicas)
    found = prefilling(replicas)
    # A little below the least share, prefill replicas that are there stay.
    share = uncached / 1000 / (uncached / 1000 + output / 100)
    most = share * len(replicas) if share >= AUTO_SHARE_MIN - SHARE_MARGIN else 0.0
    assert found <= most + CHANGE_MARGIN + AUTO_ROUNDING + 1e-6
    assert found >= min(best - CHANGE_MARGIN + AUTO_ROUNDING, len(replicas) - 1) - 1
    # A mix that moves by less than the margin changes nothing.
    share = (found + CHANGE_MARGIN / 2) / len(replicas)
    if AUTO_SHARE_MIN < share < 0.8:
        assert role_change(AUTO, mix(1000 * share, 100 * (1 - share)), replicas) is None


@pytest.mark.parametrize(
    ("policy", "tokens", "expected"),
    [
        (PlacementPolicy(roles="prefill=1,decode=1"), NO_MIX, 2),
        (PlacementPolicy(roles="unified"), mix(9000, 1), 0),
        (AUTO, mix(4000, 100), 3),
        # Three would be right, but by less than the margin.
        (AUTO, mix(3000, 100), 2),
        (AUTO, mix(100, 100), 0),
        # Nothing is known: what runs stays.
        (AUTO, NO_MIX, 1),
        (AUTO, msgspec.structs.replace(mix(9000, 1), decode_rate=0.0), 1),
    ],
)
def test_running_replicas_follow_the_policy(
    policy: PlacementPolicy, tokens: TokenMix, expected: int
) -> None:
    replicas = settled(policy, running(unified=1, prefill=1, decode=2), tokens)
    assert prefilling(replicas) == expected
    counts = RoleCounts(unified=1, prefill=1, decode=2)
    assert prefill_wanted(policy, tokens, counts) == expected


def test_the_newest_replica_changes_first_and_the_last_one_to_generate_never() -> None:
    change = role_change(AUTO, mix(4000, 100), running(unified=1, decode=3))
    assert change is not None
    assert (change.replica_id, change.role) == ("r3", Role.PREFILL)
    assert change.reason == "3 of 4 replicas should prefill, 0 do"
    assert role_change(AUTO, mix(1e9, 1), running(unified=1)) is None
    alone = role_change(PlacementPolicy(), NO_MIX, running(prefill=1, decode=1))
    assert alone is not None
    assert alone.role is Role.UNIFIED

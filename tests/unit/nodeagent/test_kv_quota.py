"""KV is shared within the budgets of the link, the deployment and the tenant."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId
from nodeagent.decide.requests.kv_quota import (
    HOLDERS_MAX,
    NO_KV_LIMITS,
    KvQuota,
    KvRateLimits,
    KvUser,
)

USERS = [KvUser(DeploymentId(name), tenant) for name in "ab" for tenant in ("", "t", "u")]


def test_without_limits_everything_may_be_moved() -> None:
    quota = KvQuota(NO_KV_LIMITS)
    quota.take(USERS[1], 10**12, 0.0)
    assert quota.link_bytes(0.0) == quota.user_bytes(USERS[1], 0.0) == inf


def test_a_tenant_and_a_deployment_leave_the_others_theirs() -> None:
    quota = KvQuota(KvRateLimits(link=1000.0, deployment=500.0, tenant=100.0))
    tenant = KvUser(DeploymentId("a"), "t")
    quota.take(tenant, 100, 0.0)
    assert quota.user_bytes(tenant, 0.0) == 0
    # A tenant's limit holds over all deployments, and concerns no other tenant.
    assert quota.user_bytes(KvUser(DeploymentId("b"), "t"), 0.0) == 0
    assert quota.user_bytes(KvUser(DeploymentId("a"), "u"), 0.0) == 100
    quota.take(KvUser(DeploymentId("a")), 400, 0.0)
    assert quota.user_bytes(KvUser(DeploymentId("a"), "u"), 0.0) == 0
    assert quota.user_bytes(KvUser(DeploymentId("b"), "u"), 0.0) == 100
    assert quota.link_bytes(0.0) == 500
    # A second later all have theirs again.
    assert quota.user_bytes(tenant, 1.0) == 100


def test_what_is_counted_is_bounded() -> None:
    quota = KvQuota(KvRateLimits(tenant=100.0))
    busy = KvUser(DeploymentId("a"), "busy")
    for number in range(HOLDERS_MAX + 10):
        quota.take(KvUser(DeploymentId("a"), str(number)), 100, 0.0)
        quota.take(busy, 1, 0.0)
    # One that goes on moving KV is not forgotten, and so has not got a new budget.
    assert quota.user_bytes(busy, 0.0) == 0
    assert quota.user_bytes(KvUser(DeploymentId("a"), "0"), 0.0) == 100


@given(
    steps=st.lists(st.tuples(st.sampled_from(USERS), st.floats(0, 2), st.integers(0, 3000))),
)
def test_what_is_moved_stays_within_every_limit(
    steps: list[tuple[KvUser, float, int]],
) -> None:
    limits, now_s = KvRateLimits(1000.0, 600.0, 300.0), 0.0
    quota = KvQuota(limits)
    moved: dict[str, int] = {}
    for user, pause_s, wanted in steps:
        now_s += pause_s
        taken = min(wanted, int(min(quota.link_bytes(now_s), quota.user_bytes(user, now_s))))
        quota.take(user, taken, now_s)
        for name in ("link", f"d{user.deployment_id}", f"t{user.tenant}"):
            moved[name] = moved.get(name, 0) + taken
    moved.pop("t", None)
    rates = {"l": limits.link, "d": limits.deployment, "t": limits.tenant}
    for name, count in moved.items():
        assert count <= rates[name[0]] * (now_s + 1) + 1e-6

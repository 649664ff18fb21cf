"""Limits the KV that a node shares: over its link, and for each deployment and tenant.

Rule 1: bytes count against all three. Bytes moved beyond a limit are subtracted later, so that a
limit holds on average, with a burst of one second.
Rule 2: the node that fetches knows the tenant. The node that sends, or keeps a copy, knows only the
deployment: names of blocks say nothing about whose they are.
"""

from collections import OrderedDict
from typing import Final, Generic, NamedTuple, TypeVar

from isochrone.wire.ids import DeploymentId
from nodeagent.decide.requests.kv_fetch import LinkBudget

HOLDERS_MAX: Final = 4096
"""Deployments, and tenants, that are counted at a time: those that moved KV last."""

Key = TypeVar("Key")


class KvRateLimits(NamedTuple):
    """Bytes per second; 0 is no limit. Those of a deployment and a tenant are for each of them."""

    link: float = 0.0
    deployment: float = 0.0
    tenant: float = 0.0


NO_KV_LIMITS: Final = KvRateLimits()


class KvUser(NamedTuple):
    """The deployment and the tenant that KV is moved for; no tenant if it is not known."""

    deployment_id: DeploymentId
    tenant: str = ""


class KvQuota:
    """The bytes that may still be moved over one node's link, for each deployment and tenant."""

    def __init__(self, limits: KvRateLimits) -> None:
        self._link = LinkBudget(limits.link)
        self._deployments = _BudgetTable[DeploymentId](limits.deployment)
        self._tenants = _BudgetTable[str](limits.tenant)

    def link_bytes(self, now_s: float) -> float:
        """Return what may be moved over the link now."""
        return self._link.available(now_s)

    def user_bytes(self, user: KvUser, now_s: float) -> float:
        """Return what may be moved now for this deployment and tenant."""
        allowed = self._deployments.of(user.deployment_id).available(now_s)
        if user.tenant:
            allowed = min(allowed, self._tenants.of(user.tenant).available(now_s))
        return allowed

    def take(self, user: KvUser, transfer_bytes: int, now_s: float) -> None:
        """Count bytes that are moved."""
        self._link.take(transfer_bytes, now_s)
        self._deployments.of(user.deployment_id).take(transfer_bytes, now_s)
        if user.tenant:
            self._tenants.of(user.tenant).take(transfer_bytes, now_s)


class _BudgetTable(Generic[Key]):
    """A budget for each key; the least recently used ones are forgotten."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._budgets: OrderedDict[Key, LinkBudget] = OrderedDict()

    def of(self, key: Key) -> LinkBudget:
        """Return the budget of `key`."""
        budget = self._budgets.get(key)
        if budget is None:
            budget = self._budgets[key] = LinkBudget(self._bytes_per_s)
            if len(self._budgets) > HOLDERS_MAX:
                self._budgets.popitem(last=False)
        self._budgets.move_to_end(key)
        return budget

"""Shares a process's memory for large bodies between tenants, or that for answers between nodes.

Rule 1: a tenant may hold no more bytes than are still free. So one tenant alone gets half, and a
later one always gets some bytes, whatever the others hold.
"""


class FairBytes:
    """The bytes that each tenant holds, at most `bytes_max` together."""

    def __init__(self, bytes_max: int) -> None:
        """Start empty."""
        self.total = 0
        self._bytes_max = bytes_max
        self._by_tenant: dict[str, int] = {}

    def take(self, tenant_id: str, count: int) -> bool:
        """Count bytes until `give_back`; return False and count none if the tenant has its share.

        A body of 0 bytes always fits.
        """
        own = self._by_tenant.get(tenant_id, 0) + count
        if count and own > self._bytes_max - self.total:
            return False
        if own:
            self._by_tenant[tenant_id] = own
        self.total += count
        return True

    def is_own_share(self, tenant_id: str, count: int) -> bool:
        """Return whether a tenant's own bytes alone are the reason that `count` more do not fit."""
        own = self._by_tenant.get(tenant_id, 0)
        return own + count > self._bytes_max - own

    def give_back(self, tenant_id: str, count: int) -> None:
        """Count bytes that were taken no longer."""
        self.total -= count
        own = self._by_tenant.get(tenant_id, 0) - count
        if own:
            self._by_tenant[tenant_id] = own
        else:
            self._by_tenant.pop(tenant_id, None)

"""Decides whose batch items a router gets: tenants take turns, whatever their batches' size."""

from collections.abc import Mapping, Sequence

import msgspec


class WaitingBatch(msgspec.Struct, frozen=True):
    """A batch in progress with `waiting` items, in the order of creation."""

    batch_id: str
    tenant_id: str
    key_id: str
    deployment: str
    waiting: int
    is_key_valid: bool = False


def share_items(
    batches: Sequence[WaitingBatch], leased: Mapping[str, int], wanted: Mapping[str, int]
) -> dict[str, int]:
    """Return how many items to lease of each batch.

    `leased` counts the items of each tenant that are leased already. The tenant with the fewest
    leased items comes next, and of its batches the oldest.
    """
    counts = dict(leased)
    shares: dict[str, int] = {}
    for deployment, limit in wanted.items():
        queues: dict[str, list[WaitingBatch]] = {}
        for batch in batches:
            if batch.deployment == deployment and batch.waiting > 0:
                queues.setdefault(batch.tenant_id, []).append(batch)
        for _ in range(limit):
            if not queues:
                break
            tenant = min(queues, key=lambda name: (counts.get(name, 0), name))
            batch = queues[tenant][0]
            shares[batch.batch_id] = shares.get(batch.batch_id, 0) + 1
            counts[tenant] = counts.get(tenant, 0) + 1
            if shares[batch.batch_id] == batch.waiting:
                queues[tenant].pop(0)
                if not queues[tenant]:
                    del queues[tenant]
    return shares

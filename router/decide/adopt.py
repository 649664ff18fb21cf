"""Whether a new route table is believed. What is warm and answers is not dropped on a word alone.

A scheduler that reads an empty, truncated or hour-old database publishes a table that is valid and
wrong. The router's own probes are the second witness: a large drop is believed as far as the
dropped replicas no longer answer.
"""

from collections.abc import Set
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import ReplicaId
from isochrone.wire.routes import Route, RouteTable, apply_delta, diff

DROPPED_MIN: Final = 2
DROPPED_SHARE: Final = 0.5


class Adopted(NamedTuple):
    """Serve by this table from now on."""

    table: RouteTable


class RefusedTable(NamedTuple):
    """Drop nothing for now. `dropped` are the replicas to ask whether they still answer."""

    reason: str
    is_stale: bool
    dropped: tuple[Route, ...] = ()


def adopt(
    old: RouteTable | None, new: RouteTable, answering: Set[ReplicaId]
) -> Adopted | RefusedTable:
    """Decide on `new`; `answering` are the replicas of `old` that answer this router's probes."""
    if old is None:
        return Adopted(new)
    if new.cluster_id != old.cluster_id:
        return RefusedTable(
            f"cannot follow: the table is of cluster {new.cluster_id}, this router of "
            f"{old.cluster_id}",
            is_stale=True,
        )
    if (new.epoch, new.generation) < (old.epoch, old.generation) or (
        new.generation < old.generation
    ):
        return RefusedTable(
            f"cannot follow: epoch {new.epoch} generation {new.generation} is older than "
            f"{old.epoch}/{old.generation}",
            is_stale=True,
        )
    if old.deployments and not new.deployments and answering:
        return RefusedTable(
            f"cannot follow generation {new.generation}: it drops every deployment, which looks "
            f"like a lost database, while {len(answering)} replicas still answer",
            is_stale=False,
            dropped=old.routes,
        )
    # The last key may be revoked; several at once, to none, is a lost database.
    if len(old.keys) >= DROPPED_MIN and not new.keys:
        return RefusedTable(
            f"cannot follow generation {new.generation}: it drops every key ({len(old.keys)}), "
            "which looks like a lost database",
            is_stale=False,
        )
    return _drop_is_believed(old, new, answering)


def widened(old: RouteTable, new: RouteTable) -> RouteTable:
    """Return `old` with all that `new` adds or changes and nothing that it drops.

    Served by while `new` is held: a new key or replica need not wait for the doubt to end. It keeps
    the generation of `old`, which is what this router has.
    """
    added = msgspec.structs.replace(
        diff(old, new), pops_gone=(), deployments_gone=(), routes_gone=(), keys_gone=()
    )
    return msgspec.structs.replace(
        apply_delta(old, added), generation=old.generation, epoch=old.epoch
    )


def _drop_is_believed(
    old: RouteTable, new: RouteTable, answering: Set[ReplicaId]
) -> Adopted | RefusedTable:
    kept = {route.replica_id for route in new.routes}
    dropped = tuple(route for route in old.routes if route.replica_id not in kept)
    alive = [route for route in dropped if route.replica_id in answering]
    is_large = len(dropped) >= DROPPED_MIN and len(dropped) > DROPPED_SHARE * len(old.routes)
    if not is_large or not alive:
        return Adopted(new)
    # A rollout replaces replicas: as many new ones as went is no loss of capacity.
    added = len(kept - {route.replica_id for route in old.routes})
    if len(kept) >= DROPPED_SHARE * len(old.routes) and added >= len(dropped):
        return Adopted(new)
    return RefusedTable(
        f"cannot follow generation {new.generation}: it drops {len(dropped)} of "
        f"{len(old.routes)} replicas at once while {len(alive)} of them still answer",
        is_stale=False,
        dropped=dropped,
    )

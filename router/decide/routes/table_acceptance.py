"""Decides whether a new route table is accepted.

A table that drops many replicas which still answer is refused.

A scheduler that reads an empty, truncated or hour-old database publishes a table that is valid and
wrong. The router's own probes are the second source: a large drop is accepted as far as the dropped
replicas no longer answer. A scheduler that has just taken over a restored database is not in
contact with any node yet and publishes no route at all. For a while, then, only a node's own
refusal, not its silence, is taken as a sign that its replicas are gone. There is no such second
source for keys. A key's tombstone is accepted at once, even from a table that is otherwise refused.
"""

from collections.abc import Callable
from itertools import islice
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.peers.routes import Route, RouteTable, apply_delta, diff

DROPPED_MIN: Final = 2
DROPPED_SHARE: Final = 0.5
"""A drop of at least this many replicas, and of more than this share of them, is large; so is a
drop of all."""


SILENCE_COUNTS_AFTER_S: Final = 15.0
"""A router that has run for less has not probed every node: silence means nothing yet."""

EMPTY_TABLE_HELD_S: Final = 120.0
"""How long silent replicas are kept when a table has no route at all: more than the 60 s in which
nodes find a new scheduler, and the 70 s that a fleet of 5,000 takes to register."""


class TableRefusal(NamedTuple):
    """Why a table is refused. `dropped` are the replicas to probe one by one meanwhile."""

    reason: str
    is_stale: bool
    dropped: tuple[Route, ...] = ()


def trusts_silence(new: RouteTable, up_for_s: float, refused_for_s: float) -> bool:
    """Return whether a node that does not answer counts as gone when `new` drops its replicas.

    `up_for_s` is the age of this process, `refused_for_s` how long newer tables have been refused.
    """
    if refused_for_s >= EMPTY_TABLE_HELD_S:
        return True
    return bool(new.routes) and up_for_s >= SILENCE_COUNTS_AFTER_S


def check_table(
    old: RouteTable | None, new: RouteTable, is_answering: Callable[[Route], bool]
) -> TableRefusal | None:
    """Return why `new` is refused, None if it is accepted.

    `is_answering` says whether a replica's node answers this router's probes; while silence is not
    trusted (`trusts_silence`), whether it has not disowned the replica. It is called only for
    replicas that are dropped: a table may have ten thousand.
    """
    if old is None:
        return None
    if new.cluster_id != old.cluster_id:
        return TableRefusal(
            f"cannot follow: the table is of cluster {new.cluster_id}, this router of "
            f"{old.cluster_id}",
            is_stale=True,
        )
    if (new.epoch, new.generation) < (old.epoch, old.generation) or (
        new.generation < old.generation
    ):
        return TableRefusal(
            f"cannot follow: epoch {new.epoch} generation {new.generation} is older than "
            f"{old.epoch}/{old.generation}",
            is_stale=True,
        )
    answering = 0
    if old.deployments and not new.deployments:
        answering = sum(map(is_answering, old.routes))
    if answering:
        return TableRefusal(
            f"cannot follow generation {new.generation}: it drops every deployment, which looks "
            f"like a lost database, while {answering} replicas still answer",
            is_stale=False,
            dropped=old.routes,
        )
    # A revoked key has a tombstone, and an expired one a date. If all other keys are gone, they
    # were lost with a database. A single one may have been revoked by an older scheduler, which
    # writes no tombstones.
    if not new.keys and _lost_keys(old, new) >= DROPPED_MIN:
        return TableRefusal(
            f"cannot follow generation {new.generation}: it drops all {len(old.keys)} keys, not "
            "as revoked ones, which looks like a lost database",
            is_stale=False,
        )
    return _check_dropped_replicas(old, new, is_answering)


def merge_additions(old: RouteTable, new: RouteTable) -> RouteTable:
    """Return `old` with the additions and changes of `new`, without the keys that `new` revokes.

    The merged table is served while `new` is quarantined, so that a new key or replica need not
    wait, and a leaked key does not outlive its revocation. It keeps the generation of `old`, which
    is the last one accepted.
    """
    revoked = tuple(key_id for key_id in new.keys_revoked if key_id not in new.keys)
    added = msgspec.structs.replace(
        diff(old, new),
        pops_gone=(),
        deployments_gone=(),
        routes_gone=(),
        keys_gone=revoked,
        adapters_gone=(),
    )
    return msgspec.structs.replace(
        apply_delta(old, added), generation=old.generation, epoch=old.epoch
    )


def _lost_keys(old: RouteTable, new: RouteTable) -> int:
    """Count the keys of `old` that neither expire nor are revoked in `new`, up to DROPPED_MIN."""
    revoked = set(new.keys_revoked)
    lost = (key for key in old.keys if key.key_id not in revoked and not key.expires_at)
    return len(list(islice(lost, DROPPED_MIN)))


def _check_dropped_replicas(
    old: RouteTable, new: RouteTable, is_answering: Callable[[Route], bool]
) -> TableRefusal | None:
    if new.routes is old.routes:
        return None
    kept = {route.replica_id for route in new.routes}
    dropped = tuple(route for route in old.routes if route.replica_id not in kept)
    # The last one counts as many: a scheduler that has heard no node yet knows of no replica.
    is_large = len(dropped) > DROPPED_SHARE * len(old.routes) and (
        len(dropped) >= DROPPED_MIN or not new.routes
    )
    alive = sum(map(is_answering, dropped)) if is_large else 0
    if not alive:
        return None
    # A rollout replaces replicas: as many new ones as were dropped is no loss of capacity.
    added = len(kept - {route.replica_id for route in old.routes})
    if len(kept) >= DROPPED_SHARE * len(old.routes) and added >= len(dropped):
        return None
    return TableRefusal(
        f"cannot follow generation {new.generation}: it drops {len(dropped)} of "
        f"{len(old.routes)} replicas at once while {alive} of them still answer",
        is_stale=False,
        dropped=dropped,
    )

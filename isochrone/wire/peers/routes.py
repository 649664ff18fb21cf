"""Scheduler to router: which replicas serve which deployment, and which keys may use it.

A router holds one `RouteTable`. It receives a snapshot, then deltas from one generation to the
next. After a gap it requests a new snapshot. `apply_delta(old, diff(old, new)) == new`.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from isochrone.wire.client_keys.key_table import KeyEntry as KeyEntry
from isochrone.wire.client_keys.key_table import KeyLimits as KeyLimits
from isochrone.wire.client_keys.key_table import KeyTable as KeyTable
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.model import Deprecation, Price
from isochrone.wire.peers.adapter import AdapterEntry
from isochrone.wire.peers.assignment import Role


class Pop(msgspec.Struct, frozen=True, kw_only=True):
    """A site in a city. Round trips are estimated from the coordinates until they are measured."""

    pop: PopId
    city: str
    country: str
    latitude: float
    longitude: float


class Route(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The route to one warm replica. Rates are per replica; 0 if not measured yet.

    gc=False, as for keys: they form no reference cycles, and a table has many.
    """

    replica_id: ReplicaId
    deployment_id: DeploymentId
    version: int
    node_id: NodeId
    pop: PopId
    address: str
    role: Role = Role.UNIFIED
    tokens_in_flight_max: int = 32_768
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class RolloutEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout in progress: the share of requests that goes to the new version.

    It applies to the routers in `pops`; empty means all routers. A share of 0 is of a version that
    was rolled back and still has replicas.
    """

    version: int
    share: float
    pops: tuple[PopId, ...] = ()


class DeploymentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment as routers need it: the name that clients use, its limits and its price.

    `engine` is the name of its driver, and `engine_lacks` what that engine cannot do, as names of
    `engine_capabilities.FEATURES`. With `shares_kv`, the replicas of a PoP use each other's KV.
    `labels` are the classes of a model that classifies.
    With `needs_prefill`, a replica that decodes cannot read a prompt, and one that reads prompts
    cannot decode.
    """

    deployment_id: DeploymentId
    name: str
    model_id: ModelId
    context_tokens: int
    kind: str = "chat"
    created_at: int = 0
    price: Price | None = None
    rollout: RolloutEntry | None = None
    deprecation: Deprecation | None = None
    engine: str = ""
    engine_lacks: tuple[str, ...] = ()
    shares_kv: bool = False
    labels: tuple[str, ...] = ()
    needs_prefill: bool = False
    adapter_rank_max: int = 0
    """The highest rank of LoRA adapters that its replicas take, 0 for none."""
    depth_cost_per_token: float = 0.0
    """How much longer a prompt's token takes to read for each token before it, as a share of the
    first one's time, by the model's dimensions; 0 if they are unknown."""


class RouteTable(msgspec.Struct, frozen=True, kw_only=True, tag="route_table"):
    """All data that a router needs to serve on its own. Each tuple is sorted by id.

    Its keys are a list on the wire.

    `keys_revoked` are tombstones: a listed key was revoked, while one that is only absent may have
    been lost with a database.

    A table with `keys_only` has keys and tombstones, and nothing else: a router keeps the rest of
    its own table.
    """

    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch
    keys_only: bool = False
    pops: tuple[Pop, ...] = ()
    deployments: tuple[DeploymentEntry, ...] = ()
    routes: tuple[Route, ...] = ()
    keys: KeyTable = KeyTable()
    keys_revoked: tuple[KeyId, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()


class RouteTablePart(msgspec.Struct, frozen=True, kw_only=True, tag="route_table_part"):
    """One of the parts of a whole table; `wire/peers/table_parts.py` makes and joins them.

    The parts of a table follow each other on one connection, with `index` 0, 1, 2 and so on. The
    one with `is_last` completes the table. Sent only to a router that registered with TABLE_PARTS.
    """

    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch
    index: int
    is_last: bool = False
    keys_only: bool = False
    keys_kept: bytes = b""
    """In the first part: the buckets of keys (`key_sums.KeptBuckets`) that the router keeps as it
    last reported them. The parts have no keys of these buckets. In other buckets, keys that the
    parts lack are gone."""
    pops: tuple[Pop, ...] = ()
    deployments: tuple[DeploymentEntry, ...] = ()
    routes: tuple[Route, ...] = ()
    keys: tuple[KeyEntry, ...] = ()
    keys_revoked: tuple[KeyId, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()


class RouteDelta(msgspec.Struct, frozen=True, kw_only=True, tag="route_delta"):
    """The changes from the table of generation `base` to that of `generation`."""

    cluster_id: ClusterId
    base: Generation
    generation: Generation
    epoch: Epoch
    pops_set: tuple[Pop, ...] = ()
    pops_gone: tuple[PopId, ...] = ()
    deployments_set: tuple[DeploymentEntry, ...] = ()
    deployments_gone: tuple[DeploymentId, ...] = ()
    routes_set: tuple[Route, ...] = ()
    routes_gone: tuple[ReplicaId, ...] = ()
    keys_set: tuple[KeyEntry, ...] = ()
    keys_gone: tuple[KeyId, ...] = ()
    revoked_set: tuple[KeyId, ...] = ()
    revoked_gone: tuple[KeyId, ...] = ()
    adapters_set: tuple[AdapterEntry, ...] = ()
    adapters_gone: tuple[str, ...] = ()


class SnapshotWanted(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_wanted"):
    """A router's request for the whole table, after it missed a generation.

    `keys_held` as in a registration; empty asks for all keys.
    """

    have: Generation
    keys_held: bytes = b""


MANY_CHANGES_SHARE: Final = 1 / 8

V = TypeVar("V")


_PARTS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "pops": ("pops", lambda pop: pop.pop),
    "deployments": ("deployments", lambda entry: entry.deployment_id),
    "routes": ("routes", lambda route: route.replica_id),
    "keys_revoked": ("revoked", lambda key_id: key_id),
    "adapters": ("adapters", lambda adapter: adapter.adapter_id),
}
"""For each field of the table except keys: its prefix in a delta's fields, and the id of an
entry."""


def diff(old: RouteTable, new: RouteTable) -> RouteDelta:
    """Return the changes from `old` to `new`."""
    changes: dict[str, Any] = {}
    for part, (prefix, id_of) in _PARTS.items():
        changed, gone = _changes(getattr(old, part), getattr(new, part), id_of)
        changes |= {f"{prefix}_set": changed, f"{prefix}_gone": gone}
    keys = new.keys.changes_from(old.keys)
    return RouteDelta(
        cluster_id=new.cluster_id,
        base=old.generation,
        generation=new.generation,
        epoch=new.epoch,
        keys_set=keys.changed,
        keys_gone=keys.gone,
        **changes,
    )


def apply_delta(table: RouteTable, delta: RouteDelta) -> RouteTable:
    """Return the table after `delta`. The caller checks that `base` is the table's generation."""
    parts: dict[str, Any] = {}
    for part, (prefix, id_of) in _PARTS.items():
        changed, gone = getattr(delta, f"{prefix}_set"), getattr(delta, f"{prefix}_gone")
        parts[part] = _merge(getattr(table, part), changed, gone, id_of)
    return RouteTable(
        cluster_id=table.cluster_id,
        generation=delta.generation,
        epoch=delta.epoch,
        keys_only=table.keys_only,
        keys=table.keys.replaced(delta.keys_set, delta.keys_gone),
        **parts,
    )


def _merge(
    entries: tuple[V, ...],
    changed: tuple[V, ...],
    gone: tuple[str, ...],
    id_of: Callable[[V], str],
) -> tuple[V, ...]:
    """Return sorted `entries` after the changes; the same tuple if there are none.

    The entries between two changes are copied as a whole: a delta has few entries, a table many. If
    many change, looking for the place of each would take longer than sorting them all.
    """
    if not changed and not gone:
        return entries
    values = {id_of(entry): entry for entry in changed}
    if len(values) + len(gone) > len(entries) * MANY_CHANGES_SHARE:
        by_id = {id_of(entry): entry for entry in entries}
        for entry_id in gone:
            by_id.pop(entry_id, None)
        by_id |= values
        return tuple(by_id[entry_id] for entry_id in sorted(by_id))
    merged: list[V] = []
    start = 0
    for entry_id in sorted({*values, *gone}):
        index = bisect_left(entries, entry_id, lo=start, key=id_of)
        merged += entries[start:index]
        start = index
        if start < len(entries) and id_of(entries[start]) == entry_id:
            start += 1
        if entry_id in values:
            merged.append(values[entry_id])
    merged += entries[start:]
    return tuple(merged)


def _changes(
    old: Iterable[V], new: Iterable[V], id_of: Callable[[V], str]
) -> tuple[tuple[V, ...], tuple[str, ...]]:
    """Return (entries that are new or changed, ids that are gone)."""
    if old is new:
        return (), ()
    before = {id_of(entry): entry for entry in old}
    after = {id_of(entry): entry for entry in new}
    # Most entries are the same object in both tables; identity is faster than equality.
    changed = tuple(
        value
        for key, value in after.items()
        if (was := before.get(key)) is not value and was != value
    )
    gone = tuple(sorted(key for key in before if key not in after))
    return changed, gone

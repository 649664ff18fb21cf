"""Scheduler to router: which replicas serve which deployment and who may ask.

A router holds one `RouteTable`. It arrives as a snapshot, then as deltas from one generation to
the next; a gap is answered by asking for a snapshot. `apply_delta(old, diff(old, new)) == new`.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from isochrone.wire.assignment import Role
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
    TenantId,
)
from isochrone.wire.model import Price


class Pop(msgspec.Struct, frozen=True, kw_only=True):
    """A site in a city. Coordinates give distances until round trips are measured."""

    pop: PopId
    city: str
    country: str
    latitude: float
    longitude: float


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A way to one warm replica. Rates are per replica, 0 where not measured yet."""

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
    """A new version on its way: which share of requests goes to it, and from which cities.

    `pops` are the routers' PoPs; empty means all of them.
    """

    version: int
    share: float
    pops: tuple[PopId, ...] = ()


class DeploymentEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a router must know of a deployment: the name clients use and what it can take."""

    deployment_id: DeploymentId
    name: str
    model_id: ModelId
    context_tokens: int
    kind: str = "chat"
    created_at: int = 0
    price: Price | None = None
    rollout: RolloutEntry | None = None


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may ask; 0 means no limit.

    The rates and the concurrency hold at each router: a key that uses three PoPs has them three
    times. The quotas of a day (UTC) hold over the whole fleet, by the ledger, a few seconds late.
    `spend_per_day` counts models that have a price, in their currency; `tokens_per_day` counts all.
    """

    requests_per_min: int = 0
    tokens_per_min: int = 0
    concurrency: int = 0
    tokens_per_day: int = 0
    spend_per_day: float = 0.0


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A client's key as routers hold it: never the secret, only its SHA-256.

    `deployments` names what it may ask for; empty means everything. `expires_at` is Unix time, 0
    for never. `spent_until` is Unix time too: until then the ledger says a quota is used up.
    """

    key_id: KeyId
    secret_sha256: str
    tenant_id: TenantId
    deployments: tuple[str, ...] = ()
    limits: KeyLimits = KeyLimits()
    expires_at: float = 0.0
    spent_until: float = 0.0


class RouteTable(msgspec.Struct, frozen=True, kw_only=True, tag="route_table"):
    """Everything a router needs to serve without asking anyone. Each tuple is sorted by its id.

    `keys_revoked` are tombstones: a key named there was revoked, while one merely absent may have
    been lost with a database.
    """

    cluster_id: ClusterId
    generation: Generation
    epoch: Epoch
    pops: tuple[Pop, ...] = ()
    deployments: tuple[DeploymentEntry, ...] = ()
    routes: tuple[Route, ...] = ()
    keys: tuple[KeyEntry, ...] = ()
    keys_revoked: tuple[KeyId, ...] = ()


class RouteDelta(msgspec.Struct, frozen=True, kw_only=True, tag="route_delta"):
    """What turns the table of generation `base` into that of `generation`."""

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


class SnapshotWanted(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_wanted"):
    """A router missed a generation and asks for the whole table."""

    have: Generation


V = TypeVar("V")


_PARTS: Final[dict[str, tuple[str, Callable[[Any], str]]]] = {
    "pops": ("pops", lambda pop: pop.pop),
    "deployments": ("deployments", lambda entry: entry.deployment_id),
    "routes": ("routes", lambda route: route.replica_id),
    "keys": ("keys", lambda key: key.key_id),
    "keys_revoked": ("revoked", lambda key_id: key_id),
}
"""The parts of a table: what a delta calls each, and what names a value of it."""


def diff(old: RouteTable, new: RouteTable) -> RouteDelta:
    """Return what changed from `old` to `new`."""
    changes: dict[str, Any] = {}
    for part, (word, name) in _PARTS.items():
        changed, gone = _changes(getattr(old, part), getattr(new, part), name)
        changes |= {f"{word}_set": changed, f"{word}_gone": gone}
    return RouteDelta(
        cluster_id=new.cluster_id,
        base=old.generation,
        generation=new.generation,
        epoch=new.epoch,
        **changes,
    )


def apply_delta(table: RouteTable, delta: RouteDelta) -> RouteTable:
    """Return the table after `delta`, whose `base` the caller has held against its generation."""
    parts: dict[str, Any] = {}
    for part, (word, name) in _PARTS.items():
        after = {name(value): value for value in getattr(table, part)}
        for gone in getattr(delta, f"{word}_gone"):
            after.pop(gone, None)
        after.update((name(value), value) for value in getattr(delta, f"{word}_set"))
        parts[part] = tuple(value for _, value in sorted(after.items()))
    return RouteTable(
        cluster_id=table.cluster_id, generation=delta.generation, epoch=delta.epoch, **parts
    )


def _changes(
    old: Iterable[V], new: Iterable[V], name: Callable[[V], str]
) -> tuple[tuple[V, ...], tuple[str, ...]]:
    if old is new:
        return (), ()
    before = {name(value): value for value in old}
    after = {name(value): value for value in new}
    # Of thousands nearly all are the very same, and asked no further.
    changed = tuple(
        value
        for key, value in after.items()
        if (was := before.get(key)) is not value and was != value
    )
    gone = tuple(sorted(key for key in before if key not in after))
    return changed, gone

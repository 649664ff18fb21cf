"""Scheduler to node: the assignment, the complete numbered desired state of one node."""

from enum import StrEnum
from math import ceil
from typing import Annotated

import msgspec

from isochrone.wire.ids import (
    ID_PATTERN,
    MODEL_NAME_PATTERN,
    ClusterId,
    DeploymentId,
    DeviceId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.model import (
    Artifact,
    EngineSettings,
    ModelName,
    NonNegative,
    Positive,
    Sha256,
)


class Role(StrEnum):
    """Which phases a replica runs."""

    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part of a replica that spans `nodes` nodes of one PoP; `place` numbers the parts.

    Place 0 is the leader: its engine serves HTTP. The other parts have no HTTP server; they connect
    to the leader at `host` and `port` and prove that they know `secret`. Each part has a replica id
    of its own.
    """

    leader_id: ReplicaId
    place: int
    nodes: int
    host: str
    port: int
    secret: str = ""


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that a node should run: its weights, devices and engine.

    Nodes report the spec back, and a scheduler whose database lost it adopts it from there.
    Therefore each field has the constraints of the catalogue. `memory_bytes` is the limit on each
    device. With `group`, this is one node's part of a replica, and `device_ids` are the devices of
    this node. `seal` proves to a scheduler that the replica was placed on this node. With
    `overcommit` above 1 it shares its memory with other such replicas: it may have to sleep, and
    the planner counts this part of its memory only. `extra_bytes` of `memory_bytes` were added
    because such replicas were measured to take more than computed. `kind` is the kind of model, ""
    from an older scheduler.
    """

    replica_id: Annotated[ReplicaId, msgspec.Meta(pattern=ID_PATTERN)]
    deployment_id: Annotated[DeploymentId, msgspec.Meta(pattern=ID_PATTERN)]
    version: Positive
    name: ModelName
    model_id: Annotated[ModelId, msgspec.Meta(pattern=MODEL_NAME_PATTERN)]
    artifact: Artifact
    context_tokens: Positive
    engine: EngineSettings
    device_ids: tuple[DeviceId, ...]
    memory_bytes: NonNegative
    role: Role = Role.UNIFIED
    group: ReplicaGroup | None = None
    seal: str = ""
    overcommit: Annotated[float, msgspec.Meta(ge=1, le=64)] = 1.0
    extra_bytes: NonNegative = 0
    kind: str = ""

    @property
    def planned_bytes(self) -> int:
        """The bytes of each device that the planner counts for this replica."""
        return ceil(self.memory_bytes / self.overcommit)

    @property
    def leads(self) -> bool:
        """True if this replica serves requests: always, except in the other parts of a group."""
        return self.group is None or self.group.place == 0


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """The order to end a replica. Nothing else ends one.

    A replica that is only absent from an assignment keeps running, so that an empty or restored
    database cannot stop a healthy fleet. `generation` is that in which the end was decided.
    """

    replica_id: ReplicaId
    generation: Generation
    reason: str
    drain_timeout_s: float = 30.0


class PeerSource(msgspec.Struct, frozen=True, kw_only=True):
    """A node from which to fetch an artifact. With `holds` false it is still fetching it itself."""

    node_id: NodeId
    pop: PopId
    address: str
    holds: bool = True


class ArtifactHolders(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes that have an artifact, nearest first. Only a hint: all bytes are verified."""

    digest: Sha256
    peers: tuple[PeerSource, ...]


class ArtifactPrefetch(msgspec.Struct, frozen=True, kw_only=True):
    """An artifact to fetch ahead of use, at `bytes_per_s` at most (0: no limit).

    A replica's start has priority. A prefetch evicts no artifact that is in use or that an earlier
    prefetch lists.
    """

    artifact: Artifact
    bytes_per_s: float = 0.0


class RevokedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A revoked certificate, by its serial in hex, or all those of `name` issued before `at`."""

    role: str
    name: str
    serial: str = ""
    at: float = 0.0


class StoreMasterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The node whose agent runs the master of its PoP's store of KV, and that agent's address."""

    node_id: NodeId
    address: str


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """One node's part of the plan.

    The node refuses an older generation or epoch, and another cluster's assignment. `prefetches`
    are in the order of their need. `store_master` is None if no replica of the PoP needs one.
    """

    cluster_id: ClusterId
    node_id: NodeId
    generation: Generation
    epoch: Epoch
    replicas: tuple[ReplicaSpec, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    holders: tuple[ArtifactHolders, ...] = ()
    prefetches: tuple[ArtifactPrefetch, ...] = ()
    revoked: tuple[RevokedCertificate, ...] = ()
    store_master: StoreMasterPlace | None = None

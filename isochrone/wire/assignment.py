"""Scheduler to node: everything one node should run, whole and numbered."""

from enum import StrEnum
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
from isochrone.wire.model import (
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
    """A replica over several nodes of one PoP, as each of them is told; `place` says which it is.

    Place 0 leads: its engine has the door, and the others, which have none, dial it at `host` and
    `port` and prove that they know `secret`. Each has a replica id of its own.
    """

    leader_id: ReplicaId
    place: int
    nodes: int
    host: str
    port: int
    secret: str = ""


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One replica this node should run: which weights, on which devices, with which engine.

    A node tells it back, and what the store does not know is taken in from there: so each field is
    held to what its place in the catalogue holds it to. `memory_bytes` is what it may take of each
    of its devices. With `group`, it is one node's part of a replica: `device_ids` are those here.
    By its `seal` a scheduler knows that it was once seated on this node.
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

    @property
    def leads(self) -> bool:
        """True where requests are answered: everywhere but in a group's other parts."""
        return self.group is None or self.group.place == 0


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """The order to end a replica, and the only thing that does.

    A replica merely absent from an assignment goes on: an empty or restored database then cannot
    stop a healthy fleet. `generation` is the one in which the ending was decided.
    """

    replica_id: ReplicaId
    generation: Generation
    reason: str
    drain_timeout_s: float = 30.0


class PeerSource(msgspec.Struct, frozen=True, kw_only=True):
    """A node to ask for an artifact. One that does not hold it yet is fetching it for its PoP."""

    node_id: NodeId
    pop: PopId
    address: str
    holds: bool = True


class ArtifactHolders(msgspec.Struct, frozen=True, kw_only=True):
    """Who else has an artifact, the nearest first. A hint: its bytes are verified wherever from."""

    digest: Sha256
    peers: tuple[PeerSource, ...]


class ArtifactPrefetch(msgspec.Struct, frozen=True, kw_only=True):
    """Weights to have on disk before anything is started with them, so fast at most (0: no bound).

    A start goes before it; it drops nothing that runs here or that is wished before it.
    """

    artifact: Artifact
    bytes_per_s: float = 0.0


class RevokedCertificate(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate that is refused: by its serial in hex, or all of a name issued before `at`."""

    role: str
    name: str
    serial: str = ""
    at: float = 0.0


class Assignment(msgspec.Struct, frozen=True, kw_only=True, tag="assignment"):
    """One node's part of the plan; of an older generation or epoch or another cluster: refused.

    `prefetches` come in the order in which they are needed.
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

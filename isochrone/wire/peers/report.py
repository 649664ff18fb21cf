"""Node to scheduler: the complete state of one node (`Report`) and its heartbeat (`Pulse`)."""

from enum import StrEnum
from typing import Annotated, Final

import msgspec

from isochrone.wire.ids import (
    ADDRESS_PATTERN,
    BootId,
    DeploymentId,
    DeviceId,
    Epoch,
    Generation,
    NodeId,
    ReplicaId,
)
from isochrone.wire.models.model import Amount, NonNegative, Sha256
from isochrone.wire.peers.assignment import ReplicaSpec

Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]

DEVICES_MAX: Final = 256
REPLICAS_MAX: Final = 4096
ARTIFACTS_MAX: Final = 65_536
"""More than a node has. A report with more is refused, because each is a row in the store."""

Label = Annotated[str, msgspec.Meta(max_length=128)]
LackingEngines = Annotated[
    dict[Label, Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=64)
]
Digests = Annotated[tuple[Sha256, ...], msgspec.Meta(max_length=ARTIFACTS_MAX)]


class ReplicaState(StrEnum):
    """The state of a replica. Only `warm` replicas get requests."""

    WANTED = "wanted"
    FETCHING = "fetching"
    LOADING = "loading"
    WARM = "warm"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class NodeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or the CPU of a node without one. `memory_bytes` is the part that replicas may use."""

    device_id: Annotated[DeviceId, msgspec.Meta(max_length=128)]
    device_class: Label
    memory_bytes: int
    healthy: bool = True
    reason: str = ""


class ReplicaProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a replica on its devices; 0 if not measured yet.

    `memory_bytes` is that of its weights, and `used_bytes` the most that all of its processes took
    of one device.
    """

    load_s: Amount = 0.0
    memory_bytes: NonNegative = 0
    prefill_tokens_per_s: Amount = 0.0
    decode_tokens_per_s: Amount = 0.0
    used_bytes: NonNegative = 0


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one replica. It includes the spec, so that a scheduler can adopt the replica."""

    spec: ReplicaSpec
    state: ReplicaState
    reason: str = ""
    since_s: float = 0.0
    restarts: int = 0
    fetched_bytes: int = 0
    profile: ReplicaProfile = ReplicaProfile()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A replica of the assignment that the node refuses to run, and why.

    The refusal is reported for a while after the assignment dropped the replica. `version` is the
    deployment's; 0 is unknown.
    """

    replica_id: ReplicaId
    reason: str
    deployment_id: DeploymentId = DeploymentId("")
    version: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The complete state of a node, sent on every change and every 10 s.

    `seq` orders the reports of one `boot_id`. `disk_free_bytes` is the space for new artifacts,
    after evicting those that nothing on the node needs. Rates are measured, 0 if not yet.
    `in_host_memory` lists the artifacts in the page cache. `rank_ports` is the range of rendezvous
    ports (first, last) of replicas over several nodes; without it the node runs no part of one.
    `lacking_engines` says, by driver, why the node can start no such engine; others it can.
    """

    node_id: NodeId
    boot_id: BootId
    seq: int
    generation: Generation
    epoch: Epoch
    address: Annotated[str, msgspec.Meta(pattern=ADDRESS_PATTERN)]
    devices: Annotated[tuple[NodeDevice, ...], msgspec.Meta(max_length=DEVICES_MAX)]
    replicas: Annotated[tuple[ReplicaReport, ...], msgspec.Meta(max_length=REPLICAS_MAX)] = ()
    refusals: Annotated[tuple[Refusal, ...], msgspec.Meta(max_length=REPLICAS_MAX)] = ()
    artifacts: Digests = ()
    in_host_memory: Digests = ()
    disk_free_bytes: int = 0
    disk_bytes_per_s: Amount = 0.0
    fetch_bytes_per_s: Amount = 0.0
    failure_domain: Label = ""
    rank_ports: tuple[Port, Port] | None = None
    version: str = ""
    lacking_engines: LackingEngines = {}


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """The node's heartbeat, every 2 s. `generation` is that of its current assignment.

    `assignment_refusal` says why the node has not taken a newer one that it was sent. `sent_at` is
    Unix time by the node's clock, 0 if its version does not say.
    """

    node_id: NodeId
    boot_id: BootId
    seq: int
    generation: Generation
    assignment_refusal: str = ""
    sent_at: float = 0.0

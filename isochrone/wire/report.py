"""Node to scheduler: everything one node is, whole (`Report`), and that it lives (`Pulse`)."""

from enum import StrEnum
from typing import Annotated

import msgspec

from isochrone.wire.assignment import ReplicaSpec
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
from isochrone.wire.model import Amount, NonNegative, Sha256

Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class ReplicaState(StrEnum):
    """Where a replica is in its life. Only `warm` is routed to."""

    WANTED = "wanted"
    FETCHING = "fetching"
    LOADING = "loading"
    WARM = "warm"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class NodeDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or the CPU where there is none. `memory_bytes` is what replicas may use of it."""

    device_id: DeviceId
    device_class: str
    memory_bytes: int
    healthy: bool = True
    reason: str = ""


class ReplicaProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a replica on these devices; 0 where not measured yet."""

    load_s: Amount = 0.0
    memory_bytes: NonNegative = 0
    prefill_tokens_per_s: Amount = 0.0
    decode_tokens_per_s: Amount = 0.0


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it is, with the spec it runs, so that a scheduler can adopt it."""

    spec: ReplicaSpec
    state: ReplicaState
    reason: str = ""
    since_s: float = 0.0
    restarts: int = 0
    fetched_bytes: int = 0
    profile: ReplicaProfile = ReplicaProfile()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the assignment this node will not do, and why; told for a while after its end."""

    replica_id: ReplicaId
    reason: str
    deployment_id: DeploymentId = DeploymentId("")


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """Everything this node is. Sent on change and every 10 s; `seq` orders those of one boot.

    `disk_free_bytes` is what artifacts may take, those that nothing here needs being dropped. Rates
    are those seen, 0 where none was; `in_host_memory` are artifacts that the page cache holds.
    `rank_ports`, first and last, are where it lets other nodes' parts of a replica meet its own;
    without them it takes no part in a replica over several nodes.
    """

    node_id: NodeId
    boot_id: BootId
    seq: int
    generation: Generation
    epoch: Epoch
    address: Annotated[str, msgspec.Meta(pattern=ADDRESS_PATTERN)]
    devices: tuple[NodeDevice, ...]
    replicas: tuple[ReplicaReport, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    artifacts: tuple[Sha256, ...] = ()
    in_host_memory: tuple[Sha256, ...] = ()
    disk_free_bytes: int = 0
    disk_bytes_per_s: Amount = 0.0
    fetch_bytes_per_s: Amount = 0.0
    failure_domain: str = ""
    rank_ports: tuple[Port, Port] | None = None
    version: str = ""


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """A sign of life every 2 s; `generation` is the one this node has reached."""

    node_id: NodeId
    boot_id: BootId
    seq: int
    generation: Generation

"""The frozen picture that every decision reads, and the plan that is their answer.

Rule: whatever a decision needs, time included, is in `ClusterState`. A saved picture replays.
"""

from enum import StrEnum

import msgspec

from isochrone.wire.assignment import ReplicaSpec, Role
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    DeviceId,
    Generation,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.model import Deployment, Model
from isochrone.wire.report import Device, Profile, ReplicaState
from isochrone.wire.routes import Pop
from scheduler.decide.rollout import Rollout


class Liveness(StrEnum):
    """What the centre believes of a node: heard from, quiet for a while, or gone."""

    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One server as last reported. `silent_s` is how long nothing was heard of it.

    Nodes of one `failure_domain` (a rack, a power feed) fail together; "" is a domain of its own.
    The measured rates say how fast weights come from its disk and from elsewhere; 0 is not known.
    """

    node_id: NodeId
    pop: PopId
    address: str
    devices: tuple[Device, ...]
    draining: bool = False
    revoked: bool = False
    silent_s: float = 0.0
    artifacts: tuple[str, ...] = ()
    in_host_memory: tuple[str, ...] = ()
    disk_free_bytes: int = 0
    disk_bytes_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0
    failure_domain: str = ""
    generation: Generation = Generation(0)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's seat, what its node last said of it, and its tombstone if it is to end."""

    replica_id: ReplicaId
    deployment_id: DeploymentId
    version: int
    node_id: NodeId
    device_ids: tuple[DeviceId, ...]
    memory_bytes: int
    role: Role = Role.UNIFIED
    state: ReplicaState = ReplicaState.WANTED
    state_reason: str = ""
    state_age_s: float = 0.0
    age_s: float = 0.0
    restarts: int = 0
    is_ending: bool = False
    reason: str = ""
    profile: Profile = Profile()


class DemandRate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens per second that one city asks of one deployment, over the last minutes.

    The collector need not walk these: they hold no other, and a planet has tens of thousands.
    """

    deployment_id: DeploymentId
    pop: PopId
    requests_per_s: float = 0.0
    uncached_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    refused_per_s: float = 0.0


class PopDistance(msgspec.Struct, frozen=True, kw_only=True):
    """Measured round trip from a city's routers to the nodes of a PoP."""

    from_pop: PopId
    to_pop: PopId
    rtt_ms: float


class MeasuredProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What agents measured of a model on a class of device."""

    model_id: str
    device_class: str
    profile: Profile


class PrefetchWish(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that a node should have on its disk before it is asked to run them.

    `due_s` from now is when demand is foretold to need a replica there; below 0 it is past.
    `bytes_per_s` is how fast they may come, 0 where they come from within the PoP. `is_held` says
    that the record has them arrived.
    """

    node_id: NodeId
    model_id: str
    deployment_id: DeploymentId
    due_s: float
    bytes_per_s: float
    reason: str
    is_held: bool = False


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole fleet at one generation.

    `acting_for_s` is how long this scheduler has acted: a new one has not heard everybody yet.
    """

    cluster_id: ClusterId
    generation: Generation
    acting_for_s: float
    pops: tuple[Pop, ...] = ()
    nodes: tuple[Node, ...] = ()
    models: tuple[Model, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    deleted: tuple[DeploymentId, ...] = ()
    placements: tuple[Placement, ...] = ()
    demand: tuple[DemandRate, ...] = ()
    distances: tuple[PopDistance, ...] = ()
    profiles: tuple[MeasuredProfile, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    prefetches: tuple[PrefetchWish, ...] = ()

    def measured(self) -> dict[tuple[str, str], Profile]:
        """Return what agents measured, by model and class of device."""
        return {(row.model_id, row.device_class): row.profile for row in self.profiles}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Seat a replica. The id in `spec` is the planner's, made from the picture alone."""

    node_id: NodeId
    spec: ReplicaSpec
    reason: str


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """End a replica after draining it."""

    replica_id: ReplicaId
    node_id: NodeId
    reason: str
    drain_timeout_s: float = 30.0


class Unmet(msgspec.Struct, frozen=True, kw_only=True):
    """A wish that cannot be met now, and the reason with its numbers."""

    deployment_id: DeploymentId
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A small list of moves, each with its reason. `frozen` says why nothing moves, if so."""

    based_on: Generation
    starts: tuple[Start, ...] = ()
    endings: tuple[Ending, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    frozen: str = ""

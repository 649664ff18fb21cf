"""The frozen picture that every decision reads, and the plan that is their answer.

Rule: whatever a decision needs, time included, is in `ClusterState`. A saved picture replays.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final

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
from scheduler.decide.rollout.lifecycle import Rollout

RATES: Final = (
    *("requests_per_s", "refused_per_s"),
    *("uncached_tokens_per_s", "output_tokens_per_s"),
)
"""What a `DemandRate` is made of."""


class Liveness(StrEnum):
    """What the centre believes of a node: heard from, quiet for a while, or gone."""

    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """One server as last reported. `silent_s` is how long nothing was heard of it.

    `back_s` is how long ago it came back from a silence that others are lost for; None: it did not.
    Nodes of one `failure_domain` (a rack, a power feed) fail together; "" is a domain of its own.
    The measured rates say how fast weights come from its disk and from elsewhere; 0 is not known.
    `rank_ports`, first and last, are for replicas over several nodes; without, it has part in none.
    `refused` are deployments of which it would run no replica a moment ago, and why.
    """

    node_id: NodeId
    pop: PopId
    address: str
    devices: tuple[Device, ...]
    draining: bool = False
    revoked: bool = False
    silent_s: float = 0.0
    back_s: float | None = None
    artifacts: tuple[str, ...] = ()
    in_host_memory: tuple[str, ...] = ()
    disk_free_bytes: int = 0
    disk_bytes_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0
    failure_domain: str = ""
    rank_ports: tuple[int, int] | None = None
    refused: tuple[tuple[DeploymentId, str], ...] = ()
    generation: Generation = Generation(0)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's seat, what its node last said of it, and its tombstone if it is to end.

    One over several nodes is its leader's, whose engine has the door, with `followers` for the
    other nodes' parts and the `rank_port` on which they meet. A part whose leader is gone stands
    alone, with its `leader_id`, until it is ended.
    """

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
    leader_id: ReplicaId = ReplicaId("")
    rank_port: int = 0
    followers: "tuple[Placement, ...]" = ()

    @property
    def parts(self) -> "tuple[Placement, ...]":
        """What it is on each of its nodes, the leader's first."""
        return (self, *self.followers)

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """Its nodes, the leader's first."""
        if not self.followers:
            return (self.node_id,)
        return (self.node_id, *(part.node_id for part in self.followers))


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

    def times(self, factor: float) -> "DemandRate":
        """Return so many times as much."""
        more = {rate: getattr(self, rate) * factor for rate in RATES}
        return msgspec.structs.replace(self, **more)

    def plus(self, other: "DemandRate") -> "DemandRate":
        """Return this with what is asked by another."""
        both = {rate: getattr(self, rate) + getattr(other, rate) for rate in RATES}
        return msgspec.structs.replace(self, **both)


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


class StartFailures(msgspec.Struct, frozen=True, kw_only=True):
    """How often of late nodes gave up on replicas of a version, engines that broke again and again.

    `node_ids` are where, the last first; `ago_s` and `reason` are the last one's.
    """

    deployment_id: DeploymentId
    version: int
    times: int
    ago_s: float
    node_ids: Annotated[tuple[NodeId, ...], msgspec.Meta(min_length=1)]
    reason: str


class PrefetchTarget(msgspec.Struct, frozen=True, kw_only=True):
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
    nodes: tuple[FleetNode, ...] = ()
    models: tuple[Model, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    deleted: tuple[DeploymentId, ...] = ()
    placements: tuple[Placement, ...] = ()
    demand: tuple[DemandRate, ...] = ()
    distances: tuple[PopDistance, ...] = ()
    profiles: tuple[MeasuredProfile, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    prefetches: tuple[PrefetchTarget, ...] = ()
    given_up: tuple[StartFailures, ...] = ()

    def measured(self) -> dict[tuple[str, str], Profile]:
        """Return what agents measured, by model and class of device."""
        return {(row.model_id, row.device_class): row.profile for row in self.profiles}


class ReplicaStart(msgspec.Struct, frozen=True, kw_only=True):
    """Seat a replica. The id in `spec` is the planner's, made from the picture alone.

    `followers` are the parts on other nodes of one that is spread over several.
    """

    node_id: NodeId
    spec: ReplicaSpec
    reason: str
    followers: "tuple[ReplicaStart, ...]" = ()

    @property
    def parts(self) -> "tuple[ReplicaStart, ...]":
        """What is started on each node, the leader's first."""
        return (self, *self.followers)

    def with_spec(self, **fields: Any) -> "ReplicaStart":
        """Return it with fields of its spec changed."""
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, **fields))

    def each(self, change: "Callable[[ReplicaStart], ReplicaStart]") -> "ReplicaStart":
        """Return it with each of its parts changed."""
        followers = tuple(part.each(change) for part in self.followers)
        return msgspec.structs.replace(change(self), followers=followers)

    def placement(self, state: ReplicaState) -> Placement:
        """Return the seat that this becomes."""
        group = self.spec.group
        return Placement(
            replica_id=self.spec.replica_id,
            deployment_id=self.spec.deployment_id,
            version=self.spec.version,
            node_id=self.node_id,
            device_ids=self.spec.device_ids,
            memory_bytes=self.spec.memory_bytes,
            role=self.spec.role,
            state=state,
            reason=self.reason,
            leader_id=group.leader_id if group and group.place else ReplicaId(""),
            rank_port=group.port if group else 0,
            followers=tuple(follower.placement(state) for follower in self.followers),
        )


class ReplicaEnding(msgspec.Struct, frozen=True, kw_only=True):
    """End a replica after draining it: on its node, and on those of its followers."""

    replica_id: ReplicaId
    node_id: NodeId
    reason: str
    follower_ids: tuple[NodeId, ...] = ()
    drain_timeout_s: float = 30.0


class UnmetRequirement(msgspec.Struct, frozen=True, kw_only=True):
    """A wish that cannot be met now, and the reason with its numbers."""

    deployment_id: DeploymentId
    reason: str


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A small list of moves, each with its reason. `frozen` says why nothing moves, if so."""

    based_on: Generation
    starts: tuple[ReplicaStart, ...] = ()
    endings: tuple[ReplicaEnding, ...] = ()
    unmet: tuple[UnmetRequirement, ...] = ()
    frozen: str = ""

    @property
    def node_ids(self) -> list[NodeId]:
        """The nodes of which the assignment changes, in order."""
        concerned = {part.node_id for start in self.starts for part in start.parts}
        for ending in self.endings:
            concerned |= {ending.node_id, *ending.follower_ids}
        return sorted(concerned)

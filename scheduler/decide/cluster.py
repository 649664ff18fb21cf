"""The cluster state that every decision reads, and the plan that placement returns.

Rule: everything that a decision needs, times included, is in `ClusterState`. So a saved state
replays to the same plan.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    DeviceId,
    Generation,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.model import CatalogModel, Deployment
from isochrone.wire.peers.assignment import ReplicaSpec, Role
from isochrone.wire.peers.report import NodeDevice, ReplicaProfile, ReplicaState
from isochrone.wire.peers.routes import Pop
from scheduler.decide.rollout.lifecycle import Rollout

RATES: Final = (
    *("requests_per_s", "refused_per_s"),
    *("uncached_tokens_per_s", "output_tokens_per_s"),
)
"""The rates of a `DemandRate`."""


class Liveness(StrEnum):
    """The liveness of a node as the scheduler sees it: in contact, silent for a while, or gone."""

    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"


class NodeRefusal(NamedTuple):
    """A version of a deployment of which a node refused a replica, and why; 0 is any version."""

    deployment_id: DeploymentId
    reason: str
    version: int = 0


class FleetNode(msgspec.Struct, frozen=True, kw_only=True):
    """One server as last reported. `silent_s` is the time since it was last in contact.

    `has_connected` is False for a name that joined and has never connected since. `back_s` is the
    time since it came back from a silence long enough to be lost; None if it did not. Nodes of one
    `failure_domain` (a rack, a power feed) fail together; "" is a domain of its own. The measured
    rates are how fast weights come from its disk and from other nodes; 0 is unknown. `rank_ports`,
    first and last, are for replicas over several nodes; without them it takes no part in any.
    `refused` are the versions of deployments of which it refused a replica recently.
    `lacking_engines` says, by driver, why it can start no such engine.
    """

    node_id: NodeId
    pop: PopId
    address: str
    devices: tuple[NodeDevice, ...]
    draining: bool = False
    revoked: bool = False
    silent_s: float = 0.0
    has_connected: bool = True
    back_s: float | None = None
    artifacts: tuple[str, ...] = ()
    in_host_memory: tuple[str, ...] = ()
    disk_free_bytes: int = 0
    disk_bytes_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0
    failure_domain: str = ""
    rank_ports: tuple[int, int] | None = None
    refused: tuple[NodeRefusal, ...] = ()
    lacking_engines: dict[str, str] = {}
    generation: Generation = Generation(0)

    def refusal_of(self, deployment_id: DeploymentId, version: int) -> str | None:
        """Return why the node refused this version of a deployment recently; None if it did not.

        A later version may have another engine or other options, which the node may well run.
        """
        for refusal in self.refused:
            if refusal.deployment_id == deployment_id and refusal.version in (0, version):
                return refusal.reason
        return None


TOKENS_IN_FLIGHT_UNKNOWN: Final = 32_768
"""The limit of a replica whose KV cache in tokens is not known."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A replica on a node, its last reported state, and whether it is to end.

    A replica over several nodes is the placement of its leader, whose engine accepts requests, with
    `followers` for the parts on other nodes and the `rank_port` on which they meet. A part whose
    leader is gone is a placement of its own, with its `leader_id`, until it has ended.
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
    profile: ReplicaProfile = ReplicaProfile()
    tokens_in_flight_max: int = 0
    overcommit: float = 1.0
    extra_bytes: int = 0
    leader_id: ReplicaId = ReplicaId("")
    rank_port: int = 0
    followers: "tuple[Placement, ...]" = ()

    @property
    def parts(self) -> "tuple[Placement, ...]":
        """Its part on each node, the leader's first."""
        return (self, *self.followers)

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """Its nodes, the leader's first."""
        if not self.followers:
            return (self.node_id,)
        return (self.node_id, *(part.node_id for part in self.followers))


class DemandRate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The demand of one city for one deployment, over the last minutes.

    Not tracked by the garbage collector: a large fleet has tens of thousands, without references.
    """

    deployment_id: DeploymentId
    pop: PopId
    requests_per_s: float = 0.0
    uncached_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    refused_per_s: float = 0.0

    def times(self, factor: float) -> "DemandRate":
        """Return this demand times a factor."""
        scaled = {rate: getattr(self, rate) * factor for rate in RATES}
        return msgspec.structs.replace(self, **scaled)

    def plus(self, other: "DemandRate") -> "DemandRate":
        """Return the sum of this demand and another."""
        summed = {rate: getattr(self, rate) + getattr(other, rate) for rate in RATES}
        return msgspec.structs.replace(self, **summed)


class PopDistance(msgspec.Struct, frozen=True, kw_only=True):
    """The measured round trip from a city's routers to the nodes of a PoP."""

    from_pop: PopId
    to_pop: PopId
    rtt_ms: float


class MeasuredProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The rates that agents measured of a model on a device class."""

    model_id: str
    device_class: str
    profile: ReplicaProfile


class StartFailures(msgspec.Struct, frozen=True, kw_only=True):
    """How often nodes recently gave up starting replicas of a version because engines kept failing.

    `node_ids` are the nodes, the latest first; `ago_s` and `reason` are of the latest.
    """

    deployment_id: DeploymentId
    version: int
    times: int
    ago_s: float
    node_ids: Annotated[tuple[NodeId, ...], msgspec.Meta(min_length=1)]
    reason: str


class PrefetchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that a node should have on its disk before it runs them.

    `due_s` is the time until the forecast needs a replica there; below 0 it is past. `bytes_per_s`
    limits the fetch; 0 means that the weights come from within the PoP. `is_held` says that the
    store has recorded their arrival.
    """

    node_id: NodeId
    model_id: str
    deployment_id: DeploymentId
    due_s: float
    bytes_per_s: float
    reason: str
    is_held: bool = False


class UnreadableRow(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A row of the store that this release cannot read, and why.

    `deployment_id` is the deployment that it concerns, if it is one. With `has_last` the last value
    that could be read takes its place; otherwise the deployment's replicas stay as they are.
    """

    table: str
    name: str
    reason: str
    deployment_id: str = ""
    has_last: bool = False

    def words(self) -> str:
        """Return the message for operators."""
        instead = "; what was last read of it is used" if self.has_last else ""
        return f"cannot read {self.table} {self.name}: {self.reason}{instead}; repair its row"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole fleet at one generation.

    `acting_for_s` is how long this scheduler has acted: a new one has not yet been in contact with
    every node. Without `is_demand_known`, routers may not have reported their demand since no
    scheduler acted; without `is_forecast_known`, no forecast was made yet in this term. No replica
    ends then for lack of demand.
    """

    cluster_id: ClusterId
    generation: Generation
    acting_for_s: float
    pops: tuple[Pop, ...] = ()
    nodes: tuple[FleetNode, ...] = ()
    models: tuple[CatalogModel, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    deleted: tuple[DeploymentId, ...] = ()
    placements: tuple[Placement, ...] = ()
    demand: tuple[DemandRate, ...] = ()
    is_demand_known: bool = True
    is_forecast_known: bool = True
    distances: tuple[PopDistance, ...] = ()
    profiles: tuple[MeasuredProfile, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    prefetches: tuple[PrefetchTarget, ...] = ()
    given_up: tuple[StartFailures, ...] = ()
    unreadable: tuple[UnreadableRow, ...] = ()

    def measured(self) -> dict[tuple[str, str], ReplicaProfile]:
        """Return the measured rates by model and device class."""
        return {(row.model_id, row.device_class): row.profile for row in self.profiles}


class ReplicaStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start a replica. The id in `spec` is derived from the cluster state alone.

    `followers` are the parts on other nodes of a replica over several nodes.
    """

    node_id: NodeId
    spec: ReplicaSpec
    reason: str
    followers: "tuple[ReplicaStart, ...]" = ()

    @property
    def parts(self) -> "tuple[ReplicaStart, ...]":
        """The starts on each node, the leader's part first."""
        return (self, *self.followers)

    def with_spec(self, **fields: Any) -> "ReplicaStart":
        """Return this start with fields of its spec replaced."""
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, **fields))

    def map_parts(self, change: "Callable[[ReplicaStart], ReplicaStart]") -> "ReplicaStart":
        """Return this start with `change` applied to each of its parts."""
        followers = tuple(part.map_parts(change) for part in self.followers)
        return msgspec.structs.replace(change(self), followers=followers)

    def placement(self, state: ReplicaState) -> Placement:
        """Return the placement that this start becomes."""
        group = self.spec.group
        return Placement(
            replica_id=self.spec.replica_id,
            deployment_id=self.spec.deployment_id,
            version=self.spec.version,
            node_id=self.node_id,
            device_ids=self.spec.device_ids,
            memory_bytes=self.spec.planned_bytes,
            overcommit=self.spec.overcommit,
            extra_bytes=self.spec.extra_bytes,
            role=self.spec.role,
            tokens_in_flight_max=self.spec.engine.tokens_in_flight_max,
            state=state,
            reason=self.reason,
            leader_id=group.leader_id if group and group.place else ReplicaId(""),
            rank_port=group.port if group else 0,
            followers=tuple(follower.placement(state) for follower in self.followers),
        )


class ReplicaEnding(msgspec.Struct, frozen=True, kw_only=True):
    """Drain and end a replica on its node and on those of its followers."""

    replica_id: ReplicaId
    node_id: NodeId
    reason: str
    follower_ids: tuple[NodeId, ...] = ()
    drain_timeout_s: float = 30.0


class ReplicaRoleChange(msgspec.Struct, frozen=True, kw_only=True):
    """Give a running replica another role: its engine runs on, and the routers are notified."""

    replica_id: ReplicaId
    node_id: NodeId
    role: Role
    reason: str


class UnmetRequirement(msgspec.Struct, frozen=True, kw_only=True):
    """A requirement of a deployment that cannot be met now, and why, with the numbers."""

    deployment_id: DeploymentId
    reason: str


class PlacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Starts and ends of replicas, and changes of their roles, with reasons.

    `frozen` says why only failed replicas are replaced, or is "". `unreadable` says in words which
    rows could not be read that concern no deployment alone.
    """

    based_on: Generation
    starts: tuple[ReplicaStart, ...] = ()
    endings: tuple[ReplicaEnding, ...] = ()
    unmet: tuple[UnmetRequirement, ...] = ()
    frozen: str = ""
    role_changes: tuple[ReplicaRoleChange, ...] = ()
    unreadable: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        return not (self.starts or self.endings or self.role_changes)

    @property
    def node_ids(self) -> list[NodeId]:
        """The nodes whose assignment changes, in order."""
        changed = {part.node_id for start in self.starts for part in start.parts}
        for ending in self.endings:
            changed |= {ending.node_id, *ending.follower_ids}
        return sorted(changed)

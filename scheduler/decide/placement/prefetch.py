"""Decides which nodes fetch which weights before they run them, and how fast.

The planner runs with the demand that is forecast for some hours ahead. Where a replica of that plan
would wait for its weights, they become a prefetch target. Later runs count targets as fetched, so
the planner finds the same slots.

The forecast looks three hours ahead at most. In that time half of a far link (100 MB/s until it is
measured) carries 510 GB, half of a 400 MB/s link 2 TB. Larger models over slower links arrive after
the peak has begun; they remain a target for one more hour.

Rule 1: only one node of a PoP fetches an artifact from another PoP; the others copy it from there.
Rule 2: a fetch from another PoP takes at most half of the link, and should take at most half of the
time that is left, so that a link slower than assumed is noticed early.
Rule 3: only weights that fit beside all other targets are fetched; weights of running replicas are
not dropped.
Rule 4: a target remains until its time has passed or it makes no sense any more. So a forecast that
fluctuates neither stops a fetch halfway nor deletes fetched weights.
"""

from collections import defaultdict
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, ModelId, NodeId, PopId
from isochrone.wire.models.model import CatalogModel
from scheduler.decide.capacity.distances import Distances
from scheduler.decide.capacity.start_times import MB, StartTimes
from scheduler.decide.cluster import ClusterState, FleetNode, PrefetchTarget, ReplicaStart
from scheduler.decide.membership.liveness import LivenessLimits, LivenessView, judge_liveness
from scheduler.decide.placement.fleet.slots import DISK_MARGIN_BYTES
from scheduler.decide.placement.planner import PlanLimits
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.rollout.lifecycle import IN_PROGRESS

LINK_SHARE: Final = 0.5
"""The share of a PoP's links to other PoPs that prefetching may use."""

TIME_SHARE: Final = 0.5
"""The share of the time left within which weights should arrive."""

BYTES_PER_S_MIN: Final = 1.0 * MB
KEPT_FOR_S: Final = 3600.0
"""How long after its time a target still keeps its weights on the disk: a peak may be late."""

PER_NODE_MAX: Final = 8
"""Targets of one node."""

LIMITS: Final = PlanLimits(starts_max=1_000, thorough_effort=0)


class EndedPrefetch(msgspec.Struct, frozen=True, kw_only=True):
    """A prefetch target that is over, and why."""

    target: PrefetchTarget
    reason: str


class PrefetchDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Targets to add, targets whose weights have arrived, and targets that are over."""

    new: tuple[PrefetchTarget, ...] = ()
    arrived: tuple[PrefetchTarget, ...] = ()
    ended: tuple[EndedPrefetch, ...] = ()


def plan_prefetch(
    cluster: ClusterState, due_s: float, liveness_limits: LivenessLimits | None = None
) -> PrefetchDecision:
    """Return what to prefetch for a cluster state whose demand is the forecast `due_s` ahead."""
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, liveness_limits)
    if view.frozen:
        return PrefetchDecision()
    targets = _Targets(cluster, view)
    ended = []
    for target in sorted(cluster.prefetches, key=lambda t: (t.due_s, t.node_id, t.model_id)):
        reason = targets.why_over(target)
        if reason:
            ended.append(EndedPrefetch(target=target, reason=reason))
        else:
            targets.add(target)
    arrived = tuple(t for t in targets.kept if targets.has_arrived(t) and not t.is_held)
    new: list[PrefetchTarget] = []
    if due_s > 0:
        plan = plan_fleet(targets.cluster_when_fetched(), liveness_limits, LIMITS)
        for part in (part for start in plan.starts for part in start.parts):
            added = targets.target_for(part, due_s)
            if added is not None:
                targets.add(added)
                new.append(added)
    return PrefetchDecision(new=tuple(new), arrived=arrived, ended=tuple(ended))


class _Targets:
    """The targets kept so far, the disk space they take and the links they use."""

    def __init__(self, cluster: ClusterState, view: LivenessView) -> None:
        self.kept: list[PrefetchTarget] = []
        self._cluster = cluster
        self._view = view
        self._nodes = {node.node_id: node for node in cluster.nodes}
        self._models = {model.model_id: model for model in cluster.models}
        models_served = _models_served(cluster)
        self._models_served = set(models_served.values())
        self._placed = {
            (node_id, models_served[placement.deployment_id, placement.version])
            for placement in cluster.placements
            for node_id in placement.node_ids
            if not placement.is_ending
            and (placement.deployment_id, placement.version) in models_served
        }
        self._start_times = StartTimes(cluster.nodes, Distances(cluster.pops, cluster.distances))
        self._pending_bytes: dict[NodeId, int] = defaultdict(int)
        self._link_bytes_per_s: dict[PopId, float] = defaultdict(float)

    def has_arrived(self, target: PrefetchTarget) -> bool:
        """Say whether the weights are on the node's disk."""
        digest = self._models[target.model_id].artifact.digest
        return digest in self._nodes[target.node_id].artifacts

    def why_over(self, target: PrefetchTarget) -> str:
        """Return why a target makes no sense any more; "" if it does."""
        node, model = self._nodes.get(target.node_id), self._models.get(target.model_id)
        if node is None or model is None:
            return "the node or the model is gone"
        if node.draining or not self._view.is_in_fleet(node):
            return "the node is draining, revoked or lost"
        if target.model_id not in self._models_served:
            return "no deployment serves the model any more"
        if (target.node_id, target.model_id) in self._placed:
            return "a replica was placed there"
        has_arrived = self.has_arrived(target)
        if target.due_s < -KEPT_FOR_S:
            return "its time has passed" if has_arrived else "the weights did not arrive in time"
        if not has_arrived and not self._fits(node, model):
            return f"the disk has {node.disk_free_bytes} bytes left, too few for it"
        return ""

    def add(self, target: PrefetchTarget) -> None:
        """Keep a target, and count its disk space and its share of the link."""
        self.kept.append(target)
        if not self.has_arrived(target):
            size = self._models[target.model_id].artifact.size_bytes
            self._pending_bytes[target.node_id] += size
            self._link_bytes_per_s[self._nodes[target.node_id].pop] += target.bytes_per_s

    def cluster_when_fetched(self) -> ClusterState:
        """Return the cluster state as it will be when all targets have arrived."""
        coming: dict[NodeId, list[str]] = defaultdict(list)
        for target in self.kept:
            if not self.has_arrived(target):
                coming[target.node_id].append(self._models[target.model_id].artifact.digest)
        nodes = tuple(
            msgspec.structs.replace(node, artifacts=(*node.artifacts, *coming[node.node_id]))
            if node.node_id in coming
            else node
            for node in self._cluster.nodes
        )
        return msgspec.structs.replace(self._cluster, nodes=nodes)

    def target_for(self, start: ReplicaStart, due_s: float) -> PrefetchTarget | None:
        """Return the target for a start that is foreseen, or None if it needs or gets none."""
        node, model = self._nodes[start.node_id], self._models[start.spec.model_id]
        on_node = [target for target in self.kept if target.node_id == node.node_id]
        if (
            model.artifact.digest in node.artifacts
            or any(target.model_id == model.model_id for target in on_node)
            or len(on_node) >= PER_NODE_MAX
            or not self._fits(node, model)
        ):
            return None
        bytes_per_s = 0.0
        if not self._start_times.is_held_in(node.pop, model.artifact.digest):
            bytes_per_s = self._wan_bytes_per_s(node, model, due_s)
            if bytes_per_s <= 0:
                return None
        return PrefetchTarget(
            node_id=node.node_id,
            model_id=model.model_id,
            deployment_id=start.spec.deployment_id,
            due_s=due_s,
            bytes_per_s=bytes_per_s,
            reason=f"forecast for {due_s / 3600:.1f} h from now: {start.reason}",
        )

    def _wan_bytes_per_s(self, node: FleetNode, model: CatalogModel, due_s: float) -> float:
        """Return how fast weights may be fetched to a PoP that has none of them; 0 is not now."""
        for target in self.kept:
            if target.model_id == model.model_id and self._nodes[target.node_id].pop == node.pop:
                return 0.0
        size = model.artifact.size_bytes
        link = size / max(1e-6, self._start_times.fetch_s(node, model))
        left = LINK_SHARE * link - self._link_bytes_per_s[node.pop]
        # A fetch that cannot finish in time starts only if nothing else uses the link.
        if left < size / due_s and self._link_bytes_per_s[node.pop] > 0:
            return 0.0
        return min(left, max(size / (TIME_SHARE * due_s), BYTES_PER_S_MIN))

    def _fits(self, node: FleetNode, model: CatalogModel) -> bool:
        needed = self._pending_bytes[node.node_id] + model.artifact.size_bytes + DISK_MARGIN_BYTES
        return not node.disk_free_bytes or node.disk_free_bytes >= needed


def _models_served(cluster: ClusterState) -> dict[tuple[DeploymentId, int], ModelId]:
    """Return the model of each version that is served, or is about to be."""
    current = {(d.deployment_id, d.version): d.model_id for d in cluster.deployments}
    live = {deployment.deployment_id for deployment in cluster.deployments}
    coming = {
        (rollout.deployment_id, rollout.to_version): rollout.spec.model_id
        for rollout in cluster.rollouts
        if rollout.state in IN_PROGRESS and rollout.deployment_id in live
    }
    return current | coming

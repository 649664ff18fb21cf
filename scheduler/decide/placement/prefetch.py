"""Which node should have which weights before it is asked to run them, and how fast they may come.

The planner is asked where it would seat replicas, were demand what is foretold some hours ahead:
where such a seat would wait for its weights, they are wished there beforehand. What is wished
counts as held when the planner is asked again, so the same seats are found.

Three hours are looked ahead, the farthest that is forecast. In that time half of a far link (100
MB/s until it is measured) brings 510 GB, half of one of 400 MB/s 2 TB: what is larger over a slower
link comes after the peak has begun, and is wished for an hour longer.

Rule 1: one node of a PoP fetches from afar at a time; the next ones have theirs from that one.
Rule 2: what comes from afar leaves users the larger part of the link, and needs half of the time
there is, so that a link slower than it was thought is found out early.
Rule 3: only what fits beside everything that is wished already; nothing that runs is dropped.
Rule 4: a wish stands until its time has passed or it makes no sense any more: a forecast that
wavers neither stops a fetch half-way nor gives up what has come.
"""

from collections import defaultdict
from typing import Final

import msgspec

from isochrone.wire.ids import DeploymentId, ModelId, NodeId, PopId
from isochrone.wire.model import Model
from scheduler.decide.capacity.start_times import MB, StartTimes
from scheduler.decide.cluster import ClusterState, FleetNode, PrefetchTarget, ReplicaStart
from scheduler.decide.membership.liveness import LivenessLimits, LivenessView, judge_liveness
from scheduler.decide.placement.fleet.slots import DISK_MARGIN_BYTES
from scheduler.decide.placement.planner import PlanLimits
from scheduler.decide.placement.rollout_split import plan_fleet
from scheduler.decide.placement.score import Distances
from scheduler.decide.rollout.lifecycle import IN_PROGRESS

LINK_SHARE: Final = 0.5
"""The part of a PoP's way to others that prefetching may take."""

TIME_SHARE: Final = 0.5
"""The part of the time left in which weights should have come."""

BYTES_PER_S_MIN: Final = 1.0 * MB
KEPT_FOR_S: Final = 3600.0
"""How long after its time a wish still keeps its place on the disk: a peak may be late."""

PER_NODE_MAX: Final = 8
LIMITS: Final = PlanLimits(starts_max=1_000)


class EndedPrefetch(msgspec.Struct, frozen=True, kw_only=True):
    """A wish that is over, and why."""

    wish: PrefetchTarget
    reason: str


class PrefetchDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to wish besides what is wished already, what has come, and what is over."""

    new: tuple[PrefetchTarget, ...] = ()
    arrived: tuple[PrefetchTarget, ...] = ()
    ended: tuple[EndedPrefetch, ...] = ()


def plan_prefetch(
    cluster: ClusterState, due_s: float, liveness_limits: LivenessLimits | None = None
) -> PrefetchDecision:
    """Return what follows from a picture whose demand is what is foretold `due_s` ahead."""
    view = judge_liveness(cluster.nodes, cluster.acting_for_s, liveness_limits)
    if view.frozen:
        return PrefetchDecision()
    stock = _Stock(cluster, view)
    ended = []
    for wish in sorted(cluster.prefetches, key=lambda one: (one.due_s, one.node_id, one.model_id)):
        over = stock.is_over(wish)
        if over:
            ended.append(EndedPrefetch(wish=wish, reason=over))
        else:
            stock.keep(wish)
    arrived = tuple(wish for wish in stock.wishes if stock.is_held(wish) and not wish.is_held)
    new: list[PrefetchTarget] = []
    if due_s > 0:
        decided = plan_fleet(stock.picture(), liveness_limits, LIMITS)
        for part in (part for start in decided.starts for part in start.parts):
            wished = stock.wish(part, due_s)
            if wished is not None:
                stock.keep(wished)
                new.append(wished)
    return PrefetchDecision(new=tuple(new), arrived=arrived, ended=tuple(ended))


class _Stock:
    """What lies on every node's disk, and what is on its way there."""

    def __init__(self, cluster: ClusterState, view: LivenessView) -> None:
        self.wishes: list[PrefetchTarget] = []
        self._cluster = cluster
        self._view = view
        self._nodes = {node.node_id: node for node in cluster.nodes}
        self._models = {model.model_id: model for model in cluster.models}
        served = _served(cluster)
        self._served = set(served.values())
        self._seated = {
            (node_id, served[placement.deployment_id, placement.version])
            for placement in cluster.placements
            for node_id in placement.node_ids
            if not placement.is_ending and (placement.deployment_id, placement.version) in served
        }
        far = Distances(cluster.pops, cluster.distances)
        self._starts = StartTimes(cluster.nodes, (), {}, far)
        self._pending_bytes: dict[NodeId, int] = defaultdict(int)
        self._link_taken: dict[PopId, float] = defaultdict(float)

    def is_held(self, wish: PrefetchTarget) -> bool:
        """Say whether the weights have come."""
        digest = self._models[wish.model_id].artifact.digest
        return digest in self._nodes[wish.node_id].artifacts

    def is_over(self, wish: PrefetchTarget) -> str:
        """Say why a wish makes no sense any more; "" if it does."""
        node, model = self._nodes.get(wish.node_id), self._models.get(wish.model_id)
        if node is None or model is None:
            return "the node or the model is gone"
        if node.draining or not self._view.counts(node):
            return "the node is draining, revoked or lost"
        if wish.model_id not in self._served:
            return "no deployment serves the model any more"
        if (wish.node_id, wish.model_id) in self._seated:
            return "a replica has its seat there"
        is_held = self.is_held(wish)
        if wish.due_s < -KEPT_FOR_S:
            return "its time has passed" if is_held else "the weights did not come in time"
        if not is_held and not self._fits(node, model):
            return f"the disk has {node.disk_free_bytes} bytes left, too few for it"
        return ""

    def keep(self, wish: PrefetchTarget) -> None:
        """Count a wish among those that stand."""
        self.wishes.append(wish)
        if not self.is_held(wish):
            size = self._models[wish.model_id].artifact.size_bytes
            self._pending_bytes[wish.node_id] += size
            self._link_taken[self._nodes[wish.node_id].pop] += wish.bytes_per_s

    def picture(self) -> ClusterState:
        """Return the picture as it will be when everything wished has come."""
        coming: dict[NodeId, list[str]] = defaultdict(list)
        for wish in self.wishes:
            if not self.is_held(wish):
                coming[wish.node_id].append(self._models[wish.model_id].artifact.digest)
        nodes = tuple(
            msgspec.structs.replace(node, artifacts=(*node.artifacts, *coming[node.node_id]))
            if node.node_id in coming
            else node
            for node in self._cluster.nodes
        )
        return msgspec.structs.replace(self._cluster, nodes=nodes)

    def wish(self, start: ReplicaStart, due_s: float) -> PrefetchTarget | None:
        """Return the wish that a start foreseen gives rise to; None where there is none to make."""
        node, model = self._nodes[start.node_id], self._models[start.spec.model_id]
        mine = [one for one in self.wishes if one.node_id == node.node_id]
        if (
            model.artifact.digest in node.artifacts
            or any(one.model_id == model.model_id for one in mine)
            or len(mine) >= PER_NODE_MAX
            or not self._fits(node, model)
        ):
            return None
        rate = 0.0
        if not self._starts.is_held_in(node.pop, model.artifact.digest):
            rate = self._rate_from_afar(node, model, due_s)
            if rate <= 0:
                return None
        return PrefetchTarget(
            node_id=node.node_id,
            model_id=model.model_id,
            deployment_id=start.spec.deployment_id,
            due_s=due_s,
            bytes_per_s=rate,
            reason=f"foretold for {due_s / 3600:.1f} h from now: {start.reason}",
        )

    def _rate_from_afar(self, node: FleetNode, model: Model, due_s: float) -> float:
        """Return how fast weights may come to a PoP that has none of them; 0 is not now."""
        for wish in self.wishes:
            if wish.model_id == model.model_id and self._nodes[wish.node_id].pop == node.pop:
                return 0.0
        size = model.artifact.size_bytes
        link = size / max(1e-6, self._starts.fetch_s(node, model))
        left = LINK_SHARE * link - self._link_taken[node.pop]
        # What cannot come in time is begun only where nothing else has need of the link.
        if left < size / due_s and self._link_taken[node.pop] > 0:
            return 0.0
        return min(left, max(size / (TIME_SHARE * due_s), BYTES_PER_S_MIN))

    def _fits(self, node: FleetNode, model: Model) -> bool:
        needed = self._pending_bytes[node.node_id] + model.artifact.size_bytes + DISK_MARGIN_BYTES
        return not node.disk_free_bytes or node.disk_free_bytes >= needed


def _served(cluster: ClusterState) -> dict[tuple[DeploymentId, int], ModelId]:
    """Return the model of each version that is served, or is about to be."""
    versions = {(one.deployment_id, one.version): one.model_id for one in cluster.deployments}
    live = {deployment.deployment_id for deployment in cluster.deployments}
    coming = {
        (rollout.deployment_id, rollout.to_version): rollout.spec.model_id
        for rollout in cluster.rollouts
        if rollout.state in IN_PROGRESS and rollout.deployment_id in live
    }
    return versions | coming

"""Start backoff: how long a version that failed repeatedly waits before it is started again.

Rule 1: while one replica of the version is warm, the nodes are at fault, and others are tried.
Rule 2: the wait is below a minute, so that a repair outside (a file at its source, a driver) takes
effect soon. A change of engine or model is a new version and is tried at once.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from isochrone.wire.ids import DeploymentId, NodeId
from isochrone.wire.peers.report import ReplicaState
from scheduler.decide.cluster import ClusterState, Placement, StartFailures

BACKOFF_FIRST_S: Final = 2.0
BACKOFF_MAX_S: Final = 50.0


def start_backoff(failures: StartFailures, placements: Iterable[Placement]) -> str:
    """Return why a version is not started now; "" if it may be started."""
    wait_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures.times - 1, 10))
    version = failures.deployment_id, failures.version
    if failures.ago_s >= wait_s or any(
        (placement.deployment_id, placement.version) == version
        and placement.state is ReplicaState.WARM
        for placement in placements
    ):
        return ""
    return (
        f"version {failures.version} failed to start {failures.times} times recently, last on "
        f"{failures.node_ids[0]} {failures.ago_s:.0f} s ago: {failures.reason}; it is tried again "
        f"{wait_s:.0f} s after that, another version at once"
    )


class StartHistory:
    """Recent failed starts by deployment and node, and the deployments in backoff."""

    def __init__(self, cluster: ClusterState) -> None:
        self._failures: Counter[tuple[DeploymentId, NodeId]] = Counter()
        self._backoff: dict[DeploymentId, str] = {}
        for placement in cluster.placements:
            for part in placement.parts:
                if part.state is ReplicaState.FAILED:
                    self._failures[part.deployment_id, part.node_id] += 1
        versions = {
            deployment.deployment_id: deployment.version for deployment in cluster.deployments
        }
        for failures in cluster.given_up:
            name = failures.deployment_id
            if failures.version == versions.get(name):
                self._failures.update((name, node_id) for node_id in failures.node_ids)
                self._backoff[name] = start_backoff(failures, cluster.placements)

    def failures_on(self, deployment_id: DeploymentId, node_id: NodeId) -> int:
        """Return how many replicas of a deployment failed on a node recently."""
        return self._failures.get((deployment_id, node_id), 0)

    def has_failed_recently(self, deployment_id: DeploymentId) -> bool:
        """Say whether nodes recently gave up starting replicas of the current version."""
        return deployment_id in self._backoff

    def backoff_of(self, deployment_id: DeploymentId) -> str:
        """Return why no replica of a deployment is started now; "" if one may be."""
        return self._backoff.get(deployment_id, "")

"""Deployments whose rows cannot be read: their replicas stay as they are, and the plan says why.

All other deployments are planned as usual. A row whose last readable value is known is planned by
that value.
"""

import msgspec

from isochrone.wire.ids import DeploymentId
from scheduler.decide.cluster import ClusterState, UnmetRequirement

MODEL_TABLE = "model"


def without_unreadable(cluster: ClusterState) -> ClusterState:
    """Return the cluster state without the deployments that cannot be planned now.

    The planner neither starts nor ends a replica of a deployment that it does not know, and takes
    the memory of those that run into account.
    """
    unknown = {row.deployment_id for row in cluster.unreadable if not row.has_last}
    models = {
        row.name for row in cluster.unreadable if row.table == MODEL_TABLE and not row.has_last
    }
    if not unknown and not models:
        return cluster
    planned = tuple(
        deployment
        for deployment in cluster.deployments
        if deployment.deployment_id not in unknown and deployment.model_id not in models
    )
    return msgspec.structs.replace(cluster, deployments=planned)


def unreadable_requirements(cluster: ClusterState) -> tuple[UnmetRequirement, ...]:
    """Return for each deployment which of the rows that it needs cannot be read, and why."""
    found = []
    for row in cluster.unreadable:
        concerned = [row.deployment_id] if row.deployment_id else []
        if row.table == MODEL_TABLE:
            concerned = [d.deployment_id for d in cluster.deployments if d.model_id == row.name]
        found += [
            UnmetRequirement(deployment_id=DeploymentId(deployment_id), reason=row.words())
            for deployment_id in concerned
        ]
    return tuple(found)


def other_unreadable(cluster: ClusterState) -> tuple[str, ...]:
    """Return in words the rows that cannot be read and belong to no deployment."""
    return tuple(row.words() for row in cluster.unreadable if not row.deployment_id)

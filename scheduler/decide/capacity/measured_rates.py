"""The rates of each model on each class of devices, as nodes measured them.

Rule 1: a node counts once, however many replicas it runs, and the lower median of the nodes counts.
The planner divides demand by these rates. With the last report alone, one node that is wrong or
lies made it end four of five busy replicas, whether its rates were too high or too low.
Rule 2: where no node measures now, what the store has kept of the last report counts.
"""

from collections import defaultdict
from collections.abc import Iterable

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.report import ReplicaProfile
from scheduler.decide.capacity.replica_capacity import Profiles, is_measured
from scheduler.decide.cluster import ClusterState


def measured_rates(cluster: ClusterState) -> Profiles:
    """Return the measured rates by model and device class."""
    rates = cluster.measured()
    models = {(d.deployment_id, d.version): d.model_id for d in cluster.deployments}
    classes = {
        (node.node_id, device.device_id): device.device_class
        for node in cluster.nodes
        for device in node.devices
    }
    by_class: defaultdict[tuple[str, str], dict[NodeId, ReplicaProfile]] = defaultdict(dict)
    for placement in cluster.placements:
        model_id = models.get((placement.deployment_id, placement.version))
        if model_id is None or not placement.device_ids or not is_measured(placement.profile):
            continue
        device_class = classes.get((placement.node_id, placement.device_ids[0]))
        if device_class is not None:
            by_node = by_class[model_id, device_class]
            by_node.setdefault(placement.node_id, placement.profile)
    for key, by_node in by_class.items():
        rates[key] = _lower_median(by_node.values())
    return rates


def _lower_median(profiles: Iterable[ReplicaProfile]) -> ReplicaProfile:
    """Return the lower median of each measurement; one that is 0 was not made."""
    measured = list(profiles)
    fields = {}
    for name in ReplicaProfile.__struct_fields__:
        values = sorted(value for profile in measured if (value := getattr(profile, name)))
        fields[name] = values[(len(values) - 1) // 2] if values else 0
    return ReplicaProfile(**fields)

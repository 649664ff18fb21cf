"""The placement seal: a node's proof for a replica that the store does not know.

A scheduler seals each placement that it assigns, and the node reports the seal with the replica.
After the database is restored from a backup, the seal distinguishes replicas that were really
placed from invented ones. A compromised node could otherwise claim replicas to attract requests of
other tenants, or to make other nodes run deployments of its choice.
"""

import msgspec

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.assignment import ReplicaSpec


def sealed_fields(node_id: NodeId, spec: ReplicaSpec) -> bytes:
    """Return the bytes that are sealed. Fields are named one by one, so that fields of a later
    release do not invalidate seals."""
    return msgspec.json.encode(
        (
            *("isochrone-seat-1", node_id, spec.replica_id, spec.deployment_id, spec.version),
            *(spec.name, spec.model_id, spec.artifact.source, spec.artifact.digest),
            *(spec.engine.driver, sorted(spec.engine.options.items()), spec.engine.devices),
            *(spec.context_tokens, spec.device_ids, spec.memory_bytes),
        )
    )

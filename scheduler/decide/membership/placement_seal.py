"""What a node must prove of a replica that the store does not know: that it was seated there.

A scheduler seals each seat that it gives, and the node tells the seal back with the replica. After
a database was restored from a backup that is how what ran is known from what is invented: by a node
that was taken over, to be sent others' requests, or to have others run what it likes.
"""

import msgspec

from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.ids import NodeId


def sealed_fields(node_id: NodeId, spec: ReplicaSpec) -> bytes:
    """Return what is sealed, named one by one: a later release's fields must not break it."""
    return msgspec.json.encode(
        (
            *("isochrone-seat-1", node_id, spec.replica_id, spec.deployment_id, spec.version),
            *(spec.name, spec.model_id, spec.artifact.source, spec.artifact.digest),
            *(spec.engine.driver, sorted(spec.engine.options.items()), spec.engine.devices),
            *(spec.context_tokens, spec.device_ids, spec.memory_bytes),
        )
    )

"""Decides which node of a PoP runs the master of its store of KV.

Any node with a replica that shares KV through the store can run it. The node whose replica was
placed first is chosen. So the master stays while other replicas come and go, without a record of
where it is, and a node that comes back from a loss, with new replicas, does not take it back.
"""

from collections.abc import Iterable
from typing import NamedTuple

from isochrone.wire.ids import NodeId, PopId, ReplicaId
from isochrone.wire.peers.assignment import StoreMasterPlace


class StoreMember(NamedTuple):
    """A replica that shares KV through its PoP's store, and its node.

    `is_away` is true of a node that is lost, drained or revoked, and of a replica that has failed:
    the node may lack what the master needs, too. `placed_at` is Unix time.
    """

    replica_id: ReplicaId
    pop: PopId
    node_id: NodeId
    address: str
    placed_at: float
    is_away: bool = False


def store_masters(members: Iterable[StoreMember]) -> dict[PopId, StoreMasterPlace]:
    """Return the place of the master in each PoP that needs one and has a node for it."""
    first: dict[PopId, StoreMember] = {}
    for member in members:
        if member.is_away:
            continue
        known = first.get(member.pop)
        if known is None or _order(member) < _order(known):
            first[member.pop] = member
    return {
        pop: StoreMasterPlace(node_id=member.node_id, address=member.address)
        for pop, member in first.items()
    }


def _order(member: StoreMember) -> tuple[float, str]:
    return (member.placed_at, member.replica_id)

"""The request and the answer by which one node reports the loads of others of its PoP to a router.

`POST /loads` on a node, with a `LoadsQuery`; answered by `PopLoads`. A node of an older release
answers 404, and the router pings its nodes one by one.
"""

from typing import Annotated, Final

import msgspec

from isochrone.wire.ids import NodeId

GROUP_NODES_MAX: Final = 64
"""The most nodes that one node answers for."""

QUERY_BYTES_MAX: Final = 32 * 1024
ANSWER_BYTES_MAX: Final = 1024 * 1024
"""64 nodes with 64 replicas each."""


class ProbedNode(msgspec.Struct, frozen=True):
    """A node and its address within the PoP. The node must prove to be `node_id`."""

    node_id: NodeId
    address: str


class LoadsQuery(msgspec.Struct, frozen=True):
    """The nodes whose loads a router wants to know."""

    nodes: Annotated[tuple[ProbedNode, ...], msgspec.Meta(max_length=GROUP_NODES_MAX)]


class NodeLoads(msgspec.Struct, frozen=True):
    """A node's answer to a ping, `age_ms` ago, after `rtt_ms` within the PoP.

    `loads` is the header of that answer (`headers.LOADS`), for no router in particular: all
    requests count. A node that did not answer is left out.
    """

    node_id: NodeId
    age_ms: float
    rtt_ms: float
    loads: str


class PopLoads(msgspec.Struct, frozen=True):
    """The loads that a node knows of the nodes in the query."""

    nodes: tuple[NodeLoads, ...] = ()

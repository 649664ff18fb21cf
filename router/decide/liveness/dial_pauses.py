"""Decides when nodes are dialled again after this machine had no port or descriptor for it.

A failed dial lets the next waiting request try. Without pauses they would dial without end.

Rule 1: after such a failure other requests do not dial the node for DIAL_AGAIN_S. Then one does,
and the others wait again until its connection is open.
Rule 2: a lack of ports to one address concerns that node, any other lack every node.
Rule 3: an open connection ends the pause of its node, and that of every node.
"""

from typing import Final

from isochrone.wire.ids import NodeId

DIAL_AGAIN_S: Final = 0.2
"""Less than LOOK_AGAIN_S of the admission queue: whenever its head looks again, it may dial."""

FORGET_S: Final = 5.0
"""A pause that ended this long ago is dropped: no request wants the node any more."""

EVERY_NODE: Final = NodeId("")
"""Stands for all nodes in place of one."""


class DialPauses:
    """The nodes for which a port or descriptor was lacking, each with the end of its pause."""

    def __init__(self) -> None:
        self._until_s: dict[NodeId, float] = {}

    def __bool__(self) -> bool:
        """Return whether a lack is not known to be over."""
        return bool(self._until_s)

    def record_lack(self, node_id: NodeId, now_s: float) -> None:
        """Note that a node, or EVERY_NODE, cannot be dialled now."""
        self._until_s[node_id] = now_s + DIAL_AGAIN_S

    def record_dial(self, node_id: NodeId, now_s: float) -> None:
        """Note that a request dials a node: until that ends, others wait."""
        for lacking in (node_id, EVERY_NODE):
            if lacking in self._until_s:
                self._until_s[lacking] = now_s + DIAL_AGAIN_S

    def record_open(self, node_id: NodeId) -> bool:
        """Note that a connection to a node opened; return whether that ends a lack."""
        ended = [self._until_s.pop(lacking, None) for lacking in (node_id, EVERY_NODE)]
        return ended != [None, None]

    def is_paused(self, node_id: NodeId, now_s: float) -> bool:
        """Return whether a node must not be dialled now."""
        ends = (self._until_s.get(lacking, now_s) for lacking in (node_id, EVERY_NODE))
        return max(ends) > now_s

    def drop_old(self, now_s: float) -> None:
        """Drop pauses that ended long ago."""
        for node_id, until_s in list(self._until_s.items()):
            if now_s - until_s > FORGET_S:
                del self._until_s[node_id]

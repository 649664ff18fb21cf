"""The route table that routers were sent, and the nodes whose routes may have changed since."""

from collections.abc import Callable

from isochrone.wire import codec
from isochrone.wire.ids import NodeId
from isochrone.wire.routes import RouteTable


class PublishedRoutes:
    """The current route table and what is waiting to be published."""

    def __init__(self, nudge_publish: Callable[[], None]) -> None:
        """Call `nudge_publish` whenever something may have changed."""
        self.table: RouteTable | None = None
        self._frame = b""
        self._nudge_publish = nudge_publish
        self._changed: set[NodeId] | None = None

    def replace(self, table: RouteTable | None) -> None:
        """Make `table` the one that routers get; None at the beginning of a term."""
        self.table = table
        self._frame = b""

    def frame(self) -> bytes:
        """Return the whole table as a frame, encoded once; empty if there is no table."""
        if not self._frame and self.table is not None:
            self._frame = codec.encode(self.table)
        return self._frame

    def mark_changed(self, node_id: NodeId | None = None) -> None:
        """Publish again soon: a node's routes may have changed, or (None) any part of the table."""
        if node_id is None:
            self._changed = None
        else:
            self.postpone({node_id})
        self._nudge_publish()

    def postpone(self, node_ids: set[NodeId]) -> None:
        """Leave these nodes' routes to a later turn, without a nudge."""
        if self._changed is not None:
            self._changed |= node_ids

    def take_changed(self) -> set[NodeId] | None:
        """Return the nodes that have changed since the last call; None for the whole table."""
        changed, self._changed = self._changed, set()
        return changed

    def restore_all(self) -> None:
        """Consider the whole table changed: a turn failed and may have lost some changes."""
        self._changed = None

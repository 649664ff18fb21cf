"""The route table that routers were sent, and the nodes whose routes may have changed since."""

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from isochrone.wire import codec
from isochrone.wire.client_keys.key_sums import KeptBuckets, kept_buckets
from isochrone.wire.ids import KeyId, NodeId
from isochrone.wire.peers.control import KEYS_FIRST, TABLE_PARTS
from isochrone.wire.peers.routes import KeyTable, RouteTable
from isochrone.wire.peers.table_parts import TABLE_ENTRIES_MAX, split_table
from scheduler import metrics
from scheduler.decide.membership import RouteFollowing
from scheduler.state.peers.peer_connection import PeerConnection

log = logging.getLogger(__name__)

KEY_BYTES_MIN: Final = 150
"""A key takes at least this many bytes of a frame. A table that is too large is not encoded."""


DELTAS_AFTER_PARTS_MAX: Final = 256
"""How many later deltas a router that is sent a whole table may be sent after it. With more the
table is encoded again: each version of a million keys takes a second to encode, and 264 MiB."""

DELTA_BYTES_AFTER_PARTS_MAX: Final = 16 * 1024 * 1024

PARTIAL_TABLES_MAX: Final = 8
"""How many tables without the keys that routers have are kept for the next router. Routers that
lost the same scheduler have the same keys."""


class TableParts:
    """The parts of one route table, each encoded once, when the first router is sent it."""

    def __init__(self, table: RouteTable, kept: KeptBuckets | None = None) -> None:
        """Leave out the keys that routers keep."""
        self.deltas: list[bytes] = []
        """The changes that were published since."""
        self._source = split_table(table, kept=kept)
        self._frames: list[bytes] = []

    def add_delta(self, delta: bytes) -> bool:
        """Note a published change; return False if the table should be encoded again."""
        self.deltas.append(delta)
        is_small = sum(map(len, self.deltas)) <= DELTA_BYTES_AFTER_PARTS_MAX
        return bool(delta) and is_small and len(self.deltas) <= DELTAS_AFTER_PARTS_MAX

    def frame(self, index: int) -> bytes | None:
        """Return a part, None after the last. Callers read parts in order."""
        if index == len(self._frames):
            frame = next(self._source, None)
            if frame is None:
                return None
            self._frames.append(frame)
        return self._frames[index]


class PublishedRoutes:
    """The current route table and what is waiting to be published."""

    def __init__(self, nudge_publish: Callable[[], None]) -> None:
        """Call `nudge_publish` whenever something may have changed."""
        self.table: RouteTable | None = None
        self.keys = KeyTable()
        """The keys of the table, also while a new term has none yet."""
        self.following = RouteFollowing()
        self._whole: TableParts | None = None
        self._partial: dict[bytes, TableParts] = {}
        self._frame = b""
        self._nudge_publish = nudge_publish
        self._changed: set[NodeId] | None = None
        self._changed_keys: set[KeyId] = set()

    def replace(self, table: RouteTable | None, delta: bytes = b"") -> None:
        """Make `table` the one that routers get; None at the beginning of a term.

        `delta` makes it of the table before, empty if there is none that routers can be sent.
        """
        if table is None:
            self.following.clear()
            # All keys are read for the first table. Those changed before would follow it in deltas.
            self._changed_keys.clear()
        else:
            self.keys = table.keys
        self.table = table
        if self._whole is not None and not self._whole.add_delta(delta):
            self._whole = None
        self._partial.clear()
        self._frame = b""

    def send_table(self, router: PeerConnection) -> None:
        """Queue the whole table, in parts if the router can read them, without keys that it has."""
        if self.table is None:
            return
        key_sums = router.keys_held
        if self.table.keys_only:
            # Without a table of its own a router has no use for it. The next table needs the same
            # sums again: the router keeps the keys that they are of until it reports others.
            if KEYS_FIRST not in router.capabilities or not router.generation:
                return
        else:
            router.keys_held = b""
        try:
            if TABLE_PARTS not in router.capabilities:
                router.enqueue(self.frame())
            else:
                parts = self._parts_for(self.table, key_sums)
                router.enqueue(parts)
                for delta in parts.deltas:
                    router.enqueue(delta)
        except codec.FrameTooLarge as error:
            self._note_unsendable(router, str(error))
            return
        self.following.record_sendable(router.name)
        router.generation = self.table.generation

    def _parts_for(self, table: RouteTable, key_sums: bytes) -> TableParts:
        entries = len(table.keys) + len(table.routes)
        if entries > TABLE_ENTRIES_MAX:
            raise codec.FrameTooLarge(
                f"cannot send the route table: {entries} keys and replicas, the limit is "
                f"{TABLE_ENTRIES_MAX}; revoke keys that are not used"
            )
        kept = kept_buckets(key_sums, table.keys.sums) if key_sums and table.keys else None
        if kept is None:
            metrics.TABLES_SENT.labels("all").inc()
            if self._whole is None:
                self._whole = TableParts(table)
            return self._whole
        metrics.TABLES_SENT.labels("missing").inc()
        if kept.encode() not in self._partial:
            if len(self._partial) >= PARTIAL_TABLES_MAX:
                self._partial.clear()
            self._partial[kept.encode()] = TableParts(table, kept)
        return self._partial[kept.encode()]

    def frame(self) -> bytes:
        """Return the whole table as one frame, encoded once, for routers that cannot read parts.

        The frame is empty if there is no table. Raises FrameTooLarge.
        """
        if not self._frame and self.table is not None:
            size, frame = KEY_BYTES_MIN * len(self.table.keys), b""
            if size <= codec.FRAME_BYTES_MAX:
                frame = codec.encode(self.table)
                size = len(frame)
            if size > codec.FRAME_BYTES_MAX:
                raise codec.FrameTooLarge(
                    f"cannot send the route table: at least {size} bytes, the limit of this "
                    f"router's version is {codec.FRAME_BYTES_MAX}; upgrade the router"
                )
            self._frame = frame
        return self._frame

    def mark_changed(self, node_id: NodeId | None = None) -> None:
        """Publish again soon: a node's routes may have changed, or (None) any part of the table."""
        if node_id is None:
            self._changed = None
        else:
            self.postpone({node_id})
        self._nudge_publish()

    def mark_key_changed(self, key_id: KeyId) -> None:
        """Publish again soon: a key was created, changed or revoked."""
        self._changed_keys.add(key_id)
        self._nudge_publish()

    def postpone(self, node_ids: set[NodeId]) -> None:
        """Leave these nodes' routes to a later turn, without a nudge."""
        if self._changed is not None:
            self._changed |= node_ids

    def take_changed(self) -> set[NodeId] | None:
        """Return the nodes that have changed since the last call; None for the whole table."""
        changed, self._changed = self._changed, set()
        return changed

    def take_changed_keys(self, keys_max: int) -> frozenset[KeyId]:
        """Return up to `keys_max` keys that have changed; the others are left for the next turn."""
        taken = frozenset(islice(self._changed_keys, keys_max))
        self._changed_keys -= taken
        if self._changed_keys:
            self._nudge_publish()
        return taken

    def restore_all(self, key_ids: Iterable[KeyId]) -> None:
        """Consider these keys and all routes changed: a turn failed and may have lost some."""
        self._changed = None
        self._changed_keys.update(key_ids)

    def _note_unsendable(self, router: PeerConnection, reason: str) -> None:
        metrics.FRAMES_REFUSED.labels("route_table").inc()
        if self.following.record_unsendable(router.name, reason):
            fields = {"router": router.name, "reason": reason}
            log.error("router cannot follow", extra={"fields": fields})

"""Leases of windows: memory through which two engines of this node exchange KV blocks.

A transfer between two replicas of one deployment on this node gets a lease. The request for blocks
goes through the data plane like any other, so that it is admitted, counted and cancelled like any
other. Only the contents of blocks take the shorter way.

Rule 1: a lease is relayed only to the engine that it was issued for: requests of other nodes get no
window.
Rule 2: after a transfer through a window has failed, that engine's blocks come through the sockets
for a while.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from isochrone.wire.kv import kv_transfer
from nodeagent.decide.pauses import Pauses
from nodeagent.managed_replica import ManagedReplica

PAUSE_S: Final = 30.0
PAUSES_MAX: Final = 256


class WindowLease(NamedTuple):
    """The lease of one transfer, and the sending engine's socket; "" for a transfer without."""

    name: str = ""
    socket: str = ""
    record_failure: Callable[[], None] = lambda: None
    """Called if the blocks have not all arrived."""

    def answered_with(self, answered: Mapping[str, str]) -> "WindowLease":
        """Return the lease as the headers of the sender's answer leave it: it may have no window
        free, and then sends the blocks through its socket."""
        return WindowLease() if answered.get(kv_transfer.WINDOW) == kv_transfer.NO_WINDOW else self

    @property
    def to_sender(self) -> dict[str, str]:
        """The headers of the request for blocks."""
        return {kv_transfer.WINDOW: self.name} if self.name else {}

    @property
    def to_receiver(self) -> dict[str, str]:
        """The headers of the request that brings the blocks."""
        if not self.name:
            return {}
        return {kv_transfer.WINDOW: self.name, kv_transfer.WINDOW_SOCKET: self.socket}


class WindowLeases:
    """The leases of one node."""

    def __init__(
        self,
        find_replica: Callable[[ReplicaId], ManagedReplica | None],
        clock: Callable[[], float],
    ) -> None:
        """`find_replica` returns a replica of this node. `clock` returns monotonic seconds."""
        self._find_replica = find_replica
        self._clock = clock
        self._issued: dict[str, ReplicaId] = {}
        self._pauses: Pauses[ReplicaId] = Pauses(PAUSE_S, PAUSES_MAX)

    @contextmanager
    def lease(self, source: ReplicaId, receiver: ManagedReplica) -> Iterator[WindowLease]:
        """Issue a lease for one transfer, if both replicas are here and of one deployment."""
        socket = self._socket_of(source, receiver)
        if not socket:
            yield WindowLease()
            return

        def record_failure() -> None:
            self._pauses.begin(source, self._clock())

        lease = WindowLease(secrets.token_hex(16), socket, record_failure)
        self._issued[lease.name] = source
        try:
            yield lease
        finally:
            del self._issued[lease.name]

    def sent_headers(self, lease: str, replica: ReplicaId) -> dict[str, str]:
        """Return the header for the engine of a replica that is asked for blocks with a lease."""
        is_issued = bool(lease) and self._issued.get(lease) == replica
        return {kv_transfer.WINDOW: lease} if is_issued else {}

    def _socket_of(self, source: ReplicaId, receiver: ManagedReplica) -> str:
        """Return the socket at which the engine of `source` gives windows away; "" for none."""
        replica = self._find_replica(source)
        engine = replica.engine if replica is not None else None
        is_paused = self._pauses.is_paused(source, self._clock())
        if replica is None or engine is None or is_paused:
            return ""
        is_same = replica.spec.deployment_id == receiver.spec.deployment_id
        if not (is_same and engine.sends_kv and engine.record.command.socket):
            return ""
        path = Path(engine.record.command.socket).with_name(kv_transfer.WINDOW_SOCKET_NAME)
        return str(path) if path.is_socket() else ""

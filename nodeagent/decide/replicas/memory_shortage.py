"""Chooses the replica that ends when a node without GPUs runs out of memory.

Otherwise the kernel would end some process, perhaps one that keeps to its plan, or another service.

Rule 1: while the machine has memory, a replica may take more than was planned for it.
Rule 2: once it is short, the replica that exceeds its plan by the most bytes ends, and no other.
Rule 3: a replica that takes about what was planned never ends: then too much was planned, or
something else on the machine takes the memory.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId

SHORT_SHARE: Final = 0.03
"""The machine is short of memory when less than this share of it is available."""
OVERRUN_SHARE: Final = 1.1
OVERRUN_BYTES_MIN: Final = 256 * 1024 * 1024
"""A replica exceeds its plan if it takes this many times as much, and this many bytes more."""


class ReplicaMemory(NamedTuple):
    """The memory of one replica, in bytes: planned, and in use."""

    replica_id: ReplicaId
    planned_bytes: int
    used_bytes: int

    @property
    def overrun_bytes(self) -> int:
        """Its use beyond its plan; 0 if it uses about what was planned."""
        over_bytes = self.used_bytes - self.planned_bytes
        is_over = self.used_bytes > OVERRUN_SHARE * self.planned_bytes
        return over_bytes if is_over and over_bytes > OVERRUN_BYTES_MIN else 0


def is_short(free_bytes: int, total_bytes: int) -> bool:
    """Return whether a machine is short of memory."""
    return free_bytes < SHORT_SHARE * total_bytes


def replica_to_end(replicas: Sequence[ReplicaMemory]) -> ReplicaMemory | None:
    """Return the replica that ends on a machine that is short of memory; None for none."""
    largest = max(
        replicas, key=lambda replica: (replica.overrun_bytes, replica.replica_id), default=None
    )
    return largest if largest is not None and largest.overrun_bytes else None

"""Signs of life of nodes: when each was last heard, and the pulses that wait to be stored."""

from itertools import islice
from math import inf
from typing import Final

from isochrone.wire.ids import NodeId
from isochrone.wire.peers.report import Pulse
from scheduler.decide.membership import AssignmentFollowing, NodeContact
from scheduler.state.lease_state import LeaseState

FORGOTTEN_AFTER_S: Final = 86_400.0
"""A node that was not heard for a day is forgotten. The store knows since when it is silent, and a
term may last longer than many short-lived nodes."""

PULSES_BUFFERED_MAX: Final = 50_000
PULSES_WRITTEN_MAX: Final = 1_000


class Heartbeats:
    """When this process last heard each node. A new term begins without any."""

    def __init__(self, lease: LeaseState, *, lost_after_s: float) -> None:
        """Use the clock of `lease`. A node heard after `lost_after_s` of silence counts as back."""
        self._lease = lease
        self._lost_after_s = lost_after_s
        self._heard_at: dict[NodeId, float] = {}
        self._back_at: dict[NodeId, float] = {}
        self.following = AssignmentFollowing()
        """Which nodes have not taken the assignment that they were sent."""

    def record(self, node_id: NodeId) -> None:
        """Note that a node was heard now."""
        now = self._lease.clock()
        if now - self._heard_at.get(node_id, now) >= self._lost_after_s:
            self._back_at[node_id] = now
        self._heard_at[node_id] = now

    def silent_s(self, node_id: NodeId) -> float:
        """Return for how long a node has been silent; inf if this process never heard it."""
        return self._lease.clock() - self._heard_at.get(node_id, -inf)

    def observed(self) -> NodeContact:
        """Return the contact that only this process has had with nodes, for the functions that
        decide."""
        now = self._lease.clock()
        self._forget_gone(now)
        return NodeContact(
            acting_for_s=self._lease.acting_for_s,
            silent_s={node_id: now - heard_at for node_id, heard_at in self._heard_at.items()},
            back_s={node_id: now - heard_at for node_id, heard_at in self._back_at.items()},
        )

    def _forget_gone(self, now: float) -> None:
        gone = [name for name, at in self._heard_at.items() if now - at >= FORGOTTEN_AFTER_S]
        for node_id in gone:
            del self._heard_at[node_id]
            self._back_at.pop(node_id, None)
            self.following.forget(node_id)

    def clear(self) -> None:
        """Forget every node: this process no longer acts."""
        self.following.clear()
        self._heard_at.clear()
        self._back_at.clear()


class PulseBuffer:
    """The newest pulse of each node, in the order in which they are to be stored."""

    def __init__(self) -> None:
        self._pulses: dict[NodeId, Pulse] = {}

    def add(self, pulse: Pulse) -> None:
        """Buffer a pulse in place of the node's older one; a full buffer takes no other nodes."""
        if pulse.node_id in self._pulses or len(self._pulses) < PULSES_BUFFERED_MAX:
            self._pulses[pulse.node_id] = pulse

    def take(self) -> list[Pulse]:
        """Remove and return at most PULSES_WRITTEN_MAX pulses, the longest waiting first.

        A node that pulses again keeps its place, so every node of a large fleet has its turn. The
        store may lag behind: the acting process judges silence by what it heard itself.
        """
        node_ids = list(islice(self._pulses, PULSES_WRITTEN_MAX))
        return [self._pulses.pop(node_id) for node_id in node_ids]

    def clear(self) -> None:
        """Drop every pulse."""
        self._pulses.clear()

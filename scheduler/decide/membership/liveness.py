"""Decides which nodes are alive, and when too many are silent at once to be lost.

Rule 1: one silent node is lost. Many silent at once mean a failure of the network or of the
scheduler, and then nothing is rescheduled (the mistake that took down whole fleets: gpustack#5935).
Rule 2: a scheduler that has just begun to act has not been in contact with all nodes yet, and
declares none lost.
Rule 3: a network cut is over when all nodes have had time to come back, not when the first have.
Rule 4: a name that joined and has never connected says nothing about the network, and is not lost.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from isochrone.wire.ids import NodeId
from scheduler.decide.cluster import FleetNode, Liveness

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class NodeContact(msgspec.Struct, frozen=True, kw_only=True):
    """The acting scheduler's own knowledge of nodes, which the store does not have.

    How long it has acted, how long each node has been silent, and how long ago nodes came back that
    had been silent for `lost_after_s`.
    """

    acting_for_s: float
    silent_s: Mapping[NodeId, float] = {}
    back_s: Mapping[NodeId, float] = {}


class LivenessLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of silence, and of how many nodes may be lost at once."""

    suspect_after_s: Seconds = 6.0
    lost_after_s: Seconds = 30.0  # then its replicas are replaced elsewhere
    grace_s: Seconds = 60.0  # for nodes to come back after a new scheduler acts, or after a cut
    # Placement freezes if a larger share of the nodes is lost within `storm_window_s`.
    storm_share: Annotated[float, msgspec.Meta(ge=0)] = 0.2
    storm_window_s: Seconds = 600.0


class LivenessView(msgspec.Struct, frozen=True, kw_only=True):
    """The liveness of each node. `frozen` says why no node may be declared lost now, or is ""."""

    by_node: Mapping[NodeId, Liveness]
    frozen: str = ""

    def is_in_fleet(self, node: FleetNode) -> bool:
        """Return whether a node is neither revoked nor lost."""
        return not node.revoked and self.by_node.get(node.node_id) is not Liveness.LOST


def judge_liveness(
    nodes: Sequence[FleetNode], acting_for_s: float, limits: LivenessLimits | None = None
) -> LivenessView:
    """Return the liveness of every node, or that too many are silent for any to count as lost."""
    limits = limits or LivenessLimits()
    # A revoked node stays silent, which is no sign of a network cut.
    expected = [node for node in nodes if node.has_connected and not node.revoked]
    frozen = _frozen(expected, acting_for_s, limits)
    by_node = {}
    for node in nodes:
        if not node.has_connected:
            by_node[node.node_id] = Liveness.SUSPECT
            continue
        liveness = Liveness.READY
        if node.silent_s >= limits.suspect_after_s:
            liveness = Liveness.SUSPECT
        if node.silent_s >= limits.lost_after_s and not frozen:
            liveness = Liveness.LOST
        by_node[node.node_id] = liveness
    return LivenessView(by_node=by_node, frozen=frozen)


def _frozen(nodes: Sequence[FleetNode], acting_for_s: float, limits: LivenessLimits) -> str:
    if acting_for_s < limits.grace_s and any(n.silent_s >= limits.lost_after_s for n in nodes):
        return (
            f"acting for {acting_for_s:.0f} s of {limits.grace_s:.0f} s grace: "
            "silent nodes may not have found this scheduler yet"
        )
    silent = [node for node in nodes if node.silent_s >= limits.lost_after_s]
    if not silent:
        return ""
    returned = [
        node
        for node in nodes
        if node.silent_s < limits.lost_after_s
        and node.back_s is not None
        and node.back_s < limits.grace_s
    ]
    recent = [node for node in silent if node.silent_s < limits.storm_window_s]
    also_back = f", {len(returned)} have just come back" if returned else ""
    # A mostly silent fleet is never believed lost; a large part of it only after a long time.
    for lost, share, what, consequence in (
        (silent, 0.5, "are silent", "more likely a cut than a loss"),
        (recent, limits.storm_share, "fell silent at once", "waiting before moving work"),
    ):
        affected = len(lost) + len(returned)
        if affected >= 2 and affected > share * len(nodes):
            return f"{len(lost)} of {len(nodes)} nodes {what}{also_back}: {consequence}"
    return ""

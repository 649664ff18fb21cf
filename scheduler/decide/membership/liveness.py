"""Which nodes are heard, and when silence is too widespread to be believed.

Rule 1: one silent node is a lost node; many silent at once are a sick network or a sick centre,
and then nothing is rescheduled (the mistake that takes whole fleets down: gpustack#5935).
Rule 2: a scheduler that has just begun to act has heard nobody yet, and loses no one.
Rule 3: a cut is over when everybody had time to come back, not when the first ones have.
"""

from collections.abc import Mapping, Sequence

import msgspec

from isochrone.wire.ids import NodeId
from scheduler.decide.cluster import FleetNode, Liveness


class NodeContact(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler alone knows: for how long it has acted, for how long each node that it heard
    has been silent, and how long ago those came back that it had not heard for `lost_after_s`."""

    acting_for_s: float
    silent_s: Mapping[NodeId, float] = {}
    back_s: Mapping[NodeId, float] = {}


class LivenessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When silence means something."""

    suspect_after_s: float = 6.0
    lost_after_s: float = 30.0  # its replicas are replaced elsewhere
    grace_s: float = 60.0  # to come back: after a scheduler begins to act, and after a cut
    storm_share: float = 0.2  # of the nodes, lost within `storm_window_s`: placement freezes
    storm_window_s: float = 600.0


class LivenessView(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on each node. `frozen` says in words why no node may be lost now, if so."""

    by_node: Mapping[NodeId, Liveness]
    frozen: str = ""

    def counts(self, node: FleetNode) -> bool:
        """Say whether what is on a node counts at all."""
        return not node.revoked and self.by_node.get(node.node_id) is not Liveness.LOST


def judge_liveness(
    nodes: Sequence[FleetNode], acting_for_s: float, limits: LivenessLimits | None = None
) -> LivenessView:
    """Judge every node by its silence, then judge the silence."""
    limits = limits or LivenessLimits()
    # A revoked node is silent for good, and no sign of a cut.
    frozen = _frozen([node for node in nodes if not node.revoked], acting_for_s, limits)
    by_node = {}
    for node in nodes:
        verdict = Liveness.READY
        if node.silent_s >= limits.suspect_after_s:
            verdict = Liveness.SUSPECT
        if node.silent_s >= limits.lost_after_s and not frozen:
            verdict = Liveness.LOST
        by_node[node.node_id] = verdict
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
    back = [
        node
        for node in nodes
        if node.silent_s < limits.lost_after_s
        and node.back_s is not None
        and node.back_s < limits.grace_s
    ]
    fresh = [node for node in silent if node.silent_s < limits.storm_window_s]
    and_back = f", {len(back)} have just come back" if back else ""
    # A fleet mostly silent is never believed gone; a large part of it only after a long time.
    for fallen, share, are, then in (
        (silent, 0.5, "are silent", "more likely a cut than a loss"),
        (fresh, limits.storm_share, "fell silent at once", "waiting before moving work"),
    ):
        cut = len(fallen) + len(back)
        if cut >= 2 and cut > share * len(nodes):
            return f"{len(fallen)} of {len(nodes)} nodes {are}{and_back}: {then}"
    return ""

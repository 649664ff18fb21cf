"""When a version that breaks wherever it is started is started again.

Rule 1: while one replica of it is warm, it is the nodes that are at fault, and others are tried.
Rule 2: what was mended (a file at its source, a driver on the nodes) is tried within a minute; a
change of engine or model is a new version, and tried at once.
"""

from collections.abc import Iterable
from typing import Final

from isochrone.wire.report import ReplicaState
from scheduler.decide.cluster import Placement, StartFailures

HELD_FIRST_S: Final = 2.0
HELD_MAX_S: Final = 50.0


def start_backoff(given_up: StartFailures, placements: Iterable[Placement]) -> str:
    """Say why a version is not started now; "" where it may be."""
    held_s = min(HELD_MAX_S, HELD_FIRST_S * 2.0 ** min(given_up.times - 1, 10))
    version = given_up.deployment_id, given_up.version
    if given_up.ago_s >= held_s or any(
        (one.deployment_id, one.version) == version and one.state is ReplicaState.WARM
        for one in placements
    ):
        return ""
    return (
        f"version {given_up.version} was given up {given_up.times} times of late, last on "
        f"{given_up.node_ids[0]} {given_up.ago_s:.0f} s ago: {given_up.reason}; it is tried again "
        f"{held_s:.0f} s after that, another version at once"
    )

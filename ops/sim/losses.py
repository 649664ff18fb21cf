"""Replicas that die during a run and come back, and what routers know of it.

A router notices by the first request that fails: connections to the replica are reset. Five seconds
after the death the route tables no longer have the replica, and they have it again when it serves.
"""

import random
from collections.abc import Sequence
from typing import Final, NamedTuple

from ops.sim.world import RoutingWorld

UNLISTED_AFTER_S: Final = 5.0
"""At most half of the time that the replica is down."""

DOWN_S: Final = 60.0
"""The time from a replica's death until it serves again: an engine restarts with its weights on
disk."""

DOWN_SHARE_MAX: Final = 0.15
"""A replica is down for at most this share of a run: some runs last seconds."""

FIRST_AT: Final = 0.1
LAST_AT: Final = 0.8
"""Replicas die between these shares of a run."""


class ReplicaLoss(NamedTuple):
    """One replica's death, and when it serves again with an empty cache."""

    replica: int
    at_s: float
    back_s: float


def draw_losses(
    world: RoutingWorld, share: float, duration_s: float, seed: int
) -> Sequence[ReplicaLoss]:
    """Draw which `share` of the replicas die, one after the other over the run."""
    count = round(share * len(world.sites))
    replicas = random.Random(seed).sample(range(len(world.sites)), count)
    step = (LAST_AT - FIRST_AT) / max(1, count - 1)
    at_s = [duration_s * (FIRST_AT + number * step) for number in range(count)]
    down_s = min(DOWN_S, DOWN_SHARE_MAX * duration_s)
    return [
        ReplicaLoss(replica, dies_s, dies_s + down_s)
        for replica, dies_s in zip(replicas, at_s, strict=True)
    ]

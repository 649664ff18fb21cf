"""The cost of a plan: one sum, in ms x requests/s, that every step of the planner lowers.

    latency       weight x requests/s x ms to the replica that serves them; UNSERVED_MS where no
                  replica has capacity left
  + missing       MISSING x weight for each replica below replicas_min and each keep_warm PoP that
                  has none
  + absent        ABSENT x weight for a deployment with demand and no replica anywhere
  + one PoP only  ONE_POP_MS x weight x requests/s (and MISSING_SPREAD where replicas_min >= 2):
                  the price of losing that PoP
  + replicas      HOLD + HOLD_PER_GIB x memory for each replica; START + START_PER_S x seconds until
                  warm for each new one

The weight of a deployment is 2 ^ ((priority - 50) / 10): when capacity is scarce, a request of a
deployment with ten points more priority counts twice. All minima are met first. A first replica
counts ABSENT in addition to the latency it saves, so that a deployment with little demand is not
left without any replica for the benefit of those that already have some. After that, the replica
that saves most per byte goes first.
"""

from typing import Final

from isochrone.wire.models.model import PlacementPolicy
from scheduler.decide.capacity.device_classes import GIB

HEADROOM: Final = 0.7
"""The share of a replica's capacity that planned load may fill; the rest is for forecast errors."""

UNSERVED_MS: Final = 5_000.0
"""The latency counted for load without capacity: about the queueing time under overload."""

MISSING: Final = 1e6
MISSING_SPREAD: Final = 1e3
ABSENT: Final = 1e3
ONE_POP_MS: Final = 100.0

HOLD: Final = 10.0
HOLD_PER_GIB: Final = 0.5
START: Final = 10.0
START_PER_S: Final = 0.02

FAILED_HERE: Final = 1e4
"""Added to the start cost of a node for each recent failure of the deployment there, so that every
other node is tried first."""


def weight_of(policy: PlacementPolicy) -> float:
    """Return how much a request of a deployment counts: ten points of priority double it."""
    return float(2.0 ** ((policy.priority - 50) / 10))


def hold_cost(memory_bytes: int) -> float:
    """Return the cost of keeping a replica."""
    return HOLD + HOLD_PER_GIB * memory_bytes / GIB


def start_cost(start_s: float) -> float:
    """Return the cost of starting a replica that will be warm in `start_s` seconds."""
    return START + START_PER_S * start_s

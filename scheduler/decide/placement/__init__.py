"""Placement: `plan_fleet(cluster)` decides which replicas start and which end, with reasons.

`plan_prefetch` decides which weights to fetch in advance. The steps of a plan are listed in
`planner`; `fleet` has the data that a plan never changes, `search` the changes that it tries.
"""

from scheduler.decide.placement.fleet.slots import policy_contradiction, residency_allows
from scheduler.decide.placement.multi_node import with_secret
from scheduler.decide.placement.planner import PlanLimits
from scheduler.decide.placement.prefetch import (
    EndedPrefetch,
    PrefetchDecision,
    plan_prefetch,
)
from scheduler.decide.placement.rollout_split import plan_fleet

__all__ = (
    "EndedPrefetch",
    "PlanLimits",
    "PrefetchDecision",
    "plan_fleet",
    "plan_prefetch",
    "policy_contradiction",
    "residency_allows",
    "with_secret",
)

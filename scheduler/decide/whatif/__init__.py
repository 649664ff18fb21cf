"""Questions about plans: `what_if` simulates changes, `explain_placement` gives reasons."""

from scheduler.decide.whatif.explain import Explanation, explain_placement
from scheduler.decide.whatif.simulation import (
    Change,
    ClusterSnapshot,
    InvalidChange,
    WhatIfResult,
    what_if,
)

__all__ = (
    "Change",
    "ClusterSnapshot",
    "Explanation",
    "InvalidChange",
    "WhatIfResult",
    "explain_placement",
    "what_if",
)

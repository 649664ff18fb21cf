"""Nodes and their connections: admission, message rates, liveness, and report changes.

`connection_admission` and `message_rate_limit` limit the cost of peers, `liveness` decides which
nodes are lost, `following` which routers and nodes have old tables and assignments, `report_diff`
which reports must be written, and `placement_seal` what proves that a replica was placed on a node.
"""

from scheduler.decide.membership.connection_admission import ConnectionAdmission
from scheduler.decide.membership.following import AssignmentFollowing, RouteFollowing
from scheduler.decide.membership.liveness import (
    LivenessLimits,
    LivenessView,
    NodeContact,
    judge_liveness,
)
from scheduler.decide.membership.message_rate_limit import MessageRateLimit
from scheduler.decide.membership.placement_seal import sealed_fields
from scheduler.decide.membership.report_diff import has_changed

__all__ = (
    "AssignmentFollowing",
    "ConnectionAdmission",
    "LivenessLimits",
    "LivenessView",
    "MessageRateLimit",
    "NodeContact",
    "RouteFollowing",
    "has_changed",
    "judge_liveness",
    "sealed_fields",
)

"""Nodes and their connections: admission, message rates, liveness, and report changes.

`connection_admission`, `message_rate_limit` and `peer_limit` limit the cost of peers, `liveness`
decides which nodes are lost, `following` which routers and nodes have old tables and assignments,
`peer_clock` which peers have wrong clocks, `report_diff` which reports must be written,
`placement_seal` makes the proof that a replica was placed on a node, and `store_master` chooses the
node of a PoP that runs the master of its store of KV.
"""

from scheduler.decide.membership.connection_admission import ConnectionAdmission, Places
from scheduler.decide.membership.following import AssignmentFollowing, RouteFollowing
from scheduler.decide.membership.liveness import (
    LivenessLimits,
    LivenessView,
    NodeContact,
    judge_liveness,
)
from scheduler.decide.membership.message_rate_limit import MessageRateLimit
from scheduler.decide.membership.peer_clock import PeerClock, clock_problem
from scheduler.decide.membership.peer_limit import PeerLimit
from scheduler.decide.membership.placement_seal import sealed_fields
from scheduler.decide.membership.report_diff import has_changed
from scheduler.decide.membership.store_master import StoreMember, store_masters

__all__ = (
    "AssignmentFollowing",
    "ConnectionAdmission",
    "LivenessLimits",
    "LivenessView",
    "MessageRateLimit",
    "NodeContact",
    "PeerClock",
    "PeerLimit",
    "Places",
    "RouteFollowing",
    "StoreMember",
    "clock_problem",
    "has_changed",
    "judge_liveness",
    "sealed_fields",
    "store_masters",
)

"""Has nodes fetch weights before a forecast peak, some hours ahead."""

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.decide.placement import PrefetchDecision
from scheduler.planner.client import PlannerClient
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.heartbeats import Heartbeats
from scheduler.store.fleet.prefetch import record_prefetch_changes
from scheduler.store.pool import Pool, transaction


class WeightPrefetchCounts(NamedTuple):
    """How many prefetches one turn added, saw arrive and ended."""

    added: int = 0
    arrived: int = 0
    ended: int = 0


@dataclass(eq=False, kw_only=True)
class PrefetchWeights:
    """Starts no replica: a later start finds its weights on disk, which the planner knows."""

    pool: Pool
    planner: PlannerClient
    lease: LeaseState
    heartbeats: Heartbeats
    assignments: AssignmentOutbox

    async def run_once(self) -> WeightPrefetchCounts:
        """Ask the planner, store the changes, and send the nodes concerned their assignments."""
        if not self.lease.is_acting:
            return WeightPrefetchCounts()
        decision = await self.planner.plan_prefetch(self.heartbeats.observed())
        if decision != PrefetchDecision():
            node_ids = {prefetch.node_id for prefetch in decision.new}
            node_ids |= {ended.target.node_id for ended in decision.ended}
            with self.assignments.resend_on_error(node_ids):
                async with transaction(self.pool) as connection:
                    await record_prefetch_changes(connection, self.lease.epoch, decision)
                await self.assignments.send_to(sorted(node_ids))
        return WeightPrefetchCounts(len(decision.new), len(decision.arrived), len(decision.ended))

"""Main path of placement: plan, commit the plan if nothing has changed meanwhile, tell the nodes.

The planner reads the cluster and decides, in a process of its own (`scheduler/planner`).
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from isochrone.service.trust.identity import Authority
from isochrone.wire.ids import Epoch
from scheduler import metrics
from scheduler.decide.cluster import PlacementPlan, ReplicaStart
from scheduler.decide.membership import sealed_fields
from scheduler.decide.placement import with_secret
from scheduler.planner.client import PlannerClient, PlannerFailed
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.first_reports import FirstReports
from scheduler.state.peers.heartbeats import Heartbeats
from scheduler.state.placement_status import PlacementStatus
from scheduler.state.published_routes import PublishedRoutes
from scheduler.store.fleet.plans import commit_plan
from scheduler.store.pool import Pool, transaction

log = logging.getLogger(__name__)


class PlacementCounts(NamedTuple):
    """Counts of one turn's plan, and whether it was committed."""

    started: int = 0
    ended: int = 0
    unmet: int = 0
    committed: bool = False
    frozen: str = ""


@dataclass(eq=False, kw_only=True)
class PlaceReplicas:
    """The scheduler's main job."""

    pool: Pool
    planner: PlannerClient
    authority: Authority
    lease: LeaseState
    heartbeats: Heartbeats
    assignments: AssignmentOutbox
    routes: PublishedRoutes
    first_reports: FirstReports
    status: PlacementStatus
    nudge_place: Callable[[], None]
    _is_late: bool = field(default=False, init=False)
    """Whether the last plan was not committed, because the cluster had changed meanwhile. The
        next one is a quick one: changes may come faster than thorough plans."""

    async def run_once(self) -> PlacementCounts:
        """Plan, commit, and send the nodes concerned their assignments."""
        if not self.lease.is_acting:
            return PlacementCounts()
        # If a new term begins meanwhile, the commit fails: this plan has not waited for its first
        # reports.
        epoch = self.lease.epoch
        if await self.first_reports.must_placement_wait(self.pool):
            return PlacementCounts(frozen="waiting for every node's first report")
        try:
            plan = await self.planner.plan(self.heartbeats.observed(), is_quick=self._is_late)
        except PlannerFailed as error:
            self.status.fail(str(error), epoch)
            raise
        self._show(plan, epoch)
        if plan.is_empty:
            self._is_late = False
            return PlacementCounts(unmet=len(plan.unmet), frozen=plan.frozen)
        with_secrets = (with_secret(start, secrets.token_hex(16)) for start in plan.starts)
        starts = tuple(_sealed(start, self.authority) for start in with_secrets)
        plan = msgspec.structs.replace(plan, starts=starts)
        with self.assignments.resend_on_error(plan.node_ids):
            async with transaction(self.pool) as connection:
                committed = await commit_plan(connection, plan, epoch)
            self._is_late = not committed
            if committed:
                await self._announce(plan)
        if not committed:
            self.nudge_place()
        return PlacementCounts(
            len(plan.starts), len(plan.endings), len(plan.unmet), committed=committed
        )

    def _show(self, plan: PlacementPlan, epoch: Epoch) -> None:
        if plan.frozen != self.status.frozen:
            log.warning("placement freeze", extra={"fields": {"reason": plan.frozen or "over"}})
        self.status.show(plan, epoch)
        metrics.GENERATION.set(plan.based_on)

    async def _announce(self, plan: PlacementPlan) -> None:
        metrics.MOVES.labels("start").inc(len(plan.starts))
        metrics.MOVES.labels("end").inc(len(plan.endings))
        for start in plan.starts:
            replica_id = start.spec.replica_id
            fields = {"replica": replica_id, "node": start.node_id, "reason": start.reason}
            log.info("placed", extra={"fields": fields})
        metrics.MOVES.labels("role").inc(len(plan.role_changes))
        await self.assignments.send_to(plan.node_ids)
        self.routes.mark_changed()


def _sealed(start: ReplicaStart, authority: Authority) -> ReplicaStart:
    """Return `start` with a seal on each part, by which any scheduler can later adopt it."""
    return start.map_parts(
        lambda part: part.with_spec(seal=authority.seal(sealed_fields(part.node_id, part.spec)))
    )

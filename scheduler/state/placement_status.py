"""Findings of the last plan: why placement is frozen, which requirements are unmet, and its age.

Also why there is no plan, if the last turn failed.
"""

from collections.abc import Sequence

from isochrone.wire.ids import Epoch
from scheduler.decide.cluster import PlacementPlan, UnmetRequirement
from scheduler.state.lease_state import LeaseState


class PlacementStatus:
    """Written by the placement job, read by the admin API and the metrics.

    A plan counts while its term lasts. A scheduler that acts no more knows of no problem, because
    alerting rules take the highest value of all schedulers.
    """

    def __init__(self, lease: LeaseState) -> None:
        self._lease = lease
        self._plan: PlacementPlan | None = None
        self._epoch = Epoch(0)
        self._planned_at = 0.0
        self._failure = ""
        self._failure_epoch = Epoch(0)

    def show(self, plan: PlacementPlan, epoch: Epoch) -> None:
        """Show the findings of a plan made now in this epoch."""
        self._plan, self._epoch, self._planned_at = plan, epoch, self._lease.clock()
        self._failure = ""

    def fail(self, reason: str, epoch: Epoch) -> None:
        """Show why no plan could be made in this epoch, until one is."""
        self._failure, self._failure_epoch = reason, epoch

    @property
    def failure(self) -> str:
        """Why the last turn made no plan; empty if it made one."""
        lease = self._lease
        return self._failure if lease.is_acting and lease.epoch == self._failure_epoch else ""

    @property
    def frozen(self) -> str:
        """Why nothing may be moved now; empty if it may."""
        plan = self._current()
        return "" if plan is None else plan.frozen

    @property
    def unmet(self) -> Sequence[UnmetRequirement]:
        """The requirements that no node can meet."""
        plan = self._current()
        return () if plan is None else plan.unmet

    @property
    def unreadable(self) -> Sequence[str]:
        """Rows of the store that cannot be read and belong to no deployment, in words."""
        plan = self._current()
        return () if plan is None else plan.unreadable

    @property
    def plan_age_s(self) -> float:
        """How long ago the last plan of this term was made, or the term began; 0 on a standby."""
        if not self._lease.is_acting:
            return 0.0
        if self._current() is None:
            return self._lease.acting_for_s
        return self._lease.clock() - self._planned_at

    def _current(self) -> PlacementPlan | None:
        lease = self._lease
        return self._plan if lease.is_acting and lease.epoch == self._epoch else None

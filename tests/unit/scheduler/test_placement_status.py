"""What the last plan found is shown while its term lasts, and by the acting scheduler only."""

from isochrone.wire.ids import DeploymentId, Epoch, Generation
from scheduler.decide.cluster import PlacementPlan, UnmetRequirement
from scheduler.state.lease_state import LeaseState
from scheduler.state.placement_status import PlacementStatus
from scheduler.store.lease import MARGIN_S, Lease

UNMET = UnmetRequirement(deployment_id=DeploymentId("chat"), reason="no node has a GPU")
PLAN = PlacementPlan(based_on=Generation(1), unmet=(UNMET,), frozen="2 of 2 nodes are silent")


class Scheduler:
    """The status of a scheduler, its lease, and the clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.lease = LeaseState(holder="a", ttl_s=6.0 + MARGIN_S, clock=lambda: self.now_s)
        self.status = PlacementStatus(self.lease)

    def act(self, epoch: int) -> None:
        self.lease.take(Lease(epoch=Epoch(epoch), acting_for_s=0.0), self.now_s)

    def shown(self) -> tuple[str, int, float]:
        return self.status.frozen, len(self.status.unmet), self.status.plan_age_s


def test_a_plan_is_shown_with_its_age() -> None:
    scheduler = Scheduler()
    assert scheduler.shown() == ("", 0, 0.0)
    scheduler.act(1)
    scheduler.now_s += 2.0
    assert scheduler.shown() == ("", 0, 2.0)
    scheduler.status.show(PLAN, Epoch(1))
    scheduler.now_s += 3.0
    assert scheduler.shown() == (PLAN.frozen, 1, 3.0)


def test_a_scheduler_that_stands_by_knows_of_no_problem() -> None:
    scheduler = Scheduler()
    scheduler.act(1)
    scheduler.status.show(PLAN, Epoch(1))
    scheduler.lease.drop()
    assert scheduler.shown() == ("", 0, 0.0)


def test_neither_does_one_whose_lease_has_run_out() -> None:
    scheduler = Scheduler()
    scheduler.act(1)
    scheduler.status.show(PLAN, Epoch(1))
    scheduler.now_s += 7.0
    assert scheduler.shown() == ("", 0, 0.0)


def test_a_new_term_begins_without_the_problems_of_the_one_before() -> None:
    scheduler = Scheduler()
    scheduler.act(1)
    scheduler.status.show(PLAN, Epoch(1))
    scheduler.act(2)
    assert scheduler.shown() == ("", 0, 0.0)


def test_a_failure_to_plan_is_shown_until_there_is_a_plan_or_another_term() -> None:
    scheduler = Scheduler()
    scheduler.act(1)
    assert scheduler.status.failure == ""
    scheduler.status.fail("cannot plan", Epoch(1))
    assert scheduler.status.failure == "cannot plan"
    scheduler.status.show(PLAN, Epoch(1))
    assert scheduler.status.failure == ""
    scheduler.status.fail("cannot plan", Epoch(1))
    scheduler.act(2)
    assert scheduler.status.failure == ""

"""The job that has the planner learn: it does a part in each turn, and rests between parts."""

from isochrone.service.loop import REST_MAX_S
from isochrone.wire.ids import Epoch
from scheduler.loops.learn_demand import LEARN_SHARE, DemandCounts, LearnDemand
from scheduler.planner.demand_forecaster import LEARN_S
from scheduler.planner.messages import LearnedDemand
from scheduler.state.lease_state import LeaseState
from scheduler.store.lease import Lease


class BehindPlanner:
    """A planner that is behind until its last reply."""

    def __init__(self, *replies: LearnedDemand) -> None:
        self.replies = list(replies)

    async def learn(self, epoch: Epoch) -> LearnedDemand:
        return self.replies.pop(0)


def a_reply(*, is_new: bool = False, is_behind: bool = False) -> LearnedDemand:
    return LearnedDemand(slots=2, series=7, saved=1, is_new=is_new, is_behind=is_behind)


async def test_a_planner_that_is_behind_does_a_part_in_each_turn() -> None:
    planner = BehindPlanner(a_reply(is_behind=True), a_reply(is_new=True))
    lease = LeaseState(holder="s1", ttl_s=6.0, clock=lambda: 0.0)
    nudged: list[str] = []
    job = LearnDemand(
        planner=planner,  # type: ignore[arg-type]
        lease=lease,
        nudge_place=lambda: nudged.append("place"),
        nudge_prefetch=lambda: nudged.append("prefetch"),
        nudge_learn=lambda: nudged.append("learn"),
    )
    assert await job.run_once() == DemandCounts()
    lease.take(Lease(epoch=Epoch(1), acting_for_s=0.0), 0.0)
    assert await job.run_once() == DemandCounts(2, 7, 1)
    assert (nudged, len(planner.replies)) == (["learn"], 1)
    await job.run_once()
    assert nudged == ["learn", "place", "prefetch"]


def test_the_rest_after_a_part_is_no_longer_than_a_loop_rests() -> None:
    """A longer part would have a larger share of the time than it may."""
    assert LEARN_S * (1 / LEARN_SHARE - 1) <= REST_MAX_S

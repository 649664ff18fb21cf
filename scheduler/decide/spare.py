"""Seats that have had their time: of an old version, over the maximum, or missed by nobody."""

from collections.abc import Callable

import numpy as np

from scheduler.decide.flow import Floats
from scheduler.decide.score import START
from scheduler.decide.search import Search, Worth
from scheduler.decide.start_time import COMING
from scheduler.decide.wish import Seated, Wish

EndSeat = Callable[[Seated, str], None]


def replace_stale(
    search: Search, wish: Wish, fresh: Wish, surge_max: int, end_seat: EndSeat
) -> None:
    """End old ones that new ones have made spare; if there are none, start a new one."""
    version = wish.deployment.version
    coming = sum(1 for s in fresh.seats if s.placement and s.placement.state in COMING)
    coming += sum(1 for s in wish.seats if s.seat)
    if coming >= surge_max:
        return
    ended = 0
    for seated in [s for s in wish.seats if s.placement and s.placement.version != version]:
        if fresh.seats and len(wish.seats) > wish.least and wish.loss(seated) < wish.hold + START:
            end_seat(seated, f"version {version} is warm in its place")
            wish.drop(seated)
            ended += 1
    if not ended:
        best = _best_for(search, fresh)
        if best and search.has_starts_left:
            search.take(wish, best, reason=f"version {version} replaces the one before")


def _best_for(search: Search, fresh: Wish) -> Worth | None:
    """Return the best free seat as the new version alone would see it; paid for or not."""
    tried = [search.worth_to(fresh, int(site)) for site in np.flatnonzero(fresh.rooms > 0)]
    return max((w for w in tried if w.offered), key=lambda w: w.net, default=None)


def end_spare(wish: Wish, settle_s: float, end_seat: EndSeat) -> None:
    """End the seat that is missed least, if it is over the maximum or does not earn its hold."""
    over = len(wish.seats) > wish.most
    if not over and len(wish.seats) <= wish.least:
        return
    least_losses = wish.flow.losses_at_least()
    spare: list[tuple[float, float, str, Seated]] = []
    for seated in wish.seats:
        placement = seated.placement
        if placement is None or not (over or _may_go(wish, seated, settle_s)):
            continue
        if not over and _is_missed(wish, seated, least_losses):
            continue
        spare.append((wish.loss(seated), placement.age_s, placement.replica_id, seated))
    if not spare:
        return
    lost, _, _, seated = min(spare, key=lambda entry: entry[:3])
    if over:
        end_seat(seated, f"{len(wish.seats)} replicas, the policy allows {wish.most}")
    elif lost < wish.hold:
        # Holding costs half of what adding does: what was just added is not at once taken away.
        end_seat(seated, f"demand has moved: it saves {lost / wish.weight:.0f} ms x requests/s")


def _is_missed(wish: Wish, seated: Seated, least_losses: Floats) -> bool:
    """Say whether a seat earns its hold by the cheapest of estimates, which is never too high."""
    if seated.site < 0:
        return False
    if wish.flow.room[seated.site] <= seated.room * 1.001:
        return bool(least_losses[seated.site] >= wish.hold)
    return wish.flow.loss_at_least(seated.site, seated.room) >= wish.hold


def _may_go(wish: Wish, seated: Seated, settle_s: float) -> bool:
    last_there = wish.pops().count(seated.pop) == 1
    return (
        seated.placement is not None
        and seated.placement.age_s >= settle_s
        and not (seated.pop in wish.deployment.policy.keep_warm and last_there)
    )

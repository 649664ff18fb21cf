"""Seats that have had their time: of an old version, over the maximum, or missed by nobody."""

from collections.abc import Callable
from typing import Final

import numpy as np

from scheduler.decide.flow import Floats
from scheduler.decide.score import START
from scheduler.decide.search import Search, Worth
from scheduler.decide.start_time import COMING
from scheduler.decide.wish import Seated, Wish

EndSeat = Callable[[Seated, str], None]

KEPT: Final = 0.25
"""The share of its hold that a seat must save to stay: who leaves at night is wanted by day."""


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
    """End the seat that is missed least, if it is over the maximum or hardly earns its hold."""
    over = len(wish.seats) > wish.most
    if not over and len(wish.seats) <= wish.least:
        return
    spare = _least_missed(wish, settle_s, over)
    if spare is None:
        return
    lost, seated = spare
    if over:
        end_seat(seated, f"{len(wish.seats)} replicas, the policy allows {wish.most}")
    elif lost < KEPT * wish.hold:
        end_seat(seated, f"demand has moved: it saves {lost / wish.weight:.0f} ms x requests/s")


def _least_missed(wish: Wish, settle_s: float, over: bool) -> tuple[float, Seated] | None:
    """Return the standing seat that may go and whose loss costs least, with that cost."""
    least_losses = wish.flow.losses_at_least()
    standing = [s for s in wish.seats if s.placement and (over or _may_go(wish, s, settle_s))]
    guesses = [_loss_at_least(wish, seated, least_losses) for seated in standing]
    best: tuple[float, float, str] | None = None
    chosen = None
    for number in np.argsort(guesses, kind="stable"):
        # No later one can cost less than its guess, and one that earns its part does not go.
        if (best and guesses[number] > best[0]) or (
            not over and guesses[number] >= KEPT * wish.hold
        ):
            break
        seated = standing[number]
        assert seated.placement is not None
        loss = wish.loss(seated)
        entry = (loss, seated.placement.age_s, str(seated.placement.replica_id))
        if best is None or entry < best:
            best, chosen = entry, seated
    return (best[0], chosen) if best and chosen else None


def _loss_at_least(wish: Wish, seated: Seated, least_losses: Floats) -> float:
    """Return an estimate of what a seat's loss costs that is cheap and never too high."""
    if seated.site < 0:
        return 0.0
    if wish.flow.room[seated.site] <= seated.room * 1.001:
        return float(least_losses[seated.site])
    return wish.flow.loss_at_least(seated.site, seated.room)


def _may_go(wish: Wish, seated: Seated, settle_s: float) -> bool:
    return (
        seated.placement is not None
        and seated.placement.age_s >= settle_s
        and not (
            seated.pop in wish.deployment.policy.keep_warm and wish.pops().count(seated.pop) == 1
        )
    )

"""Room made at full places: what wants one gets it where its holders are worth less.

Rule: a placement that stands yields only when it has settled, enough others of its deployment are
warm, and what it yields to is worth more by what starting it again would cost. It ends now; its
place is taken later.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

import msgspec
import numpy as np

from isochrone.wire.ids import DeviceId, NodeId, PopId
from isochrone.wire.report import ReplicaState
from scheduler.decide.placement.score import START
from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.greedy_search import BlockedGain, Gain, GreedySearch
from scheduler.decide.placement.search.savepoint import ENOUGH, EffortBudget, Savepoint, in_order

TRIED_PER_WISH: Final = 8
"""How many full sites a wish at its maximum asks for, the most promising first."""

CHAIN: Final = 2
"""How often what was pushed from its seat may push another."""

Holders = dict[NodeId, list[PlannedReplica]]
"""The seats on each node that could be asked to leave it."""

Losses = dict[PlannedReplica, float]
"""What each costs that leaves."""

Way = tuple[float, list[PlannedReplica]]
"""What is lost, and who leaves."""


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A standing placement that is to end, for what wants its place."""

    seated: PlannedReplica
    reason: str


class SlotSwap:
    """Who gives way to whom. `settle_s` is how long a placement is left in its place."""

    def __init__(self, search: GreedySearch, settle_s: float, effort: EffortBudget) -> None:
        self._search = search
        self._settle_s = settle_s
        self._effort = effort
        self._yielding: list[Preemption] = []

    def yielding(self) -> list[Preemption]:
        """Return who is to end: none whose deployment would have to wait for one that is coming."""
        return [
            one
            for one in self._yielding
            if (wish := one.seated.wish).warm_pops() or not wish.is_coming()
        ]

    def run(self, standing: bool = True, most: int | None = None) -> bool:
        """Give full places to what is worth more there than those who hold them.

        At most `most` are tried, what is worth most first; without `standing`, placements stay.
        """
        moved = False
        holders = self.holders(standing)
        for entry in self.wanted(self._search.wishes)[:most]:
            if not self._effort.spend(5):
                break
            if self.give(entry, holders):
                moved = True
                holders = self.holders(standing)
        self._search.blocked.clear()
        return moved

    def wanted(self, by: Sequence[DeploymentState]) -> list[BlockedGain]:
        """Return the full places that some wishes want, what is worth most first."""
        blocked = self._search.blocked
        wanted = {key: one for key, one in blocked.items() if one.wish in by}
        blocked.clear()
        for wish in by:
            wanted.update(self._wanted_by(wish))
        return sorted(wanted.values(), key=lambda b: (-b.net, b.wish.number, b.site))

    def _wanted_by(self, wish: DeploymentState) -> dict[tuple[int, int], BlockedGain]:
        """Return where a wish at its maximum would rather have one of its new seats."""
        own = self._given_up(wish)
        if own is None:
            return {}
        search = self._search
        flow, others = wish.flow.copy(), wish.pops()
        flow.remove(own.site, own.room)
        others.remove(own.pop)
        kept = wish.cost()
        base = kept + _loss(own)
        sites = np.flatnonzero(wish.rooms > 0)
        saves = flow.bounds(sites, wish.rooms[sites]) if len(wish.cities) else np.zeros(len(sites))
        short = wish.shortfall(others)
        mends = [short - wish.shortfall([*others, search.ground.sites[int(s)].pop]) for s in sites]
        nets = base - saves - np.array(mends) + wish.hold + START
        return {
            (wish.number, int(sites[i])): BlockedGain(
                wish=wish, site=int(sites[i]), net=kept - nets[i]
            )
            for i in np.argsort(nets, kind="stable")[:TRIED_PER_WISH]
            if nets[i] < kept - ENOUGH and sites[i] != own.site
        }

    def _given_up(self, wish: DeploymentState) -> PlannedReplica | None:
        """Return what a wish at its maximum gives up for a seat elsewhere."""
        if len(wish.seats) < wish.most:
            return None
        return min(wish.new_seats(), key=_loss, default=None)

    def holders(self, standing: bool) -> Holders:
        """Return the seats on each node that could be asked to leave it."""
        holders: Holders = defaultdict(list)
        for wish in self._search.wishes:
            warm = wish.warm_pops() if standing else []
            for seated in wish.seats:
                if (seated.seat and not seated.waits) or self._may_yield(seated, warm):
                    for node_id in _nodes(seated):
                        holders[node_id].append(seated)
        return holders

    def _may_yield(self, seated: PlannedReplica, warm: Sequence[PopId]) -> bool:
        """Say whether one may be ended where these are `warm`: what is to come counts for none."""
        wish, placement = seated.wish, seated.placement
        return (
            placement is not None
            and placement.state is ReplicaState.WARM
            and placement.age_s >= self._settle_s
            and len(warm) > wish.least
            and not (seated.pop in wish.deployment.policy.keep_warm and warm.count(seated.pop) == 1)
        )

    def _may_all_yield(self, leaving: Sequence[PlannedReplica]) -> bool:
        """Say whether those who may each be ended may be together."""
        gone: dict[DeploymentState, list[PopId]] = defaultdict(list)
        for seated in leaving:
            if seated.placement:
                gone[seated.wish].append(seated.pop)
        for wish, pops in gone.items():
            left = Counter(wish.warm_pops()) - Counter(pops)
            kept = set(wish.deployment.policy.keep_warm) & set(pops)
            if left.total() < wish.least or not kept <= left.keys():
                return False
        return True

    def give(self, blocked: BlockedGain, holders: Holders) -> bool:
        """Seat what is blocked where room is on its way, or in the place of what loses least."""
        search, wish = self._search, blocked.wish
        given_up = self._given_up(wish)
        own = [given_up] if given_up else []
        if not own and len(wish.seats) >= wish.most:
            return False
        if not own:
            soon = search.worth(wish, blocked.site, soon=True)
            if soon:
                if soon.net > ENOUGH:
                    search.take(wish, soon, waits=True)
                return False
        best, chosen = 0.0, None
        for leaving in self.cheapest(blocked, holders):
            if not self._may_all_yield(leaving):
                continue
            saved = Savepoint(search, [])
            lowered = self._tried(saved, blocked, [*own, *leaving])[0]
            saved.undo()
            if lowered > best:
                best, chosen = lowered, [*own, *leaving]
        if chosen is None:
            return False
        _, worth = self._tried(Savepoint(search, []), blocked, chosen)
        if worth:
            self._note(blocked, worth, [seated for seated in chosen if seated.placement])
        return True

    def _tried(
        self, saved: Savepoint, blocked: BlockedGain, leaving: Sequence[PlannedReplica]
    ) -> tuple[float, Gain | None]:
        """Seat what is blocked in the place of those leaving; return by how much it is better."""
        standing = sum(1 for seated in leaving if seated.placement)
        worth = self._force([saved], blocked, leaving)
        # What has ended must not have to be started again for a guess that was too high.
        least = ENOUGH + 2 * START * standing
        return (saved.cost_before() - saved.cost_now() - least, worth) if worth else (0.0, None)

    def _force(
        self, saved: Sequence[Savepoint], blocked: BlockedGain, leaving: Sequence[PlannedReplica]
    ) -> Gain | None:
        """Seat what is blocked; those who left find other seats, or push others in their turn."""
        search, wish = self._search, blocked.wish
        touched = in_order([wish, *(seated.wish for seated in leaving)])
        for each in saved:
            for one in touched:
                each.touch(one)
        for seated in leaving:
            search.untake(seated)
        waits = any(seated.placement for seated in leaving)
        worth = search.worth(wish, blocked.site, soon=waits)
        if worth is None or worth.net <= ENOUGH or len(wish.seats) >= wish.most:
            return None
        search.take(wish, worth, waits=waits)
        if any(seated.seat for seated in leaving):
            search.blocked.clear()
            search.fill(only=touched)
            pushed = [b for b in search.blocked.values() if b.wish is not wish]
            for one in touched:
                if one is not wish:
                    pushed += self._wanted_by(one).values()
            if pushed and len(saved) <= CHAIN:
                second = max(pushed, key=lambda b: (b.net, -b.wish.number, -b.site))
                self._push_on(saved, second, wish)
        return worth

    def _push_on(
        self, saved: Sequence[Savepoint], pushed: BlockedGain, but: DeploymentState
    ) -> None:
        """Let what was pushed push another (not the wish that pushed it), if that is better."""
        holders = {
            node_id: [seated for seated in there if seated.wish is not but]
            for node_id, there in self.holders(standing=False).items()
        }
        own = self._given_up(pushed.wish)
        for leaving in self.cheapest(pushed, holders):
            inner = Savepoint(self._search, [])
            worth = self._force([*saved, inner], pushed, [own, *leaving] if own else leaving)
            if worth and inner.cost_now() < inner.cost_before() - ENOUGH:
                return
            inner.undo()

    def _note(self, blocked: BlockedGain, worth: Gain, standing: Sequence[PlannedReplica]) -> None:
        pop = self._search.ground.sites[blocked.site].pop
        reason = (
            f"its place in {pop} is worth {worth.net:.0f} ms x requests/s more to "
            f"{blocked.wish.name}, which has none free there"
        )
        self._yielding += [Preemption(seated=seated, reason=reason) for seated in standing]

    def cheapest(self, blocked: BlockedGain, holders: Holders) -> list[list[PlannedReplica]]:
        """Return whose leaving would make the room at a site, the least lost first."""
        wish = blocked.wish
        ways: list[Way] = []
        nodes = wish.deployment.engine.nodes
        for node in wish.nodes_of[blocked.site]:
            there = [s for s in holders.get(node.node_id, []) if s.wish is not wish]
            losses = {seated: _loss_for(blocked, seated) for seated in there}
            here = self._on_node(blocked, node.node_id, there, losses)
            for lost, leaving in here if nodes == 1 else here[:1]:
                if lost <= blocked.net or not any(seated.placement for seated in leaving):
                    ways.append((lost, leaving))
        ways.sort(key=itemgetter(0))
        if nodes == 1:
            # Others of the same deployments are no other way.
            apart = {tuple(sorted(s.wish.number for s in way[1])): way for way in reversed(ways)}
            return [leaving for _, leaving in sorted(apart.values(), key=itemgetter(0))[:2]]
        all_of_them = dict.fromkeys(seated for _, leaving in ways[:nodes] for seated in leaving)
        return [list(all_of_them)] if len(ways) >= nodes else []

    def _on_node(
        self, blocked: BlockedGain, node_id: NodeId, there: list[PlannedReplica], losses: Losses
    ) -> list[Way]:
        """Return who may leave a node: on each device those that lose least for what they free."""
        search, wish = self._search, blocked.wish
        needed = wish.memory_bytes // wish.deployment.engine.devices
        device_class = search.ground.sites[blocked.site].device_class
        ways: list[Way] = []
        for device in search.ground.nodes[node_id].devices:
            if device.device_class != device_class or not device.healthy:
                continue
            if device.memory_bytes < needed:
                continue
            ways.append(self._on_device(node_id, device.device_id, needed, there, losses))
        ways = sorted((w for w in ways if w[0] < np.inf), key=itemgetter(0))
        count = wish.deployment.engine.devices_per_node
        if count == 1 or len(ways) < count:
            return ways if count == 1 else []
        leaving = dict.fromkeys(seated for _, on_one in ways[:count] for seated in on_one)
        return [(sum(losses[seated] for seated in leaving), list(leaving))]

    def _on_device(
        self,
        node_id: NodeId,
        device_id: DeviceId,
        needed: int,
        there: list[PlannedReplica],
        losses: Losses,
    ) -> Way:
        short = needed - self._search.ground.free[node_id, device_id]
        if short <= 0:
            return 0.0, []
        held = [seated for seated in there if device_id in _devices(seated, node_id)]
        alone = [seated for seated in held if _bytes(seated) >= short]
        best: Way = (np.inf, [])
        if alone:
            one = min(alone, key=losses.__getitem__)
            best = (losses[one], [one])
        leaving: list[PlannedReplica] = []
        for seated in sorted(held, key=lambda s: losses[s] / _bytes(s)):
            if short <= 0:
                break
            leaving.append(seated)
            short -= _bytes(seated)
        lost = sum(losses[seated] for seated in leaving)
        return (lost, leaving) if short <= 0 and lost < best[0] else best


def _loss_for(blocked: BlockedGain, seated: PlannedReplica) -> float:
    """Return what one leaving costs; inf at once for what stands and is surely worth more."""
    paid = seated.hold + seated.start
    if seated.placement and seated.wish.loss_at_least(seated) - paid > blocked.net:
        return np.inf
    return _loss(seated)


def _loss(seated: PlannedReplica) -> float:
    return seated.wish.loss(seated) - seated.hold - seated.start


def _nodes(seated: PlannedReplica) -> Sequence[NodeId]:
    if seated.seat:
        return [part.node.node_id for part in seated.seat.parts]
    return seated.placement.node_ids if seated.placement else ()


def _devices(seated: PlannedReplica, node_id: NodeId) -> tuple[DeviceId, ...]:
    if seated.seat:
        return next(p.device_ids for p in seated.seat.parts if p.node.node_id == node_id)
    parts = seated.placement.parts if seated.placement else ()
    return next((part.device_ids for part in parts if part.node_id == node_id), ())


def _bytes(seated: PlannedReplica) -> int:
    held = seated.seat or seated.placement
    return max(1, held.memory_bytes) if held else 1

"""The predicted time of each slot with the congestion charge, for ranking.

ScannedCosts computes it for all slots. SearchedCosts computes it only where it may matter: it takes
the PoPs in the order of the best that one of their replicas may offer and stops where even that is
worse than what was found. Both give the same numbers, so ranking decides the same with either.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence, Set
from math import inf
from typing import Final, NamedTuple

from isochrone.wire.ids import ReplicaId
from router.decide.estimates import PopBound
from router.decide.health import split_ejected
from router.decide.latency import prefill_work
from router.decide.prefix_index import NO_MATCHES, slots_of
from router.decide.replica_table import RoutingSnapshot
from router.decide.route_query import RouteQuery
from router.decide.slow_start import is_held_back

SEARCHED_SLOTS_MIN: Final = 512
"""With fewer slots, examining all of them is as fast."""

FEW_HOLDERS_MAX: Final = 256
"""Up to this many replicas that hold more of a prompt than others are examined one by one. With
more, the bounds of all PoPs assume one of them."""

SKIPPED_MAX: Final = 2000
"""With more replicas excluded, all slots are examined."""

ROUNDING_MS: Final = 1e-6
"""Bounds are computed in another order than costs, so they may be wrong in the last digits."""


class BestTwo(NamedTuple):
    """The slot of lowest cost, -1 if none has capacity, and the second lowest cost."""

    slot: int
    second_ms: float


class SlotCosts(ABC):
    """The costs of one query by slot, infinite for a slot that is full, empty or excluded.

    An interface with two implementations below.
    """

    @abstractmethod
    def at(self, slot: int) -> float:
        """Return the cost of one slot."""

    def cheapest_of(self, slots: Collection[int]) -> int:
        """Return the first of these slots that has the lowest cost of them."""
        return min(slots, key=self.at)

    @abstractmethod
    def all(self) -> list[float]:
        """Return the costs of all slots."""

    @abstractmethod
    def excluded_count(self) -> int:
        """Return how many of the slots without a finite cost are not full."""

    @abstractmethod
    def best_two(self) -> BestTwo:
        """Return the slot of lowest cost, and the second lowest cost."""

    @abstractmethod
    def up_to(self, limit_ms: float) -> list[int]:
        """Return the slots of at most this cost, in their order."""


class ScannedCosts(SlotCosts):
    """The costs of all slots, all computed."""

    def __init__(
        self, snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId]
    ) -> None:
        """Compute the costs, then exclude what must not be chosen."""
        costs = _all_costs(snapshot, query)
        count = len(costs) - len(snapshot.slots)
        if excluded or snapshot.ejected_until_s:
            count += _exclude_unhealthy(snapshot, excluded, costs)
        if snapshot.starting:
            count += _exclude_starting(snapshot, query, costs)
        self._list = costs
        self._excluded_count = count

    def at(self, slot: int) -> float:
        """Return the cost of one slot."""
        return self._list[slot]

    def all(self) -> list[float]:
        """Return the costs of all slots."""
        return self._list

    def excluded_count(self) -> int:
        """Return how many of the slots without a finite cost are not full."""
        return self._excluded_count

    def best_two(self) -> BestTwo:
        """Return the slot of lowest cost, and the second lowest cost."""
        best, best_ms, second_ms = -1, inf, inf
        for slot, cost in enumerate(self._list):
            if cost < best_ms:
                best, best_ms, second_ms = slot, cost, best_ms
            elif cost < second_ms:
                second_ms = cost
        return BestTwo(best, second_ms)

    def up_to(self, limit_ms: float) -> list[int]:
        """Return the slots of at most this cost, in their order."""
        return [slot for slot, cost in enumerate(self._list) if cost <= limit_ms]


class _Holders:
    """Many slots that hold the same part of a prompt, and the work that this saves.

    `bits` has a bit for every slot, eight in a byte.
    """

    __slots__ = ("bits", "saved")

    def __init__(self, mask: int, slot_count: int, saved: float) -> None:
        self.bits = mask.to_bytes((max(slot_count, mask.bit_length()) + 7) // 8, "little")
        self.saved = saved


class SearchedCosts(SlotCosts):
    """Costs that are computed by PoP, as far as they may matter."""

    def __init__(
        self, snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId], skip: set[int]
    ) -> None:
        """Search among all slots but those to `skip`, which `excluded` and the snapshot imply."""
        self._snapshot = snapshot
        self._query = query
        self._excluded = excluded
        self._skip = skip
        self._scanned: ScannedCosts | None = None
        self._charged = 1.0 + snapshot.congestion_charge
        tokens, depth_cost = query.prompt_tokens, snapshot.depth_cost_per_token
        self._needed = tokens + query.output_tokens
        self._work = self._charged * prefill_work(
            tokens, tokens * query.matches.all_share, depth_cost
        )
        self._few: dict[int, float] = {}
        """The costs of the slots that hold more of the prompt than others do, but for `_many`."""
        self._many: list[_Holders] = []
        self._take_matches()
        self._apart: dict[int, list[int]] = {}
        """For each PoP, the slots that a search of the PoP leaves out."""
        for slot in (*self._few, *skip):
            self._apart.setdefault(snapshot.pop_of[slot], []).append(slot)
        self._is_searched = False
        self._pops: dict[int, list[float]] = {}
        """The costs of the slots of the PoPs looked at."""
        self._best, self._best_ms, self._second_ms = -1, inf, inf

    def at(self, slot: int) -> float:
        """Return the cost of one slot."""
        if slot in self._skip:
            return inf
        if slot in self._few:
            return self._few[slot]
        saved = 0.0
        for holders in self._many:
            if holders.bits[slot >> 3] >> (slot & 7) & 1:
                saved = holders.saved
        return self._costs([slot], saved)[0]

    def cheapest_of(self, slots: Collection[int]) -> int:
        """Return the first of these slots that has the lowest cost of them."""
        candidates = list(slots)
        costs = self._costs(candidates, 0.0)
        self._save_at_many(candidates, costs)
        for place, slot in enumerate(candidates):
            if slot in self._skip:
                costs[place] = inf
            elif slot in self._few:
                costs[place] = self._few[slot]
        return candidates[costs.index(min(costs))]

    def all(self) -> list[float]:
        """Return the costs of all slots."""
        return self._scan_all().all()

    def excluded_count(self) -> int:
        """Return how many of the slots without a finite cost are not full."""
        return self._scan_all().excluded_count()

    def best_two(self) -> BestTwo:
        """Return the slot of lowest cost, and the second lowest cost."""
        if not self._is_searched:
            self._is_searched = True
            self._note_best(list(self._few), list(self._few.values()))
            if self._second_ms == inf and self._snapshot.pop_order:
                # Two costs, so that most PoPs need not be looked at.
                self._look_at(self._snapshot.pop_order[0])
            for bound in self._pops_up_to(self._second_ms):
                if bound.least_ms > self._second_ms:
                    break
                self._look_at(bound.pop)
        return BestTwo(self._best, self._second_ms)

    def up_to(self, limit_ms: float) -> list[int]:
        """Return the slots of at most this cost, in their order."""
        found = [slot for slot, cost in self._few.items() if cost <= limit_ms]
        for bound in self._pops_up_to(limit_ms):
            self._look_at(bound.pop)
        for pop, costs in self._pops.items():
            if min(costs) <= limit_ms:
                slots = self._snapshot.pop_slots[pop]
                found += [slots[place] for place, cost in enumerate(costs) if cost <= limit_ms]
        return sorted(found)

    def _scan_all(self) -> ScannedCosts:
        if self._scanned is None:
            self._scanned = ScannedCosts(self._snapshot, self._query, self._excluded)
        return self._scanned

    def _take_matches(self) -> None:
        """Compute what is saved where more of the prompt is cached than everywhere."""
        query, snapshot = self._query, self._snapshot
        tokens, depth_cost = query.prompt_tokens, snapshot.depth_cost_per_token
        for mask, share in query.matches.longer:
            saved = self._work - self._charged * prefill_work(tokens, tokens * share, depth_cost)
            if mask.bit_count() <= FEW_HOLDERS_MAX:
                self._take_few(slots_of(mask), saved)
            else:
                self._many.append(_Holders(mask, len(snapshot.estimates), saved))
        if query.binding is not None and query.matches is NO_MATCHES:
            slot = snapshot.slots.get(query.binding.replica_id, -1)
            if slot >= 0:
                cached = min(query.binding.cached_tokens, tokens)
                work = self._charged * prefill_work(tokens, cached, depth_cost)
                self._take_few([slot], self._work - work)

    def _take_few(self, holders: Sequence[int], saved: float) -> None:
        # A holder may have lost its slot since.
        pop_of, skip = self._snapshot.pop_of, self._skip
        slots = [slot for slot in holders if pop_of[slot] >= 0 and slot not in skip]
        for slot, cost in zip(slots, self._costs(slots, saved), strict=True):
            self._few[slot] = cost

    def _costs(self, slots: list[int], saved: float) -> list[float]:
        """Return the costs of slots at which some work is saved, by the steps of `_all_costs`."""
        work, needed, now_ms = self._work, self._needed, self._snapshot.now_ms
        estimates = self._snapshot.estimates.of(slots)
        costs = [
            inf
            if needed > estimate.free_tokens
            else work * estimate.ms_per_token
            + (
                wait
                if (wait := estimate.ready_at_ms - now_ms) > (wait_min := estimate.wait_min_ms)
                else wait_min
            )
            for estimate in estimates
        ]
        if not saved:
            return costs
        return [
            cost - saved * estimate.ms_per_token
            for cost, estimate in zip(costs, estimates, strict=True)
        ]

    def _pops_up_to(self, limit_ms: float) -> list[PopBound]:
        """Return the PoPs not looked at yet that may have a slot of this cost, the best first.

        PoPs are kept in the order of their least wait, so most are not even compared.
        """
        snapshot, looked_at, work = self._snapshot, self._pops, self._work
        if self._many:
            work -= max(0.0, max([holders.saved for holders in self._many]))
        now_ms, waits, ready = snapshot.now_ms, snapshot.pop_wait_min_ms, snapshot.pop_ready_at_ms
        speeds = snapshot.pop_ms_per_token
        nearest_ms = work * snapshot.fastest_ms_per_token - ROUNDING_MS
        reached = bisect_right(snapshot.pop_floors, limit_ms - nearest_ms)
        pops = snapshot.pop_order[:reached]
        if snapshot.pop_loose:
            pops = list({*pops, *snapshot.pop_loose})
        found: list[PopBound] = []
        for pop in pops:
            if pop in looked_at:
                continue
            wait, wait_min = ready[pop] - now_ms, waits[pop]
            if wait < wait_min:
                wait = wait_min
            bound = work * speeds[pop] + wait - ROUNDING_MS
            if bound <= limit_ms:
                found.append(PopBound(bound, pop))
        found.sort()
        return found

    def _look_at(self, pop: int) -> None:
        """Compute the costs of a PoP's slots, and note the best two."""
        snapshot = self._snapshot
        slots = snapshot.pop_slots[pop]
        costs = self._costs(slots, 0.0)
        self._save_at_many(slots, costs)
        for slot in self._apart.get(pop, ()):
            costs[slots.index(slot)] = inf
        self._pops[pop] = costs
        if min(costs) <= self._second_ms:
            self._note_best(slots, costs)

    def _save_at_many(self, slots: list[int], costs: list[float]) -> None:
        """Lower the costs of the slots that are among many holders."""
        estimates = self._snapshot.estimates
        for holders in self._many:
            bits, saved = holders.bits, holders.saved
            for place, slot in enumerate(slots):
                if bits[slot >> 3] >> (slot & 7) & 1:
                    costs[place] -= saved * estimates[slot].ms_per_token

    def _note_best(self, slots: list[int], costs: list[float]) -> None:
        best, best_ms, second_ms = self._best, self._best_ms, self._second_ms
        for place, cost in enumerate(costs):
            if cost < best_ms:
                best, best_ms, second_ms = slots[place], cost, best_ms
            elif cost == best_ms and cost < inf:
                # The first slot of equal ones, as in a scan of all.
                best, second_ms = min(best, slots[place]), cost
            elif cost < second_ms:
                second_ms = cost
        self._best, self._best_ms, self._second_ms = best, best_ms, second_ms


def slot_costs(snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId]) -> SlotCosts:
    """Return the costs of a query, searched if there are many slots."""
    if len(snapshot.estimates) < SEARCHED_SLOTS_MIN or len(excluded) > SKIPPED_MAX:
        return ScannedCosts(snapshot, query, excluded)
    return searched_costs(snapshot, query, excluded)


def searched_costs(
    snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId]
) -> SlotCosts:
    """Return the costs of a query, searched where that finds a replica."""
    skip = _slots_to_skip(snapshot, query, excluded)
    searched = SearchedCosts(snapshot, query, excluded, skip)
    if searched.best_two().slot < 0:
        # Replicas of last resort, and those in slow start, count if there is no other.
        return ScannedCosts(snapshot, query, excluded)
    return searched


def _slots_to_skip(
    snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId]
) -> set[int]:
    """Return the slots that must not be chosen if another one has capacity."""
    split = split_ejected(snapshot.slots.keys(), snapshot.ejected_until_s)
    replicas = [*excluded, *split.excluded, *split.last_resort]
    subject = query.session or query.request_id
    replicas += [
        replica_id
        for replica_id, share in snapshot.starting.items()
        if is_held_back(replica_id, share, subject)
    ]
    slots = snapshot.slots
    return {slots[replica_id] for replica_id in replicas if replica_id in slots}


def _all_costs(snapshot: RoutingSnapshot, query: RouteQuery) -> list[float]:
    """Return the predicted time of each slot with the congestion charge; infinite if it is full."""
    now_ms = snapshot.now_ms
    tokens, depth_cost = query.prompt_tokens, snapshot.depth_cost_per_token
    needed = tokens + query.output_tokens
    charged = 1.0 + snapshot.congestion_charge
    work = charged * prefill_work(tokens, tokens * query.matches.all_share, depth_cost)
    estimates = snapshot.estimates.all()
    costs = [
        inf
        if needed > estimate.free_tokens
        else work * estimate.ms_per_token
        + (
            wait
            if (wait := estimate.ready_at_ms - now_ms) > (wait_min := estimate.wait_min_ms)
            else wait_min
        )
        for estimate in estimates
    ]
    for mask, share in query.matches.longer:
        saved = work - charged * prefill_work(tokens, tokens * share, depth_cost)
        for slot in slots_of(mask):
            costs[slot] -= saved * estimates[slot].ms_per_token
    if query.binding is not None and query.matches is NO_MATCHES:
        slot = snapshot.slots.get(query.binding.replica_id, -1)
        if slot >= 0:
            cached = min(query.binding.cached_tokens, tokens)
            saved = work - charged * prefill_work(tokens, cached, depth_cost)
            costs[slot] -= saved * estimates[slot].ms_per_token
    return costs


def _exclude_unhealthy(
    snapshot: RoutingSnapshot, excluded: Set[ReplicaId], costs: list[float]
) -> int:
    """Set the cost of excluded and ejected replicas to infinity; return how many were excluded.

    Replicas of last resort are excluded only if another replica has capacity, and then only those
    of them that have capacity are counted.
    """
    last_resort = frozenset[ReplicaId]()
    if snapshot.ejected_until_s:
        split = split_ejected(snapshot.slots.keys(), snapshot.ejected_until_s)
        excluded, last_resort = excluded | split.excluded, split.last_resort
    count = 0
    for replica_id in excluded:
        slot = snapshot.slots.get(replica_id, -1)
        if slot >= 0:
            count += 1
            costs[slot] = inf
    last = [snapshot.slots[replica] for replica in last_resort if replica in snapshot.slots]
    if last and any(cost < inf for slot, cost in enumerate(costs) if slot not in last):
        count += _exclude_slots(last, costs)
    return count


def _exclude_starting(snapshot: RoutingSnapshot, query: RouteQuery, costs: list[float]) -> int:
    """Exclude the replicas in slow start that hold this request back, if another has capacity.

    Return how many replicas with capacity were excluded.
    """
    held_back = {
        slot
        for replica_id, share in snapshot.starting.items()
        if (slot := snapshot.slots.get(replica_id, -1)) >= 0
        and is_held_back(replica_id, share, query.session or query.request_id)
    }
    if held_back and any(cost < inf for slot, cost in enumerate(costs) if slot not in held_back):
        return _exclude_slots(held_back, costs)
    return 0


def _exclude_slots(slots: Iterable[int], costs: list[float]) -> int:
    """Set the cost of slots to infinity; return how many of them had capacity."""
    count = 0
    for slot in slots:
        count += costs[slot] < inf
        costs[slot] = inf
    return count

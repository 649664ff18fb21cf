"""The predicted time of each slot with the congestion charge, for ranking."""

from collections.abc import Collection, Iterable, Set
from math import inf

from isochrone.native_class import mypyc_attr
from isochrone.wire.ids import ReplicaId
from router.decide.caches.prefix_index import NO_MATCHES
from router.decide.choice.route_query import RouteQuery
from router.decide.liveness.outlier_ejection import split_ejected
from router.decide.liveness.slow_start import is_held_back
from router.decide.replicas.latency import prefill_work
from router.decide.replicas.replica_table import RoutingSnapshot
from router.decide.replicas.slot_columns import SlotValues


@mypyc_attr(acyclic=True, free_list_len=1)
class BestTwo:
    """The slot of lowest cost, -1 if none has capacity, and the second lowest cost."""

    __slots__ = ("second_ms", "slot")

    def __init__(self, slot: int, second_ms: float) -> None:
        self.slot = slot
        self.second_ms = second_ms


@mypyc_attr(acyclic=True, free_list_len=1)
class SlotCosts:
    """The costs of one query by slot, infinite for a slot that is full, empty or excluded."""

    __slots__ = ("excluded_count", "values")

    def __init__(self, values: SlotValues, excluded_count: int) -> None:
        """Take costs, of which some are infinite although the slot is not full."""
        self.values = values
        self.excluded_count = excluded_count

    def at(self, slot: int) -> float:
        """Return the cost of one slot."""
        return self.values[slot]

    def cheapest_of(self, slots: Collection[int]) -> int:
        """Return the first of these slots that has the lowest cost of them."""
        return min(slots, key=self.values.__getitem__)

    def best_two(self) -> BestTwo:
        """Return the slot of lowest cost, and the second lowest cost."""
        slot, second_ms = self.values.best_two()
        return BestTwo(slot, second_ms)


def slot_costs(snapshot: RoutingSnapshot, query: RouteQuery, excluded: Set[ReplicaId]) -> SlotCosts:
    """Compute the costs of a query, those of replicas that must not be chosen infinite."""
    costs = _all_costs(snapshot, query)
    count = len(costs) - len(snapshot.slots)
    if excluded or snapshot.ejected_until_s:
        count += _exclude_unhealthy(snapshot, excluded, costs)
    if snapshot.starting:
        count += _exclude_starting(snapshot, query, costs)
    if query.adapter_ms:
        costs.add_outside(_bits_of(query.adapter_mask), query.adapter_ms)
    return SlotCosts(costs, count)


def _all_costs(snapshot: RoutingSnapshot, query: RouteQuery) -> SlotValues:
    """Return the predicted time of each slot with the congestion charge; infinite if it is full."""
    tokens, depth_cost = query.prompt_tokens, snapshot.depth_cost_per_token
    charged = 1.0 + snapshot.congestion_charge
    work = charged * prefill_work(tokens, tokens * query.matches.all_share, depth_cost)
    columns = snapshot.columns
    costs = columns.costs(snapshot.now_ms, work, tokens + query.output_tokens)
    for match in query.matches.longer:
        saved = work - charged * prefill_work(tokens, tokens * match.share, depth_cost)
        columns.save(costs, _bits_of(match.mask), saved)
    if query.binding is not None and query.matches is NO_MATCHES:
        slot = snapshot.slots.get(query.binding.replica_id, -1)
        if slot >= 0:
            cached = min(query.binding.cached_tokens, tokens)
            saved = work - charged * prefill_work(tokens, cached, depth_cost)
            columns.save(costs, _bits_of(1 << slot), saved)
    return costs


def _bits_of(mask: int) -> bytes:
    """Return a mask of slots as bytes, with the first eight slots in byte 0."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _exclude_unhealthy(
    snapshot: RoutingSnapshot, excluded: Set[ReplicaId], costs: SlotValues
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
    return count + _exclude_unless_all(last, costs)


def _exclude_starting(snapshot: RoutingSnapshot, query: RouteQuery, costs: SlotValues) -> int:
    """Exclude the replicas in slow start that hold this request back, if another has capacity.

    Return how many replicas with capacity were excluded.
    """
    held_back = [
        slot
        for replica_id, share in snapshot.starting.items()
        if (slot := snapshot.slots.get(replica_id, -1)) >= 0
        and is_held_back(replica_id, share, query.session or query.request_id)
    ]
    return _exclude_unless_all(held_back, costs)


def _exclude_unless_all(slots: Iterable[int], costs: SlotValues) -> int:
    """Set the cost of slots to infinity if another one has capacity.

    Return how many with capacity were excluded.
    """
    with_capacity = {slot: costs[slot] for slot in slots if costs[slot] < inf}
    if not with_capacity:
        return 0
    for slot in with_capacity:
        costs[slot] = inf
    if costs.best_two()[0] >= 0:
        return len(with_capacity)
    for slot, cost in with_capacity.items():
        costs[slot] = cost
    return 0

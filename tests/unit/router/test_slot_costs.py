"""Costs in columns are those of one loop over all replicas, whatever the replicas look like."""

import importlib.util
import random
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isochrone.wire.ids import DeploymentId, NodeId, PopId, ReplicaId
from isochrone.wire.peers.routes import Route
from router.decide.caches.affinity import SessionBinding
from router.decide.caches.prefix_index import NO_MATCHES, PrefixMatch, PrefixMatches
from router.decide.choice.ranking import RouteQuery, rank
from router.decide.choice.slot_costs import slot_costs
from router.decide.liveness.outlier_ejection import split_ejected
from router.decide.liveness.slow_start import is_held_back
from router.decide.replicas.columns_in_numpy import ColumnsInNumpy, ValuesInNumpy
from router.decide.replicas.latency import prefill_work
from router.decide.replicas.replica_table import ReplicaTable, RoutingSnapshot
from router.decide.replicas.slot_columns import SlotColumns, SlotValues, new_slot_columns
from router.decide.replicas.tokens_in_flight import InFlightLedger
from tests.c_module import compile_now

SOURCE = Path(__file__).parents[3] / "router/decide/replicas/column_scan.c"
NOW_S = 1000.0
POPS = 12


class Fleet(NamedTuple):
    """A table whose replicas have had some load, and the names of them."""

    table: ReplicaTable
    replicas: list[ReplicaId]
    now_s: float


def a_fleet(chance: random.Random, replicas: int, columns: SlotColumns) -> Fleet:
    """Make replicas in POPS PoPs, some of which left, came, were loaded and are idle again."""
    pops = [chance.randrange(POPS) for _ in range(replicas)]
    far_ms = [chance.choice((0.0, 5.0, 30.0, 200.0)) + chance.random() for _ in range(POPS)]
    routes = [
        Route(
            replica_id=ReplicaId(f"r{n}"),
            deployment_id=DeploymentId("d"),
            version=1,
            node_id=NodeId(f"n{n}"),
            pop=PopId(f"p{pop}"),
            address="x:1",
            tokens_in_flight_max=chance.choice((300, 5000, 10**6)),
            prefill_tokens_per_s=chance.choice((1000.0, 1000.0, 5300.0)),
        )
        for n, pop in enumerate(pops)
    ]
    table, ledger, now_s = ReplicaTable(), InFlightLedger(lambda: 0.0), NOW_S
    table.columns = columns
    table.set_routes(routes)
    for turn in range(4):
        if turn == 2:
            # Some slots become free, and new replicas take a part of them.
            left = [route for route in routes if chance.random() < 0.9] or routes
            table.set_routes(left)
            routes = left
        for route, pop in zip(routes, pops, strict=False):
            slot = table.slots[route.replica_id]
            if chance.random() < 0.4:
                ledger.reserve(
                    route.replica_id,
                    prefill=chance.choice((0, 50, 4000)),
                    decode=chance.choice((0, 200)),
                    work_ms=chance.choice((0.0, 30.0, 900.0)),
                    arrives_s=now_s,
                )
            if turn == 0 or chance.random() < 0.6:
                # Equal round trips make equal costs.
                rtt_ms = far_ms[pop] + chance.choice((0.0, 0.0, 1.0))
                table.refresh(slot, rtt_ms, ledger.load_of(route.replica_id), now_s)
        RoutingSnapshot(table, now_s, {}, {})
        now_s += chance.choice((0.001, 0.2, 3.0))
    table.queued_share = chance.choice((0.0, 0.5))
    table.spilled_at_ms = chance.choice((0.0, 1000 * now_s))
    return Fleet(table, [route.replica_id for route in routes], now_s)


def some_matches(chance: random.Random, fleet: Fleet) -> PrefixMatches:
    """Let some slots hold more of a prompt than the others."""
    slots = list(fleet.table.slots.values())
    chance.shuffle(slots)
    shares = sorted(chance.random() for _ in range(chance.randrange(4)))
    longer, all_share = [], chance.choice((0.0, 0.1))
    for share in shares:
        count = chance.choice((1, 3, len(slots) // 3))
        mask = sum(1 << slot for slot in slots[:count])
        del slots[:count]
        if mask:
            longer.append(PrefixMatch(mask, all_share + (1 - all_share) * share))
    return PrefixMatches(all_share, longer) if longer or all_share else NO_MATCHES


def a_query(chance: random.Random, fleet: Fleet) -> RouteQuery:
    bound = chance.choice([*fleet.replicas, ReplicaId("gone")])
    return RouteQuery(
        f"q{chance.random()}",
        chance.choice((4, 100, 6000)),
        100,
        chance.choice(("", "acme/session")),
        SessionBinding(bound, chance.choice((0, 80, 5000)), 0.0) if chance.random() < 0.5 else None,
        some_matches(chance, fleet),
        adapter_ms=chance.choice((0.0, 0.0, 40.0)),
        adapter_mask=chance.getrandbits(len(fleet.replicas)),
    )


def some(
    chance: random.Random, replicas: list[ReplicaId], shares: tuple[float, ...]
) -> list[ReplicaId]:
    """Draw about one of the shares of the replicas."""
    share = chance.choice(shares)
    return [replica_id for replica_id in replicas if chance.random() < share]


def scanned(snapshot: RoutingSnapshot, query: RouteQuery, excluded: set[ReplicaId]) -> list[float]:
    """Return the costs as one loop over all slots computes them."""
    tokens, depth_cost = query.prompt_tokens, snapshot.depth_cost_per_token
    charged = 1.0 + snapshot.congestion_charge
    all_share = query.matches.all_share
    work = charged * prefill_work(tokens, tokens * all_share, depth_cost)
    bound_slot = -1
    if query.binding is not None and query.matches is NO_MATCHES:
        bound_slot = snapshot.slots.get(query.binding.replica_id, -1)
    costs = []
    for slot in range(len(snapshot.routes)):
        estimate = snapshot.estimates[slot]
        wait_ms = max(estimate.ready_at_ms - snapshot.now_ms, estimate.wait_min_ms)
        cost = work * estimate.ms_per_token + wait_ms
        cached = tokens * all_share
        if any(match.mask >> slot & 1 for match in query.matches.longer):
            cached = tokens * query.matches.share_at(slot)
        elif slot == bound_slot and query.binding is not None:
            cached = min(query.binding.cached_tokens, tokens)
        if cached != tokens * all_share:
            saved = work - charged * prefill_work(tokens, cached, depth_cost)
            cost -= saved * estimate.ms_per_token
        if tokens + query.output_tokens > estimate.free_tokens:
            cost = inf
        costs.append(cost)
    split = split_ejected(snapshot.slots.keys(), snapshot.ejected_until_s)
    subject, places = query.session or query.request_id, snapshot.slots
    out = {places[name] for name in excluded | split.excluded if name in places}
    costs = [inf if slot in out else cost for slot, cost in enumerate(costs)]
    held_back = [
        replica
        for replica, share in snapshot.starting.items()
        if is_held_back(replica, share, subject)
    ]
    for unwanted in (split.last_resort, held_back):
        slots = {places[name] for name in unwanted if name in places}
        without = [inf if slot in slots else cost for slot, cost in enumerate(costs)]
        if min(without, default=inf) < inf:
            costs = without
    if query.adapter_ms:
        mask = query.adapter_mask
        costs = [cost + query.adapter_ms * (1 - (mask >> n & 1)) for n, cost in enumerate(costs)]
    return costs


@pytest.fixture(scope="module")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module of this very source, compiled now."""
    return compile_now(SOURCE, tmp_path_factory.mktemp("c"))


@pytest.fixture(params=["numpy", "c"])
def new_columns(
    request: pytest.FixtureRequest,
) -> Callable[[], SlotColumns]:
    """Return the columns of either build."""
    if request.param == "numpy":
        return ColumnsInNumpy
    module: ModuleType = request.getfixturevalue("in_c")
    new: Callable[[], SlotColumns] = module.SlotColumns
    return new


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**32), st.sampled_from((1, 3, 40, 160, 1024)))
def test_columns_decide_as_one_loop_over_all_replicas(
    new_columns: Callable[[], SlotColumns], seed: int, replicas: int
) -> None:
    chance = random.Random(seed)
    fleet = a_fleet(chance, replicas, new_columns())
    ejected = dict.fromkeys(some(chance, fleet.replicas, (0, 0.1, 0.9)), fleet.now_s + 1)
    starting = dict.fromkeys(some(chance, fleet.replicas, (0, 0.2, 1)), 0.3)
    snapshot = RoutingSnapshot(fleet.table, fleet.now_s, ejected, starting)
    excluded = set(fleet.replicas[: chance.choice((0, 0, 2, replicas))])
    for _ in range(3):
        query = a_query(chance, fleet)
        expected = scanned(snapshot, query, excluded)
        costs = slot_costs(snapshot, query, excluded)
        assert [costs.at(slot) for slot in range(len(expected))] == expected
        finite = sorted((cost, slot) for slot, cost in enumerate(expected) if cost < inf)
        best = costs.best_two()
        assert best.slot == (finite[0][1] if finite else -1)
        assert best.second_ms == (finite[1][0] if len(finite) > 1 else inf)
        slots = chance.sample(range(len(expected)), (len(expected) + 1) // 2)
        assert costs.cheapest_of(slots) == min(slots, key=expected.__getitem__)
        for limit_ms in (-1.0, best.second_ms, 300.0):
            up_to = [slot for slot, cost in enumerate(expected) if cost <= limit_ms]
            assert costs.values.up_to(limit_ms) == up_to
            assert costs.values.count_up_to(limit_ms) == len(up_to)
            found = [costs.values.nth_up_to(limit_ms, n) for n in range(len(up_to))]
            assert found == up_to
        routes = rank(snapshot, query, excluded)
        others = [slot for _, slot in finite if slot != routes._first]
        assert [snapshot.slots[route.route.replica_id] for route in list(routes)[1:]] == others
        assert len(routes) == len(finite)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, 2**32), st.sampled_from((0, 1, 20, 2040, 2100)))
def test_a_copy_of_columns_keeps_what_they_were(
    new_columns: Callable[[], SlotColumns], seed: int, slots: int
) -> None:
    chance = random.Random(seed)
    columns = new_columns()
    for _ in range(slots):
        columns.append()
    waits = [inf] * slots
    kept: list[tuple[SlotColumns, list[float]]] = [(columns, waits)]
    for _ in range(chance.choice((10, 1500))):
        changed, expected = chance.choice(kept) if chance.random() < 0.05 else kept[0]
        action = chance.random()
        if action < 0.05:
            changed.append()
            expected.append(inf)
        elif action < 0.15 and len(kept) < 30:
            kept.append((changed.copy(), expected.copy()))
        elif action < 0.9 and expected:
            slot = chance.randrange(min(len(expected), 40))
            expected[slot] = float(chance.randrange(1000))
            changed.replace(slot, -1.0, expected[slot], 0.0, inf)
        else:
            copy, expected = chance.choice(kept)
            assert waits_of(copy) == finite(expected)
    for copy, expected in kept:
        assert len(copy) == len(expected)
        assert waits_of(copy) == finite(expected)


def waits_of(columns: SlotColumns) -> dict[int, float]:
    """Return the waits of the slots that can be chosen."""
    costs = columns.costs(0.0, 1.0, 1.0)
    return {slot: costs[slot] for slot in costs.up_to(10**6)}


def finite(values: list[float]) -> dict[int, float]:
    return {slot: value for slot, value in enumerate(values) if value < inf}


@pytest.mark.parametrize("limit", [-1.0, 0.0, 2.5, inf])
def test_values_are_the_same_in_c_and_numpy(in_c: ModuleType, limit: float) -> None:
    both: list[SlotValues] = [ValuesInNumpy(), in_c.SlotValues()]
    for values in both:
        assert values.best_two() == (-1, inf)
        for number in (inf, 2.0, 0.5, inf, 0.5, 3.0, 2.5, 9.0, 1.0, 4.0):
            values.append(number)
        values[5] = 0.25
        values.add_outside(b"\x40\x01", 1.5)
        with pytest.raises(IndexError):
            values[10]
        with pytest.raises(IndexError):
            values[10] = 1.0
        with pytest.raises(IndexError):
            values.nth_up_to(limit, 10)
    in_numpy, as_in_c = ([values[slot] for slot in range(10)] for values in both)
    assert in_numpy == as_in_c == [inf, 3.5, 2.0, inf, 2.0, 1.75, 2.5, 10.5, 1.0, 5.5]
    assert both[0].best_two() == both[1].best_two() == (8, 1.75)
    assert both[0].up_to(limit) == both[1].up_to(limit)


def test_columns_in_c_refuse_what_they_cannot_use(in_c: ModuleType) -> None:
    columns = in_c.SlotColumns()
    columns.append()
    assert len(columns) == len(columns.copy()) == 1
    with pytest.raises(IndexError):
        columns.replace(1, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(TypeError):
        columns.replace(0, 0.0, 0.0, 0.0)
    with pytest.raises(TypeError):
        columns.replace(0, 0.0, 0.0, 0.0, "1")
    with pytest.raises(TypeError):
        columns.costs(0.0, 1.0)
    costs = columns.costs(0.0, 1.0, 0.0)
    with pytest.raises(TypeError):
        columns.save([1.0], b"1", 1.0)
    with pytest.raises(TypeError):
        columns.save(costs, 1, 1.0)
    with pytest.raises(ValueError, match="as many"):
        columns.save(in_c.SlotValues(), b"1", 1.0)
    with pytest.raises(TypeError):
        del costs[0]
    with pytest.raises(TypeError):
        in_c.SlotValues(1)
    columns.save(costs, b"\xff" * 9, 1.0)
    assert len(costs) == 1 and costs[0] == inf


def test_the_compiled_path_uses_the_columns_in_c() -> None:
    is_in_c = new_slot_columns is not ColumnsInNumpy
    assert is_in_c == (importlib.util.find_spec("router.decide.replicas.column_scan") is not None)

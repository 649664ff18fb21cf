"""A bounded number of histories, and proof that they find faults: fixes taken out are missed.

`python -m tests.simulation --count 10000 --processes 2` runs more.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from isochrone.service.clock import JumpFreeClock
from isochrone.wire.ids import Epoch, Generation
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaState
from isochrone.wire.peers.routes import RouteTable
from isochrone.wire.peers.table_parts import split_table
from nodeagent.decide.replicas.reconcile import reconcile
from router.decide.routes.table_acceptance import check_table
from router.decide.routes.withdrawn_routes import WithdrawnRoutes
from router.loops import follow_routes
from scheduler.decide.cluster import PlacementPlan
from scheduler.decide.membership import judge_liveness
from scheduler.decide.placement.planner import PlanBuilder
from scheduler.loops.hold_lease import HoldLease
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.first_reports import FirstReports
from scheduler.state.peers.peer_registry import PeerRegistry
from tests.simulation import store_functions, store_lease, store_reads, store_reports
from tests.simulation.history import KEYS, run_history
from tests.simulation.patches import replace_function, simulated
from tests.simulation.store import SimStore

HISTORIES: Final = 30
MANY_KEYS: Final = 200
"""So many that a table does not fit into a frame of the simulated network."""

PAST: Final = (812, 958, 1060, 1155, 1445, 1672, 5491, 5769)
"""Seeds that have found a fault."""


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with simulated() as patch:
        yield patch


def test_histories_keep_the_invariants(patch: pytest.MonkeyPatch) -> None:
    for seed in (*range(HISTORIES), *PAST):
        history = run_history(seed)
        assert not history.problems, str(history)


def test_histories_with_tables_beyond_a_frame_keep_the_invariants(
    patch: pytest.MonkeyPatch,
) -> None:
    for seed in range(6):
        history = run_history(seed, keys=MANY_KEYS)
        assert not history.problems, str(history)


def test_a_seed_is_one_history(patch: pytest.MonkeyPatch) -> None:
    one, again = (run_history(8, echo=True) for _ in range(2))
    assert one.log == again.log


class Mutation(NamedTuple):
    """A fix to take out, and the faults that need it."""

    name: str
    take_out: Callable[[pytest.MonkeyPatch], None]
    faults: Collection[str]
    finds: str = ""
    """Part of the problem, where other mutations cause other ones."""
    seed: int = 0
    """The history to try first: one that has found the mutation, where the first few do not."""
    keys: int = KEYS


def count_names_that_never_connected(patch: pytest.MonkeyPatch) -> None:
    def judge(nodes: Any, acting_for_s: float, limits: Any = None) -> Any:
        silent = [msgspec.structs.replace(node, has_connected=True) for node in nodes]
        return judge_liveness(silent, acting_for_s, limits)

    for module in ("placement.planner", "placement.fleet.sites"):
        name = f"scheduler.decide.{module}.judge_liveness"
        patch.setattr(name, judge, raising=False)
    for loop in ("publish_routes", "record_node_loss"):
        patch.setattr(f"scheduler.loops.{loop}.judge_liveness", judge)


def replace_nothing_while_frozen(patch: pytest.MonkeyPatch) -> None:
    def replace(builder: PlanBuilder, deployments: object) -> PlacementPlan:
        return builder.build(builder.draft_of([]))

    patch.setattr("scheduler.decide.placement.planner.replace_failed", replace)


def trust_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    follow_the_wall_clocks(patch)
    patch.setattr(JumpFreeClock, "now", lambda self: self._wall())


def follow_the_wall_clocks(patch: pytest.MonkeyPatch) -> None:
    def advance(at_s: float, elapsed_s: float, wall_s: float) -> float:
        return max(at_s, wall_s)

    patch.setattr("scheduler.loops.advance_history.advance", advance)


def keep_the_counters_of_a_backup(patch: pytest.MonkeyPatch) -> None:
    async def nothing_raised(connection: Any, **counters: Any) -> bool:
        return False

    replace_function(patch, "raise_epoch_and_generation", nothing_raised)


def take_the_lease_of_a_server_just_started(patch: pytest.MonkeyPatch) -> None:
    def start(self: Any) -> None:
        self.is_down = False

    patch.setattr(SimStore, "start", start)


def overlook_lost_history(patch: pytest.MonkeyPatch) -> None:
    # The wait for a new lease guards the same before: it has every peer register again.
    take_the_lease_of_a_server_just_started(patch)

    async def overlook(self: Any, lease: Any, stored: Any) -> Any:
        return lease

    patch.setattr(HoldLease, "_begin_after_loss", overlook)


def adopt_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_reports, "_adopt", lambda *arguments: 0)


def believe_a_stored_report(patch: pytest.MonkeyPatch) -> None:
    take_the_lease_of_a_server_just_started(patch)
    patch.setattr(PeerRegistry, "forget_stored_reports", lambda self: None)
    patch.setattr(PeerRegistry, "require_reports", lambda self, node_ids=None: None)


def follow_the_databases_clock(patch: pytest.MonkeyPatch) -> None:
    take = LeaseState.take

    def take_each_time(self: Any, lease: Any, requested_at: float) -> bool:
        is_new = take(self, lease, requested_at)
        self._acting_since = requested_at - lease.acting_for_s
        return is_new

    patch.setattr(LeaseState, "take", take_each_time)


def wait_out_a_lease_of_the_future(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_lease, "TTL_RATIO_MAX", 10**9)


def wait_for_a_hung_scheduler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("isochrone.service.network.control_link.HANDSHAKE_TIMEOUT_S", 1e9)


def write_with_any_epoch(patch: pytest.MonkeyPatch) -> None:
    async def assert_nothing(connection: Any, epoch: Any) -> None:
        await connection.round_trip()
        await connection.write()
        connection.wrote_with(epoch, connection.host)

    replace_function(patch, "assert_epoch", assert_nothing)
    for module in (store_functions, store_lease, store_reads, store_reports):
        patch.setattr(module, "assert_epoch", assert_nothing, raising=False)


def accept_any_table(patch: pytest.MonkeyPatch) -> None:
    _trust_the_first_table_after_a_loss(patch)
    patch.setattr(follow_routes, "check_table", lambda old, new, answering: None)


def accept_tables_that_drop_everything(patch: pytest.MonkeyPatch) -> None:
    _trust_the_first_table_after_a_loss(patch)

    def check(old: Any, new: Any, answering: Any) -> Any:
        refusal = check_table(old, new, answering)
        return refusal if refusal is not None and refusal.is_stale else None

    patch.setattr(follow_routes, "check_table", check)


def accept_any_assignment(patch: pytest.MonkeyPatch) -> None:
    # The counters that are raised after a restore guard the same before: no assignment is older.
    keep_the_counters_of_a_backup(patch)
    patch.setattr("nodeagent.node.assignment_problem", lambda *arguments: "")


def ask_no_withdrawn_replica(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WithdrawnRoutes, "silent", lambda self, now_s: ())


def stop_what_is_not_assigned(patch: pytest.MonkeyPatch) -> None:
    # Adoption guards the same replicas before: without it a node is sent what a backup knows.
    adopt_nothing(patch)

    def reconcile_by_absence(assignment: Any, replicas: Any, *rest: Any) -> Any:
        steps = reconcile(assignment, replicas, *rest)
        named = {spec.replica_id for spec in assignment.replicas}
        named |= {tombstone.replica_id for tombstone in assignment.tombstones}
        absent = [
            Tombstone(
                replica_id=replica_id, generation=assignment.generation, reason="not assigned"
            )
            for replica_id, state in replicas.items()
            if replica_id not in named and state is ReplicaState.WARM
        ]
        return msgspec.structs.replace(steps, stops=(*steps.stops, *absent))

    patch.setattr("nodeagent.loops.converge.reconcile", reconcile_by_absence)


def remember_only_the_last_withdrawn(patch: pytest.MonkeyPatch) -> None:
    adopt = WithdrawnRoutes.adopt

    def adopt_and_forget(self: Any, old: Any, new: Any, now_s: float) -> bool:
        has_lost_all = adopt(self, old, new, now_s)
        for replica_id, route in list(self._routes.items()):
            if route.deployment_id not in self._unrouted:
                self._forget(replica_id)
        return has_lost_all

    patch.setattr(WithdrawnRoutes, "adopt", adopt_and_forget)


def _trust_the_first_table_after_a_loss(patch: pytest.MonkeyPatch) -> None:
    # Two later fixes guard the same: no table is published before nodes report, and a router asks
    # withdrawn replicas at once.
    publish_before_nodes_report(patch)
    ask_no_withdrawn_replica(patch)


def publish_before_nodes_report(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_none(self: Any, pool: Any) -> bool:
        return False

    patch.setattr(FirstReports, "must_routes_wait", wait_for_none)


def forget_a_loss_at_a_takeover(patch: pytest.MonkeyPatch) -> None:
    noticed_by: set[str] = set()
    must_wait = FirstReports.must_routes_wait

    async def note(connection: Any, **counters: Any) -> bool:
        noticed_by.add(counters["holder"])
        return await store_lease.raise_epoch_and_generation(connection, **counters)

    async def wait_if_noticed(self: Any, pool: Any) -> bool:
        return self.lease.holder in noticed_by and await must_wait(self, pool)

    replace_function(patch, "raise_epoch_and_generation", note)
    patch.setattr(FirstReports, "must_routes_wait", wait_if_noticed)


def begin_on_any_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimStore, "server", "")


def keep_what_a_node_does_not_have(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store_reports, "_release_absent", lambda *arguments: False)


def start_without_memory(patch: pytest.MonkeyPatch) -> None:
    # The store guards the same: what it gives the memory of a running replica, it takes back.
    keep_what_a_node_does_not_have(patch)
    patch.setattr("nodeagent.decide.replicas.reconcile._memory_conflict", lambda *arguments: "")


def publish_whatever_is_stored(patch: pytest.MonkeyPatch) -> None:
    _trust_the_first_table_after_a_loss(patch)

    async def number_above(
        connection: Any, epoch: Epoch, above: Generation, *, keys_only: bool = False
    ) -> Generation:
        tables = await connection.write()
        tables.route_generation = max(tables.route_generation, above)
        return await store_functions.next_route_generation(
            connection, epoch, above, keys_only=keys_only
        )

    replace_function(patch, "next_route_generation", number_above)


def send_tables_in_one_frame(patch: pytest.MonkeyPatch) -> None:
    def whole(table: RouteTable, kept: object = None) -> Iterator[bytes]:
        return split_table(table, bytes_max=2**40)

    patch.setattr("scheduler.state.published_routes.split_table", whole)


SEEDS_MAX: Final = 400
"""So many histories may pass without a problem. Most mutations are found in the first few."""

MUTATIONS: Final = (
    Mutation(
        "names that never connected count as silent",
        count_names_that_never_connected, ("destroy",),
    ),
    Mutation("a frozen fleet replaces no failed replica", replace_nothing_while_frozen,
             ("freeze",), "replicas, not"),
    Mutation("a clock that jumps deletes history", trust_the_wall_clock, ("jump",)),
    Mutation("a clock that has jumped before the start deletes history", follow_the_wall_clocks,
             ("jump", "crash_scheduler"), seed=1),
    Mutation("a restored backup keeps its counters", keep_the_counters_of_a_backup,
             ("restore", "operate", "crash_scheduler"), seed=10),
    Mutation("history lost under a scheduler goes unnoticed", overlook_lost_history,
             ("restore", "operate")),
    Mutation("replicas that a backup lacks are not adopted", adopt_nothing,
             ("restore", "operate"), seed=21),
    Mutation("stored reports are believed after a loss", believe_a_stored_report,
             ("restore", "operate", "crash_database"), seed=4),
    Mutation("a node accepts any assignment", accept_any_assignment,
             ("restore", "operate", "crash_scheduler"), "n1 goes back from epoch", seed=1),
    Mutation("the grace of a term follows the database's clock", follow_the_databases_clock,
             ("jump", "destroy", "crash_scheduler"), seed=19),
    Mutation("a lease that expires in an hour is waited for", wait_out_a_lease_of_the_future,
             ("jump", "crash_scheduler", "hang_scheduler"), seed=15),
    Mutation("a peer waits for a scheduler that hangs", wait_for_a_hung_scheduler,
             ("hang_scheduler", "pause_scheduler", "cut_all")),
    Mutation("a write is not fenced by its epoch", write_with_any_epoch,
             ("jump", "pause_scheduler", "slow"), seed=2),
    Mutation("an epoch repeats after a restore shorter than a lease",
             take_the_lease_of_a_server_just_started,
             ("restore", "crash_scheduler"), seed=4),
    Mutation("a router accepts any table", accept_any_table,
             ("restore",)),
    Mutation("a router accepts a table that drops everything", accept_tables_that_drop_everything,
             ("restore",)),
    Mutation("routes are published from a database that lost some", publish_whatever_is_stored,
             ("restore", "operate"), "has no route to", seed=6),
    Mutation("the first table after a loss waits for no report", publish_before_nodes_report,
             ("restore", "operate", "crash_peer", "cut_all"), "has no route to", seed=18),
    Mutation("a scheduler that takes over does not know of a loss", forget_a_loss_at_a_takeover,
             ("take_over",), "has no route to f", seed=9),
    Mutation("the first term on a restored server publishes at once", begin_on_any_server,
             ("take_over", "crash_scheduler", "crash_peer"), "has no route to f", seed=89),
    Mutation("a node starts what does not fit beside replicas that are not assigned",
             start_without_memory, ("take_over", "crash_scheduler", "crash_peer", "operate"),
             "the engines of", seed=120),
    Mutation("what a node does not have does not give way to what it runs",
             keep_what_a_node_does_not_have,
             ("take_over", "crash_scheduler", "crash_peer", "operate"), "has no route to f",
             seed=461),
    Mutation("only the last withdrawn replicas are asked", remember_only_the_last_withdrawn,
             ("break_engines", "crash_database", "lose_power"), "has no route to", seed=48),
    Mutation("a withdrawn replica is not asked again", ask_no_withdrawn_replica,
             ("kill_engine", "crash_database"), seed=45),
    Mutation("a replica that is not assigned is stopped", stop_what_is_not_assigned,
             ("restore", "operate"), seed=21),
    Mutation("a table goes in one frame", send_tables_in_one_frame, ("crash_peer",),
             "has no table", keys=MANY_KEYS),
)  # fmt: skip


@contextmanager
def taken_out(mutation: Mutation) -> Iterator[None]:
    with simulated() as patch:
        mutation.take_out(patch)
        yield


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fix_that_is_taken_out_is_missed(mutation: Mutation) -> None:
    with taken_out(mutation):
        for seed in (mutation.seed, *range(SEEDS_MAX)):
            problems = run_history(seed, only=mutation.faults, keys=mutation.keys).problems
            if any(mutation.finds in problem for problem in problems):
                return
    raise AssertionError(f"{SEEDS_MAX} histories found nothing wrong without the fix")


def test_older_assignments_reach_no_node_where_only_the_counters_are_missing(
    patch: pytest.MonkeyPatch,
) -> None:
    """What the mutation above finds is not found with the node's own check in place."""
    keep_the_counters_of_a_backup(patch)
    for seed in range(9):
        history = run_history(seed, only=("restore", "operate", "crash_scheduler"))
        assert not any(
            problem.startswith("n") and "goes back" in problem for problem in history.problems
        ), str(history)

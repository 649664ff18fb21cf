"""Roles in the simulator: one small cell of the table, and what a transfer takes."""

from collections import Counter

import pytest

from isochrone.wire.models.model import AUTO_ROLES, UNIFIED_ROLES, PlacementPolicy
from isochrone.wire.peers.assignment import Role
from ops.sim.data import EXTRACT
from ops.sim.replica_job import ReplicaJob
from ops.sim.role_replica import RoleReplica, TransferredKv
from ops.sim.role_worlds import WORLDS, roles_in_pop
from ops.sim.roles_table import (
    OURS,
    RIVALS,
    PreparedCell,
    RolePolicyRun,
    TableTask,
    misses,
    table_lines,
)
from ops.sim.traces import TraceRequest
from ops.sim.world import LLAMA_70B_TODAY, ReplicaSite
from scheduler.decide.placement.roles import TokenMix

TTFT_RATIO_MAX = 1.5
"""Our p90 with roles over ours without, on a mix that is mostly prompt at half load."""


def test_roles_keep_gaps_short_and_first_tokens_early_on_long_prompts() -> None:
    task = TableTask(EXTRACT, WORLDS[0], 50, 300, 0)
    requests = WORLDS[0].requests(EXTRACT, 300, 0)
    cell = PreparedCell(task, requests, 0.15)
    roles = cell.run(OURS)
    unified = cell.run(RolePolicyRun("ours", UNIFIED_ROLES, 512))
    assert roles.read_elsewhere > 50
    assert roles.ttft_p90_ms <= TTFT_RATIO_MAX * unified.ttft_p90_ms
    assert roles.gap_p90_ms <= 0.6 * unified.gap_p90_ms
    round_robin = cell.run(RIVALS[2])
    assert round_robin.product > 2 * roles.product
    assert misses([roles, roles]) == []
    assert misses([unified, roles])[0].startswith("TTFT 1.")
    behind = misses([roles, unified, roles])
    assert behind[-1].startswith("gap behind ours, auto")
    assert len(table_lines([[roles, roles]])) == 8


@pytest.mark.parametrize(
    ("uncached", "output", "prefill"),
    [(9000.0, 300.0, 2), (700.0, 1200.0, 0), (13_000.0, 100.0, 3)],
)
def test_the_planner_gives_roles_by_the_mix(uncached: float, output: float, prefill: int) -> None:
    mix = TokenMix(
        uncached_per_s=uncached, output_per_s=output, prefill_rate=13_800.0, decode_rate=1100.0
    )
    roles = Counter(roles_in_pop(PlacementPolicy(roles=AUTO_ROLES), mix, 4))
    assert roles[Role.PREFILL] == prefill
    if not prefill:
        assert roles == {Role.UNIFIED: 4}


def test_a_transfer_ends_after_its_last_block_and_after_those_before_it() -> None:
    link = TransferredKv(100.0)
    assert link.end_s(0.0, 10.0, 500.0, 50.0) == 10.5
    # The link is busy until then.
    assert link.end_s(0.0, 1.0, 500.0, 50.0) == 15.5


def test_a_sequence_whose_kv_arrived_decodes_without_a_step_that_reads() -> None:
    profile = LLAMA_70B_TODAY.large
    replica = RoleReplica(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s), 1e9)
    request = TraceRequest(1, 0.0, 4000, 11, (), 64, "", 0.0)
    job = ReplicaJob(request, 4512, 4000, 0, 0.0)
    assert replica.admit_elsewhere(job, 0.0)
    assert (replica.queued_tokens(0.0), replica.decoding) == (0, 1)
    replica.receive_kv(job, 0)
    assert replica.settle(1.0).first_tokens == [job]
    assert job.first_token_at_s == pytest.approx(1.0 + profile.step_s, rel=0.05)
    ended_s = replica.next_event_s()
    assert replica.settle(ended_s).ended == [job]
    assert ended_s == pytest.approx(1.0 + 10 * profile.step_s, rel=0.05)
    assert sum(replica.gaps.values()) == pytest.approx(10_000, rel=0.01)
    assert (replica.prefill_tokens, replica.decode_tokens, replica.running) == (0, 0, 0)


def test_a_prompt_that_no_other_replica_reads_is_read_here() -> None:
    profile = LLAMA_70B_TODAY.large
    replica = RoleReplica(ReplicaSite(0, 0, profile, profile.prefill_tokens_per_s), 1e9)
    job = ReplicaJob(TraceRequest(1, 0.0, 4000, 1, (), 64, "", 0.0), 4512, 4000, 0, 0.0)
    assert replica.admit_elsewhere(job, 0.0)
    replica.read_here(job, 0.5)
    assert replica.reading is job
    assert replica.settle(replica.next_event_s()).ended == [job]
    assert (replica.prefill_tokens, replica.pending_prefill_tokens, replica.running) == (0, 0, 0)

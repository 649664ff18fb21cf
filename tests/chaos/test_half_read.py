"""The connection to Postgres breaks anywhere in a snapshot: it is read whole or not at all."""

import tempfile
from pathlib import Path

import msgspec

from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership import LivenessLimits, NodeContact
from scheduler.planner.server import PlannerServer
from scheduler.store.pool import UNAVAILABLE, Pool, open_pool
from tests.builders import a_replica_report, a_spec
from tests.chaos.cable import a_cable
from tests.integration.scheduler.test_store import begun, planned, reported
from tests.postgres import Server

STEP_BYTES = 700


async def test_a_snapshot_cut_anywhere_is_no_snapshot(
    pool: Pool, postgres_server: Server, database_dsn: str
) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"))
    await reported(pool, epoch, seq=2, replicas=(a_replica_report(a_spec("r1")),))
    socket = ".s.PGSQL.5432"
    with tempfile.TemporaryDirectory() as name:
        at = Path(name) / socket
        async with a_cable(postgres_server.folder / "pg" / socket, at=at) as cable:
            dsn = database_dsn.replace(str(postgres_server.folder / "pg"), name)
            through = await open_pool(dsn, size_max=1)
            whole = await a_snapshot(pool)
            cut = read = 0
            for size in range(STEP_BYTES, 40_000, STEP_BYTES):
                await through.expire_connections()
                cable.down.bytes_max = size
                try:
                    assert await a_snapshot(through) == whole
                    read += 1
                except UNAVAILABLE:
                    cut += 1
                if read > 2:
                    break
            cable.mend()
            assert read > 2
            assert cut > 4
            assert await a_snapshot(through) == whole
            await through.close()


async def a_snapshot(pool: Pool) -> ClusterState:
    """Read what placement decides from, without what only passes."""
    server = PlannerServer(pool, LivenessLimits())
    snapshot = await server.cluster_state(NodeContact(acting_for_s=99.0))
    still = {"age_s": 0.0, "state_age_s": 0.0}
    return msgspec.structs.replace(
        snapshot,
        placements=tuple(msgspec.structs.replace(p, **still) for p in snapshot.placements),
        nodes=tuple(msgspec.structs.replace(node, silent_s=0.0) for node in snapshot.nodes),
    )

"""Where the master of a PoP's store of KV runs, as the store says and as nodes are told."""

from collections.abc import Iterable
from typing import Any, cast

from isochrone.wire.ids import BootId, ClusterId, Epoch, Generation, NodeId, PopId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.control import PeerRole
from scheduler.decide.cluster import PlacementPlan, ReplicaStart
from scheduler.loops.place_store_masters import PlaceStoreMasters
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.store.fleet.identities import add_peer
from scheduler.store.fleet.nodes import read_assignment, record_registration, record_report
from scheduler.store.fleet.plans import commit_plan
from scheduler.store.lease import read_cluster_row
from scheduler.store.pool import Pool, transaction, using
from tests.builders import a_certificate, a_report, a_spec, believed
from tests.integration.scheduler.test_store import begun, reported

SHARED = EngineSettings(driver="vllm", kv_memory_bytes=1, share_kv=True)


async def two_members(pool: Pool) -> Epoch:
    """Two nodes of a PoP; n1 has the first replica that shares KV, n2 the second."""
    epoch = await begun(pool)
    await reported(pool, epoch)
    async with transaction(pool) as connection:
        await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))
        where = (connection, PeerRole.AGENT, "n2", BootId("boot-1"), Generation(0))
        await record_registration(*where, a_certificate("n2"), "")
        await record_report(connection, epoch, a_report("n2"), believed)
    for node, name in (("n1", "r1"), ("n2", "r2")):
        async with transaction(pool) as connection:
            row = await read_cluster_row(connection)
            spec = a_spec(name, engine=SHARED)
            start = ReplicaStart(node_id=NodeId(node), spec=spec, reason="test")
            assert await commit_plan(
                connection, PlacementPlan(based_on=row.generation, starts=(start,)), epoch
            )
    return epoch


async def told(pool: Pool, epoch: Epoch) -> dict[str, str]:
    """Return what each node's assignment says of the master."""
    found = {}
    for name in ("n1", "n2"):
        async with using(pool) as connection:
            assignment = await read_assignment(
                connection, NodeId(name), cluster_id=ClusterId("c1"), epoch=epoch
            )
        place = assignment.store_master
        found[name] = place.node_id if place else ""
    return found


async def change(pool: Pool, statement: str) -> None:
    async with transaction(pool) as connection:
        await connection.execute(statement)


async def test_all_nodes_of_a_pop_are_told_one_place_for_the_master(pool: Pool) -> None:
    epoch = await two_members(pool)
    assert await told(pool, epoch) == {"n1": "n1", "n2": "n1"}
    for away, back in (
        ("UPDATE node SET draining = true", "UPDATE node SET draining = false"),
        ("UPDATE node SET lost_at = clock_timestamp()", "UPDATE node SET lost_at = NULL"),
        ("UPDATE node SET revoked = true", "UPDATE node SET revoked = false"),
    ):
        await change(pool, f"{away} WHERE node_id = 'n1'")
        assert await told(pool, epoch) == {"n1": "n2", "n2": "n2"}
        await change(pool, f"{back} WHERE node_id = 'n1'")
    await change(pool, "UPDATE placement SET state = 'failed' WHERE replica_id = 'r1'")
    assert await told(pool, epoch) == {"n1": "n2", "n2": "n2"}


async def test_replicas_that_do_not_share_through_a_store_need_no_master(pool: Pool) -> None:
    epoch = await two_members(pool)
    for field, value in (("driver", '"embedded"'), ("share_kv", "false")):
        await change(
            pool, f"UPDATE placement SET spec = jsonb_set(spec, '{{engine,{field}}}', '{value}')"
        )
        assert await told(pool, epoch) == {"n1": "", "n2": ""}


class Outbox:
    """Notes the nodes that are sent their assignments."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send_to(self, node_ids: Iterable[str]) -> int:
        self.sent += node_ids
        return len(self.sent)


class Lease:
    is_acting = True


async def test_nodes_are_sent_the_new_place_once_it_moves(pool: Pool) -> None:
    await two_members(pool)
    outbox, lease = Outbox(), Lease()
    job = PlaceStoreMasters(
        pool=pool,
        lease=cast(LeaseState, cast(Any, lease)),
        assignments=cast(AssignmentOutbox, cast(Any, outbox)),
    )

    async def turn() -> list[str]:
        outbox.sent = []
        await job.run_once()
        return outbox.sent

    assert await turn() == ["n1", "n2"]
    assert await turn() == []
    await change(pool, "UPDATE node SET draining = true WHERE node_id = 'n1'")
    assert await turn() == ["n1", "n2"]
    await change(
        pool,
        "UPDATE placement SET ended_at = clock_timestamp(), ended_generation = 1"
        " WHERE replica_id = 'r1'",
    )
    assert await turn() == ["n1"], "it has no member any more, and may still run the master"
    lease.is_acting = False
    assert await turn() == []
    lease.is_acting = True
    assert await turn() == ["n2"], "a new term sends what it cannot know was sent"

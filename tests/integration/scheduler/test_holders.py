"""The store tells a node where to fetch weights, from the artifacts that nodes report."""

from isochrone.wire.admin import PopBody
from isochrone.wire.ids import BootId, Epoch, Generation, NodeId, PopId
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import ReplicaState
from scheduler.store import catalogue
from scheduler.store.fleet.identities import add_peer
from scheduler.store.fleet.nodes import read_assignment, record_registration, record_report
from scheduler.store.lease import read_cluster_row
from scheduler.store.pool import Pool, transaction
from tests.builders import a_certificate, a_replica_report, a_report, a_spec, an_artifact, believed
from tests.integration.scheduler.test_store import begun, planned

DIGEST = an_artifact().digest


async def a_node(pool: Pool, epoch: Epoch, name: str, pop: str, *held: str, seq: int = 1) -> None:
    async with transaction(pool) as connection:
        if await catalogue.get_pop(connection, pop) is None:
            place = PopBody(city=pop, country="DE", latitude=50.0, longitude=8.6)
            await catalogue.put_pop(connection, pop, place, None)
        if seq == 1:
            await add_peer(connection, PeerRole.AGENT, name, PopId(pop))
            await record_registration(
                connection,
                PeerRole.AGENT,
                name,
                BootId("boot-1"),
                Generation(0),
                a_certificate(name),
                "",
            )
        report = a_report(name, seq, artifacts=held, address=f"http://{name}")
        assert not (await record_report(connection, epoch, report, believed)).stale


async def sources_of(pool: Pool, epoch: Epoch, node: str = "n1") -> dict[str, list[str]]:
    async with transaction(pool) as connection:
        row = await read_cluster_row(connection)
        assignment = await read_assignment(
            connection, NodeId(node), cluster_id=row.cluster_id, epoch=epoch
        )
    return {named.digest: [peer.node_id for peer in named.peers] for named in assignment.holders}


async def test_only_a_node_that_has_to_fetch_is_told_the_holders(pool: Pool) -> None:
    epoch = await begun(pool)
    async with transaction(pool) as connection:
        await record_report(connection, epoch, a_report(), believed)
    await a_node(pool, epoch, "far", "fra", DIGEST, "ee" * 32)
    await a_node(pool, epoch, "near", "ams", DIGEST)
    assert await sources_of(pool, epoch) == {}, "it has nothing to fetch"
    assert await planned(pool, epoch, a_spec("r1", artifact=an_artifact()))
    assert await sources_of(pool, epoch) == {DIGEST: ["near", "far"]}
    # Nodes that evicted it or are silent are not sources.
    await a_node(pool, epoch, "near", "ams", seq=2)
    assert await sources_of(pool, epoch) == {DIGEST: ["far"]}
    async with transaction(pool) as connection:
        await connection.execute(
            "UPDATE node SET last_seen_at = last_seen_at - interval '1 minute'"
            " WHERE node_id = 'far'"
        )
    assert await sources_of(pool, epoch) == {}
    await a_node(pool, epoch, "far", "fra", DIGEST, seq=2)
    assert await sources_of(pool, epoch) == {DIGEST: ["far"]}
    # A node whose replica is past fetching needs no sources.
    async with transaction(pool) as connection:
        running = a_replica_report(a_spec("r1", artifact=an_artifact()), ReplicaState.LOADING)
        await record_report(connection, epoch, a_report(seq=2, replicas=(running,)), believed)
    assert await sources_of(pool, epoch) == {}


async def test_nodes_of_a_pop_wait_for_the_first_one_that_fetches(pool: Pool) -> None:
    epoch = await begun(pool)
    async with transaction(pool) as connection:
        await record_report(connection, epoch, a_report(), believed)
    await a_node(pool, epoch, "n2", "ams")
    assert await planned(pool, epoch, a_spec("r1", artifact=an_artifact()))
    async with transaction(pool) as connection:
        await connection.execute(
            """
            INSERT INTO placement (replica_id, deployment_id, version, node_id, memory_bytes,
                                   spec, reason, placed_generation)
            SELECT 'r2', deployment_id, version, 'n2', 0,
                   jsonb_set(spec, '{replica_id}', '"r2"'), reason, placed_generation
            FROM placement WHERE replica_id = 'r1'
            """
        )
    assert await sources_of(pool, epoch, "n1") == {}
    assert await sources_of(pool, epoch, "n2") == {DIGEST: ["n1"]}

"""A database server that fails before each statement of each write, and after its COMMIT.

No write is left half done. A write that was committed although its writer saw an error is not done
twice when it is repeated.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import msgspec
import pytest

from isochrone.service.clock import utc_now
from isochrone.wire.admin import KeyBody
from isochrone.wire.ids import BootId, DeploymentId, Epoch, Generation, KeyId, NodeId, PopId
from isochrone.wire.peers.assignment import ReplicaGroup
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import Refusal, ReplicaProfile
from scheduler.decide.cluster import PlacementPlan, ReplicaEnding, ReplicaStart
from scheduler.decide.demand import accept_demand
from scheduler.decide.rollout import RolloutEvent, apply_event
from scheduler.store import deployments
from scheduler.store.accounts import keys
from scheduler.store.accounts.quotas import sum_quota_usage
from scheduler.store.accounts.usage import record_demand, rotate_demand_partitions
from scheduler.store.fleet.identities import add_join_token, add_peer, revoke, use_join_token
from scheduler.store.fleet.nodes import record_registration, record_report
from scheduler.store.fleet.plans import commit_plan
from scheduler.store.lease import raise_epoch_and_generation, read_cluster_row
from scheduler.store.pool import UNAVAILABLE, Connection, Pool, transaction
from scheduler.store.rollouts import add_rollout, write_rollout
from tests.builders import a_certificate, a_replica_report, a_report, a_spec, believed
from tests.faults import Faults
from tests.integration.scheduler.test_store import begun, planned, reported
from tests.unit.scheduler.test_intake import a_demand, a_row
from tests.unit.scheduler.test_rollout import a_rollout

STATEMENTS_MAX = 60
EPOCH = Epoch(1)

Write = Callable[[Connection], Awaitable[Any]]


async def register(connection: Connection) -> None:
    await raise_epoch_and_generation(
        connection, holder="s1", generation=Generation(9), epoch=Epoch(0)
    )
    await record_registration(
        connection, PeerRole.AGENT, "n1", BootId("b2"), Generation(9), a_certificate("n1"), ""
    )


async def report(connection: Connection) -> None:
    unknown = a_spec("lost-1", deployment_id=DeploymentId("lost"), name="lost-model")
    known = msgspec.structs.replace(
        a_replica_report(a_spec("r1")), profile=ReplicaProfile(decode_tokens_per_s=9.0)
    )
    refusal = Refusal(replica_id=a_spec("r2").replica_id, reason="no such device")
    message = a_report(
        seq=9,
        replicas=(known, a_replica_report(unknown)),
        refusals=(refusal,),
        artifacts=("a" * 64,),
    )
    await record_report(connection, EPOCH, message, believed)


async def commit(connection: Connection) -> None:
    generation = (await read_cluster_row(connection)).generation
    if await connection.fetchval("SELECT count(*) FROM placement WHERE replica_id = 'r9'"):
        return
    parts = [
        a_spec(
            f"r{place}",
            group=ReplicaGroup(
                leader_id=a_spec("r8").replica_id, place=place - 8, nodes=2, host="h", port=1
            ),
        )
        for place in (8, 9)
    ]
    follower = ReplicaStart(node_id=NodeId("n2"), spec=parts[1], reason="test")
    start = ReplicaStart(node_id=NodeId("n1"), spec=parts[0], reason="test", followers=(follower,))
    ending = ReplicaEnding(replica_id=a_spec("r1").replica_id, node_id=NodeId("n1"), reason="test")
    plan = PlacementPlan(based_on=generation, starts=(start,), endings=(ending,))
    assert await commit_plan(connection, plan, EPOCH)


async def join(connection: Connection) -> None:
    spent = await use_join_token(
        connection, token_id="t1", secret_sha256="x", role=PeerRole.AGENT, name="n9"
    )
    if spent is not None:
        await add_peer(connection, PeerRole.AGENT, "n9", PopId("ams"))


async def send_demand(connection: Connection) -> None:
    demand = a_demand(a_row(requests=3), seq=1)
    await record_demand(connection, demand, accept_demand(PopId("ams"), demand))


async def roll_out(connection: Connection) -> None:
    if await add_rollout(connection, a_rollout()):
        assert await write_rollout(
            connection, a_rollout(), apply_event(a_rollout(), RolloutEvent.PAUSE, "test")
        )


async def revoke_and_delete(connection: Connection) -> None:
    await keys.revoke_key(connection, "k", None)
    await revoke(connection, PeerRole.AGENT, "n2", reason="test")
    if await deployments.get_deployment(connection, "d") is not None:
        await deployments.delete_deployment(connection, "d", None)


async def aggregate(connection: Connection) -> None:
    await sum_quota_usage(connection)
    await rotate_demand_partitions(connection, utc_now())


WRITES = [
    register,
    report,
    commit,
    join,
    send_demand,
    roll_out,
    revoke_and_delete,
    aggregate,
]


async def all_rows(dsn: str) -> dict[str, list[str]]:
    connection = await asyncpg.connect(dsn)
    names = await connection.fetch("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p')"
                                   " AND relnamespace = 'public'::regnamespace")  # fmt: skip
    rows = {
        name: [row[0] for row in await connection.fetch(f"SELECT t::text FROM {name} t ORDER BY 1")]
        for (name,) in names
    }
    await connection.close()
    return rows


@pytest.mark.parametrize("write", WRITES, ids=lambda write: str(write.__name__))
async def test_no_write_is_left_half_done_or_done_twice(
    write: Write, pool: Pool, database_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await begun(pool) == EPOCH
    async with transaction(pool) as connection:
        await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))
        await connection.execute("UPDATE node SET boot_id = 'boot-1'")
        await record_report(connection, EPOCH, a_report("n2"), believed)
        await add_join_token(
            connection, token_id="t1", secret_sha256="x", role="agent", pop="ams", ttl_s=60.0
        )
        await keys.add_key(
            connection, key_id=KeyId("k"), secret_sha256="0" * 64, body=KeyBody(tenant_id="t")
        )
    await reported(pool, EPOCH)
    assert await planned(pool, EPOCH, a_spec("r1"))
    before = await all_rows(database_dsn)
    faults = Faults(monkeypatch, database_dsn)
    for number in range(1, STATEMENTS_MAX):
        faults.broken.clear()
        faults.break_before(number)
        faults.lose_commit()
        with pytest.raises(UNAVAILABLE):
            async with transaction(pool) as connection:
                await write(connection)
        after_error = await all_rows(database_dsn)
        if after_error != before:
            break
    assert faults.broken == ["COMMIT;"], "it broke before each statement, and after the last"
    assert number > 3
    async with transaction(pool) as connection:
        await write(connection)
    again = await all_rows(database_dsn)
    assert {name: len(rows) for name, rows in again.items()} == {
        name: len(rows) for name, rows in after_error.items()
    }

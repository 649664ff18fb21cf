"""No message of one process or peer can break the scheduler for the others."""

from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from isochrone.service.clock import utc_now
from isochrone.service.trust.identity import Authority
from isochrone.wire import codec
from isochrone.wire.ids import (
    BootId,
    ClusterId,
    DeploymentId,
    DeviceId,
    Epoch,
    Generation,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec
from isochrone.wire.peers.control import FromAgent, PeerRole, RefusedCode, Register
from isochrone.wire.peers.report import Pulse, Refusal, ReplicaProfile
from scheduler.api.control.counter_raises import LEAP_MAX
from scheduler.api.control.peer_frames import PeerRefused
from scheduler.api.control.peers import PeerServer
from scheduler.decide.cluster import ClusterState
from scheduler.decide.membership import NodeContact, sealed_fields
from scheduler.decide.placement.planner import plan_deployments
from scheduler.state.peers.heartbeats import PULSES_WRITTEN_MAX, PulseBuffer
from scheduler.store.cluster import read_cluster
from scheduler.store.fleet.identities import (
    add_peer,
    issue_not_before,
    may_renew,
    revoke,
    revoked_since,
)
from scheduler.store.fleet.node_reports import NodeReportCache
from scheduler.store.fleet.nodes import record_pulses, record_report
from scheduler.store.lease import raise_epoch_and_generation, read_cluster_row
from scheduler.store.pool import BAD_DATA, Pool, transaction, using
from scheduler.store.retention import delete_expired, retention_rules
from tests.builders import (
    GIB,
    NOW,
    a_certificate,
    a_device,
    a_replica_report,
    a_report,
    a_spec,
    believed,
)
from tests.integration.scheduler.scheduler_parts import (
    SchedulerParts,
    expire_lease,
    scheduler_parts,
)
from tests.integration.scheduler.test_store import begun, planned, reported


async def test_two_processes_of_one_name_do_not_both_act(pool: Pool) -> None:
    await begun(pool)
    await expire_lease(pool)
    first, second = await scheduler_parts(pool), await scheduler_parts(pool)
    assert (await first.hold_lease.run_once()).acting
    assert not (await second.hold_lease.run_once()).acting
    await expire_lease(pool)
    before = first.state.lease.epoch
    assert (await second.hold_lease.run_once()).acting
    assert second.state.lease.epoch == before + 1


def a_register(role: PeerRole, name: str, generation: int, epoch: int) -> Register:
    return Register(
        protocol=1,
        role=role,
        name=name,
        pop=PopId("ams"),
        boot_id=BootId("boot-1"),
        version="test",
        generation=Generation(generation),
        epoch=Epoch(epoch),
        cluster_id=ClusterId("c1"),
        certificate_pem="",
        signature=b"",
    )


def a_peer_server(scheduler: SchedulerParts) -> PeerServer:
    state = scheduler.state
    return PeerServer(
        intake=scheduler.database.intake,
        reserved=scheduler.database.reserved,
        cluster_id=scheduler.database.cluster_id,
        issuer=cast(Any, None),
        lease=state.lease,
        leadership=state.leadership,
        peers=state.peers,
        admission=state.admission,
        unregistered=state.unregistered,
    )


@pytest.mark.parametrize(("generation", "epoch"), [(2**63 - 2, 0), (0, 2**63 - 2), (2**64 - 1, 0)])
async def test_no_peer_can_exhaust_the_counters(pool: Pool, generation: int, epoch: int) -> None:
    await begun(pool)
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool)
    await scheduler.hold_lease.run_once()
    server = a_peer_server(scheduler)
    with pytest.raises(PeerRefused) as refusal:
        await server._record(
            a_register(PeerRole.AGENT, "n1", generation, epoch), a_certificate("n1")
        )
    assert refusal.value.refused.code is RefusedCode.MALFORMED
    await server._record(a_register(PeerRole.AGENT, "n1", LEAP_MAX, 40), a_certificate("n1"))
    async with using(pool) as connection:
        assert (await read_cluster_row(connection)).generation == LEAP_MAX + 1
    assert scheduler.state.lease.epoch == 41


async def test_the_route_generation_is_raised_above_a_routers(pool: Pool) -> None:
    await begun(pool)
    async with transaction(pool) as connection:
        await connection.execute("UPDATE cluster SET generation = 1000, route_generation = 50")
        assert await raise_epoch_and_generation(
            connection, holder="s1", generation=Generation(500), epoch=Epoch(0)
        )
        row = await read_cluster_row(connection)
    assert (row.generation, row.route_generation) == (1000, 501)


async def test_a_replica_on_a_missing_device_does_not_spoil_a_report(pool: Pool) -> None:
    epoch = await begun(pool)
    lost = a_spec("lost-1", device_ids=(DeviceId("vanished"),))
    greedy = a_spec("lost-2", memory_bytes=100 * GIB)
    replicas = (a_replica_report(lost), a_replica_report(greedy), a_replica_report(a_spec("r1")))
    for seq in (1, 2, 3):
        effect = await reported(pool, epoch, seq=seq, replicas=replicas)
        assert effect.adopted == (1 if seq == 1 else 0)
    async with using(pool) as connection:
        noted = await connection.fetch(
            "SELECT subject FROM event WHERE kind = 'replica.not_adopted' ORDER BY 1"
        )
    # Recorded once each, however often it is reported.
    assert [row["subject"] for row in noted] == ["lost-1", "lost-2"]


BIG = 2**64 - 1
ALL = ReplicaProfile(load_s=nan, prefill_tokens_per_s=nan, decode_tokens_per_s=inf, memory_bytes=1)
NONE = ReplicaProfile(
    load_s=nan, prefill_tokens_per_s=inf, decode_tokens_per_s=-1.0, memory_bytes=BIG
)


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": (a_device(8), a_device(9))},
        {"devices": (a_device(), msgspec.structs.replace(a_device(), memory_bytes=-1))},
        {"devices": (msgspec.structs.replace(a_device(), memory_bytes=BIG),)},
        {"devices": (msgspec.structs.replace(a_device(), device_id=DeviceId("")),)},
        {"replicas": (a_replica_report(a_spec()), a_replica_report(a_spec(), "failed"))},
        {"replicas": (msgspec.structs.replace(a_replica_report(a_spec()), profile=NONE),)},
        {"replicas": (msgspec.structs.replace(a_replica_report(a_spec()), profile=ALL),)},
        {"replicas": (msgspec.structs.replace(a_replica_report(a_spec()), since_s=nan),)},
        {"replicas": (a_replica_report(a_spec(device_ids=(DeviceId("cpu"),) * 2)),)},
        {"replicas": (a_replica_report(a_spec(memory_bytes=-GIB)),)},
        {"refusals": (Refusal(replica_id=ReplicaId("r1"), reason="no"),) * 2},
        {"artifacts": ("f" * 64, "f" * 64), "disk_free_bytes": -1, "disk_bytes_per_s": nan},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_contradictory_report_is_clamped_or_refused_alone(
    pool: Pool, fields: dict[str, Any]
) -> None:
    epoch = await begun(pool)
    # The connection answers these errors; any other would close it again and again.
    with suppress(*BAD_DATA):
        await reported(pool, epoch, **fields)
    await reported(pool, epoch, seq=2)
    async with transaction(pool, isolation="repeatable_read") as connection:
        picture = await read_cluster(connection, NodeContact(acting_for_s=99.0))
    assert [node.node_id for node in picture.nodes] == ["n1"]
    plan_deployments(picture)


NEW = {"deployment_id": DeploymentId("new"), "name": "new", "model_id": ModelId("new")}


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "no name"},
        {"model_id": ModelId("no model")},
        {"deployment_id": DeploymentId("no\r\nid")},
        {"version": 0},
        {"context_tokens": 0},
        {"memory_bytes": 2**54},
        {"device_ids": ()},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_no_node_can_have_an_undecodable_replica_adopted(
    pool: Pool, fields: dict[str, Any]
) -> None:
    """A compromised node may report a deployment that the store does not know."""
    epoch = await begun(pool)
    replica = a_replica_report(a_spec("r9", **{**NEW, **fields}))
    said = a_report(devices=(a_device(2**30),), replicas=(replica,))
    with suppress(codec.MalformedFrame, *BAD_DATA):
        report = codec.decode(codec.encode(said), codec.decoder(FromAgent))
        async with transaction(pool) as connection:
            await record_report(connection, epoch, report, believed)
    async with transaction(pool, isolation="repeatable_read") as connection:
        picture = await read_cluster(connection, NodeContact(acting_for_s=99.0))
    plan_deployments(picture)


async def test_only_replicas_that_this_cluster_placed_on_the_node_are_adopted(
    pool: Pool, tmp_path: Path
) -> None:
    """Otherwise a compromised node could receive prompts, or make the fleet run its deployments."""
    epoch = await begun(pool)
    ours, theirs = (Authority.create(tmp_path / name, name, NOW) for name in ("ours", "theirs"))

    def has_valid_seal(node_id: NodeId, spec: ReplicaSpec) -> bool:
        return ours.verify_seal(sealed_fields(node_id, spec), spec.seal)

    def sealed(authority: Authority, node: str, **fields: Any) -> ReplicaSpec:
        spec = a_spec(**{"replica_id": "r9", **NEW, **fields})
        seal = authority.seal(sealed_fields(NodeId(node), spec))
        return msgspec.structs.replace(spec, seal=seal)

    async def said(seq: int, spec: ReplicaSpec) -> int:
        boast = ReplicaProfile(prefill_tokens_per_s=1e9, decode_tokens_per_s=1e9)
        replica = msgspec.structs.replace(a_replica_report(spec), profile=boast)
        told = a_report(seq=seq, replicas=(replica,))
        async with transaction(pool) as connection:
            return (await record_report(connection, epoch, told, has_valid_seal)).adopted

    true = sealed(ours, "n1")
    forged = [
        a_spec("r9"),
        a_spec("r9", **NEW),
        sealed(theirs, "n1"),
        sealed(ours, "n2"),
        msgspec.structs.replace(true, deployment_id=DeploymentId("d")),
        msgspec.structs.replace(true, engine=EngineSettings(driver="vllm")),
        msgspec.structs.replace(true, replica_id=ReplicaId("r10")),
        msgspec.structs.replace(true, seal="é"),
    ]
    for seq, spec in enumerate(forged, 1):
        assert await said(seq, spec) == 0
    async with using(pool) as connection:
        assert await connection.fetchval("SELECT count(*) FROM deployment") == 1
        noted = await connection.fetch("SELECT subject FROM event WHERE kind LIKE '%not_adopted'")
        # Its measurements must not count for other nodes of its device class.
        assert await connection.fetchval("SELECT count(*) FROM profile") == 0
    assert [row["subject"] for row in noted] == ["n1"]
    assert await said(100, true) == 1


async def test_a_nul_in_an_engines_output_is_removed(pool: Pool) -> None:
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"))
    failed = msgspec.structs.replace(a_replica_report(a_spec("r1"), "failed"), reason="bo\0om")
    assert not (await reported(pool, epoch, seq=2, replicas=(failed,))).stale
    async with using(pool) as connection:
        assert await connection.fetchval("SELECT state_reason FROM placement") == "boom"


async def test_one_nodes_generation_does_not_spoil_the_other_pulses(pool: Pool) -> None:
    await begun(pool)
    pulses = [
        Pulse(node_id=NodeId(name), boot_id=BootId("b"), seq=1, generation=Generation(number))
        for name, number in (("n1", 7), ("n2", 2**64 - 1))
    ]
    async with transaction(pool) as connection:
        await record_pulses(connection, pulses)
        assert await connection.fetchval("SELECT generation FROM node") == 7


async def test_a_revoked_certificate_cannot_be_renewed(pool: Pool) -> None:
    await begun(pool)
    async with transaction(pool) as connection:
        assert await may_renew(connection, PeerRole.AGENT, "n1", "aa")
        assert not await may_renew(connection, PeerRole.AGENT, "n2", "aa")
        await revoke(connection, PeerRole.AGENT, "n1", serial="aa")
        assert not await may_renew(connection, PeerRole.AGENT, "n1", "aa")
        assert await may_renew(connection, PeerRole.AGENT, "n1", "bb")
        await revoke(connection, PeerRole.AGENT, "n1")
        assert not await may_renew(connection, PeerRole.AGENT, "n1", "bb")
        # Certificates issued to the name from now on are newer than the revocation.
        earliest = await issue_not_before(connection, PeerRole.AGENT, "n1")
        revoked = max(row.at for row in await revoked_since(connection, 60.0))
        assert earliest is not None
        assert earliest.timestamp() > revoked
    async with transaction(pool) as connection:
        revocations = retention_rules(event_days=1.0, certificate_lifetime_s=0.0)[1]
        assert await delete_expired(connection, revocations, utc_now(), 100) == 0
        await connection.execute("UPDATE history_clock SET at = now()")
        revocations = revocations._replace(keep_s=0.0)
        assert await delete_expired(connection, revocations, utc_now(), 100) == 2


async def test_a_cluster_state_read_through_the_cache_is_the_same(pool: Pool) -> None:
    """The cache of reports and devices must not change the result."""
    epoch = await begun(pool)
    known = NodeReportCache()

    async def read(kept: NodeReportCache | None) -> ClusterState:
        async with transaction(pool, isolation="repeatable_read") as connection:
            silent_s = {NodeId("n1"): 0.0, NodeId("n2"): 0.0}
            heard = NodeContact(acting_for_s=1.0, silent_s=silent_s)
            picture = await read_cluster(connection, heard, kept)
        placements = tuple(
            msgspec.structs.replace(p, age_s=0.0, state_age_s=0.0) for p in picture.placements
        )
        return msgspec.structs.replace(picture, placements=placements)

    async def joins() -> None:
        async with transaction(pool) as connection:
            await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))

    async def leaves() -> None:
        async with transaction(pool) as connection:
            await connection.execute("DELETE FROM node WHERE node_id = 'n2'")

    async def drains() -> None:
        async with transaction(pool) as connection:
            await connection.execute("UPDATE node SET draining = true")

    sick = a_device(healthy=False, reason="ECC")
    for step in (
        lambda: reported(pool, epoch, seq=1),
        lambda: planned(pool, epoch, a_spec("r1")),
        lambda: reported(pool, epoch, seq=2, replicas=(a_replica_report(a_spec("r1")),)),
        joins,
        lambda: reported(pool, epoch, seq=3, devices=(sick,)),
        lambda: reported(pool, epoch, seq=4, devices=()),
        drains,
        leaves,
    ):
        await step()
        assert await read(known) == await read(None)


def test_every_node_of_a_large_fleet_has_its_pulse_written_in_turn() -> None:
    buffer = PulseBuffer()
    names = [NodeId(f"n{index:05}") for index in range(2_500)]
    written: list[NodeId] = []
    for turn in range(4):
        for name in names:
            buffer.add(
                Pulse(node_id=name, boot_id=BootId("b"), seq=turn, generation=Generation(turn))
            )
        taken = buffer.take()
        assert len(taken) <= PULSES_WRITTEN_MAX
        assert {pulse.seq for pulse in taken} == {turn}, "the newest pulse of each node is written"
        written += [pulse.node_id for pulse in taken]
    assert set(written) == set(names)


async def test_a_standby_knows_when_it_may_act(pool: Pool) -> None:
    await begun(pool, "s1")
    standby = await scheduler_parts(pool, "s2")
    assert not (await standby.hold_lease.run_once()).acting
    assert standby.state.lease.free_at == float("-inf"), "the other scheduler renews its lease"
    async with using(pool) as connection:
        await connection.execute(
            "UPDATE lease SET expires_at = clock_timestamp() + interval '2 seconds'"
        )
    assert not (await standby.hold_lease.run_once()).acting
    assert 0.5 < standby.state.lease.free_at <= 2.0, "the other has missed a renewal"


async def test_only_transactions_without_async_commit_wait_for_the_disk(
    pool: Pool,
) -> None:
    seen = []
    for async_commit in (False, True, False):
        async with transaction(pool, async_commit=async_commit) as connection:
            seen.append(await connection.fetchval("SHOW synchronous_commit"))
    assert seen == ["on", "off", "on"]


async def test_a_node_heard_after_a_long_silence_is_back(pool: Pool) -> None:
    await begun(pool)
    scheduler, node_id = await scheduler_parts(pool), NodeId("n1")
    clock, heartbeats = scheduler.clock, scheduler.state.heartbeats
    lost_after_s = scheduler.limits.lost_after_s
    for now_s in (100.0, 100.0 + lost_after_s - 1):
        clock.now_s = now_s
        heartbeats.record(node_id)
    assert heartbeats.observed().back_s == {}
    clock.now_s = 101.0 + 2 * lost_after_s
    heartbeats.record(node_id)
    clock.now_s = 105.0 + 2 * lost_after_s
    assert heartbeats.observed().back_s == heartbeats.observed().silent_s == {node_id: 4.0}
    assert heartbeats.silent_s(NodeId("n2")) == inf

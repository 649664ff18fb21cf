"""A peer that lies, with a valid certificate, is stopped before it harms the others."""

import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from isochrone.wire.ids import BootId, PopId, RouterId
from isochrone.wire.peers.control import PeerRole
from isochrone.wire.peers.report import ReplicaProfile
from isochrone.wire.peers.usage import Demand, UsageAck
from scheduler.api.control.agents import IMPOSTOR_EVENTS_MAX, AgentEndpoint
from scheduler.api.control.counter_raises import RAISE_EVERY_S, RAISES_MAX
from scheduler.api.control.peer_frames import PeerRefused
from scheduler.api.control.routers import RouterEndpoint
from scheduler.store.fleet import nodes
from scheduler.store.fleet.identities import add_peer
from scheduler.store.pool import Pool, transaction, using
from tests.builders import a_certificate, a_device, a_replica_report, a_report, a_spec
from tests.integration.scheduler.scheduler_parts import expire_lease, no_nudge, scheduler_parts
from tests.integration.scheduler.test_store import begun, planned, reported
from tests.integration.scheduler.test_trust import a_peer_server, a_register


async def test_a_peer_that_raises_the_counters_again_and_again_is_refused(pool: Pool) -> None:
    """Each time a new term begins, and in none of them anything would be placed."""
    await begun(pool)
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool)
    await scheduler.hold_lease.run_once()
    server = a_peer_server(scheduler)
    async with transaction(pool) as connection:
        await add_peer(connection, PeerRole.AGENT, "n2", PopId("ams"))

    async def raises(name: str) -> bool:
        epoch = scheduler.state.lease.epoch
        register = a_register(PeerRole.AGENT, name, 0, epoch + 1)
        with suppress(PeerRefused):
            await server._record(register, a_certificate(name))
        return scheduler.state.lease.epoch > epoch

    assert [await raises("n1") for _ in range(RAISES_MAX + 2)] == [True] * RAISES_MAX + [False] * 2
    assert await raises("n2"), "another peer may have to"
    scheduler.clock.now_s += RAISE_EVERY_S
    await scheduler.hold_lease.run_once()
    assert [await raises("n1"), await raises("n1")] == [True, False]
    async with using(pool) as connection:
        noted = await connection.fetch(
            "SELECT subject, count(*) FROM event WHERE kind = 'agent.raised_counters'"
            " GROUP BY subject ORDER BY subject"
        )
    assert [tuple(row) for row in noted] == [("n1", RAISES_MAX + 1), ("n2", 1)]


async def test_a_node_that_reports_for_others_does_not_fill_the_event_log(pool: Pool) -> None:
    await begun(pool)
    scheduler = await scheduler_parts(pool)
    state, unused = scheduler.state, cast(Any, None)
    agents = AgentEndpoint(
        server=unused,
        pool=pool,
        intake=pool,
        authority=unused,
        lease=state.lease,
        heartbeats=state.heartbeats,
        pulses=state.pulses,
        admission=state.admission,
        assignments=state.assignments,
        routes=state.routes,
        nudge_place=no_nudge,
    )
    peer: Any = SimpleNamespace(name="n1", boot_id=BootId("boot-1"))
    for number in range(IMPOSTOR_EVENTS_MAX + 5):
        claimed = a_report(f"victim-\0{number}" * 99)
        with pytest.raises(PeerRefused, match="n1 cannot report for victim-"):
            await agents._handle_message(peer, claimed)
    async with using(pool) as connection:
        count = await connection.fetchval("SELECT count(*) FROM event WHERE kind = 'node.impostor'")
    assert count == IMPOSTOR_EVENTS_MAX


async def test_demand_that_the_store_cannot_hold_is_acknowledged(pool: Pool) -> None:
    """Else the router would send it again, and each time a traceback would be logged."""
    await begun(pool)
    state = (await scheduler_parts(pool)).state
    routers = RouterEndpoint(
        server=cast(Any, None),
        intake=pool,
        routes=state.routes,
        nudge_place=no_nudge,
        key_use=state.key_use,
        clock=state.lease.clock,
    )
    answers: list[UsageAck] = []
    peer: Any = SimpleNamespace(
        name="router", boot_id=BootId("b"), pop=PopId("ams"), enqueue=answers.append
    )
    for boot_id in (random.Random(7).randbytes(9000).hex(), "\0"):
        demand = Demand(
            router_id=RouterId("router"), boot_id=BootId(boot_id), seq=1, window_s=1.0, rows=()
        )
        await routers._handle_message(peer, demand)
        answer = answers.pop()
        assert answer.demand_boot == boot_id
        assert "cannot store the batch" in answer.reason


async def test_a_node_that_invents_devices_fills_no_table(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "GONE_DEVICES_MAX", 3)
    monkeypatch.setattr(nodes, "CLASSES_MAX", 2)
    epoch = await begun(pool)
    await reported(pool, epoch)
    await planned(pool, epoch, a_spec("r1"))
    for turn in range(5):
        devices = tuple(a_device(name=f"gpu{turn}-{number}") for number in range(4))
        await reported(pool, epoch, seq=turn + 2, devices=devices)
    async with using(pool) as connection:
        rows = await connection.fetch("SELECT device_id FROM device WHERE NOT healthy ORDER BY 1")
        assert await connection.fetchval("SELECT count(*) FROM device WHERE healthy") == 4
    gone = [row["device_id"] for row in rows]
    assert len(gone) == 4
    assert gone[0] == "cpu", "a replica is placed there"
    profile = ReplicaProfile(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)
    warm = msgspec.structs.replace(a_replica_report(a_spec("r1")), profile=profile)
    for turn in range(4):
        device = msgspec.structs.replace(a_device(), device_class=f"class{turn}")
        await reported(pool, epoch, seq=turn + 10, devices=(device,), replicas=(warm,))
    async with using(pool) as connection:
        assert await connection.fetchval("SELECT count(*) FROM profile") == 2

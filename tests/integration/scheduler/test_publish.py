"""Publishing route tables from a real store: the whole fleet, or one node after its report."""

from time import time
from types import SimpleNamespace
from typing import Any

import pytest

from isochrone.wire import codec
from isochrone.wire.admin import KeyBody, LimitsBody
from isochrone.wire.ids import Epoch, KeyId, NodeId, TenantId
from isochrone.wire.peers.control import KEYS_FIRST, TABLE_PARTS, PeerRole
from isochrone.wire.peers.routes import RouteDelta
from scheduler.decide.routing.flap_damping import HOLD_S
from scheduler.loops import publish_routes
from scheduler.loops.publish_routes import PublishCounts, PublishRoutes
from scheduler.loops.sum_quotas import SumQuotas
from scheduler.state.published_routes import TableParts
from scheduler.store.accounts import keys
from scheduler.store.events import record_event
from scheduler.store.fleet import identities
from scheduler.store.lease import EpochLost, Lease
from scheduler.store.pool import Connection, Pool, transaction, using
from scheduler.store.status import read_status
from tests.builders import a_replica_report, a_spec
from tests.integration.scheduler.scheduler_parts import (
    SchedulerParts,
    expire_lease,
    scheduler_parts,
)
from tests.integration.scheduler.test_store import begun, planned, reported


async def a_publisher(pool: Pool) -> tuple[SchedulerParts, PublishRoutes]:
    """An acting scheduler, with one replica that is loading."""
    epoch = await begun(pool)
    await reported(pool, epoch)
    assert await planned(pool, epoch, a_spec())
    await expire_lease(pool)
    scheduler = await scheduler_parts(pool)
    await scheduler.hold_lease.run_once()
    return scheduler, scheduler.publish_routes()


def routed(scheduler: SchedulerParts) -> list[str]:
    assert scheduler.state.routes.table is not None
    return [route.replica_id for route in scheduler.state.routes.table.routes]


async def test_after_a_report_only_its_node_is_read(pool: Pool) -> None:
    scheduler, publish = await a_publisher(pool)
    epoch = scheduler.state.lease.epoch
    assert (await publish.run_once()).nodes == -1
    assert routed(scheduler) == []
    assert (await publish.run_once()).nodes == 0
    for seq, (state, expected) in enumerate((("warm", ["r1"]), ("loading", [])), start=2):
        replicas = (a_replica_report(a_spec(), state),)
        await reported(pool, epoch, seq=seq, replicas=replicas)
        scheduler.state.routes.mark_changed(NodeId("n1"))
        before = scheduler.state.routes.table
        published = await publish.run_once()
        assert before is not None
        assert (published.nodes, published.generation) == (1, before.generation + 1)
        assert routed(scheduler) == expected


async def test_a_flapping_replica_is_withdrawn_at_once_and_returns_later(pool: Pool) -> None:
    scheduler, publish = await a_publisher(pool)
    epoch = scheduler.state.lease.epoch
    await publish.run_once()
    seen = []
    for seq in range(2, 12):
        state = "loading" if seq % 2 else "warm"
        await reported(
            pool,
            epoch,
            seq=seq,
            replicas=(a_replica_report(a_spec(), state),),
        )
        scheduler.state.routes.mark_changed(NodeId("n1"))
        await publish.run_once()
        seen.append(len(routed(scheduler)))
        scheduler.clock.now_s += 0.1
    # It returns at once the first time only, and is never routed to while it is not warm.
    assert seen == [1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    await reported(pool, epoch, seq=12, replicas=(a_replica_report(a_spec()),))
    scheduler.state.routes.mark_changed(NodeId("n1"))
    await publish.run_once()
    assert routed(scheduler) == []
    scheduler.clock.now_s += HOLD_S
    # No further report arrives.
    await publish.run_once()
    assert routed(scheduler) == ["r1"]


async def test_after_a_failed_turn_every_change_is_published(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, publish = await a_publisher(pool)
    epoch = scheduler.state.lease.epoch
    await publish.run_once()

    async def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError

    await reported(pool, epoch, seq=2, replicas=(a_replica_report(a_spec()),))
    scheduler.state.routes.mark_changed(NodeId("n1"))
    with monkeypatch.context() as patched:
        patched.setattr("scheduler.loops.publish_routes.read_fleet_nodes", broken)
        with pytest.raises(ConnectionError):
            await publish.run_once()
    assert (await publish.run_once()).nodes == -1
    assert routed(scheduler) == ["r1"]


async def test_a_changed_key_is_read_and_published_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, publish = await a_publisher(pool)
    async with transaction(pool) as connection:
        for name in ("k1", "k2"):
            body = KeyBody(tenant_id=TenantId("t"))
            await keys.add_key(connection, key_id=KeyId(name), secret_sha256="s", body=body)
    routes = scheduler.state.routes
    await publish.run_once()
    before = routes.table
    assert before is not None
    assert [key.key_id for key in before.keys] == ["k1", "k2"]
    # A whole read or a comparison of whole tables would fail from here on.
    for whole in ("read_fleet", "read_all_keys", "read_key_page", "diff"):
        monkeypatch.setattr(publish_routes, whole, None)
    async with transaction(pool) as connection:
        body = KeyBody(tenant_id=TenantId("t"))
        await keys.add_key(connection, key_id=KeyId("k3"), secret_sha256="s", body=body)
        await keys.revoke_key(connection, "k1", None)
    for name in ("k1", "k3"):
        routes.mark_key_changed(KeyId(name))
    await publish.run_once()
    after = routes.table
    assert after is not None
    assert after.generation == before.generation + 1
    assert [key.key_id for key in after.keys] == ["k2", "k3"]
    assert after.keys_revoked == ("k1",)
    kept = KeyId("k2")
    assert after.keys.get(kept) is before.keys.get(kept)
    assert after.routes is before.routes
    await publish.run_once()
    assert routes.table is after


async def test_status_does_not_count_a_router_that_does_not_follow(pool: Pool) -> None:
    await begun(pool)
    async with transaction(pool) as connection:
        await connection.execute(
            "INSERT INTO router (router_id, pop, last_seen_at) "
            "SELECT name, 'ams', clock_timestamp() - age * interval '1 s' "
            "FROM (VALUES ('r1', 0), ('r2', 0), ('r3', 99)) AS made (name, age)"
        )
        view = await read_status(
            connection,
            scheduler="s",
            is_acting=True,
            silent_s={},
            silent_after_s=30.0,
            frozen="",
            unmet=(),
            behind={"r2": "it serves generation 1", "r-gone": "it serves generation 1"},
        )
    assert (view.routers, view.routers_ready) == (3, 1)
    assert view.not_following == (
        "router r2: it serves generation 1",
        "router r3: not connected",
    )


async def add_keys(pool: Pool, *names: str) -> None:
    async with transaction(pool) as connection:
        for name in names:
            body = KeyBody(tenant_id=TenantId("t"))
            await keys.add_key(connection, key_id=KeyId(name), secret_sha256="s", body=body)


def key_names(scheduler: SchedulerParts) -> list[str]:
    assert scheduler.state.routes.table is not None
    return [key.key_id for key in scheduler.state.routes.table.keys]


async def test_keys_are_read_in_pages_and_sorted_as_routers_sort_them(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "ROWS_PER_PAGE", 2)
    read_page, sizes = keys.read_key_page, list[int]()

    async def counted(connection: Connection, after: KeyId) -> keys.KeyPage:
        page = await read_page(connection, after)
        sizes.append(len(page.keys))
        return page

    monkeypatch.setattr(keys, "read_key_page", counted)
    names = ["B", "Z", "a", "b2", "b10", "zz", "0"]
    scheduler, publish = await a_publisher(pool)
    await add_keys(pool, *names)
    await publish.run_once()
    assert key_names(scheduler) == sorted(names)
    assert sizes == [2, 2, 2, 1]


async def test_of_many_revoked_keys_and_certificates_the_newest_are_sent(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "TOMBSTONES_MAX", 2)
    monkeypatch.setattr(identities, "REVOKED_MAX", 2)
    names = ["k2", "k0", "k3", "k1"]
    await add_keys(pool, *names)
    for name in names:
        async with transaction(pool) as connection:
            await keys.revoke_key(connection, name, None)
            await connection.execute(
                "INSERT INTO revocation (role, name) VALUES ('agent', $1)", f"node-{name}"
            )
    async with transaction(pool) as connection:
        assert await keys.revoked_keys(connection) == ("k1", "k3")
        newest = await identities.newest_revocations(connection)
    assert [revoked.name for revoked in newest] == ["node-k1", "node-k3"]


async def test_a_key_that_changed_unannounced_is_found_page_by_page(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "ROWS_PER_PAGE", 2)
    scheduler, publish = await a_publisher(pool)
    await add_keys(pool, *(f"k{n}" for n in range(7)))
    await publish.run_once()
    async with transaction(pool) as connection:
        await connection.execute("UPDATE api_key SET tenant_id = 'other' WHERE key_id = 'k4'")
        await connection.execute("DELETE FROM api_key WHERE key_id IN ('k0', 'k6')")
    await add_keys(pool, "k3a", "k9")
    for _ in range(5):
        scheduler.clock.now_s += 100.0
        await scheduler.hold_lease.run_once()
        await publish.run_once()
    await publish.run_once()
    assert key_names(scheduler) == ["k1", "k2", "k3", "k3a", "k4", "k5", "k9"]
    table = scheduler.state.routes.table
    assert table is not None
    changed = table.keys.get(KeyId("k4"))
    assert changed is not None
    assert changed.tenant_id == "other"


async def test_keys_that_another_scheduler_changed_are_published_at_once(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator may revoke a leaked key at a scheduler that does not act."""
    monkeypatch.setattr(keys, "ROWS_PER_PAGE", 2)
    scheduler, publish = await a_publisher(pool)
    await add_keys(pool, *(f"k{n}" for n in range(7)))
    await publish.run_once()
    body = KeyBody(tenant_id=TenantId("t"))
    async with transaction(pool) as late:
        # Its event has the lowest number, and is seen last.
        await keys.add_key(late, key_id=KeyId("k9"), secret_sha256="s", body=body)
        await record_event(late, actor="admin", kind="key.create", subject="k9")
        async with transaction(pool) as connection:
            await keys.revoke_key(connection, "k6", None)
            await record_event(connection, actor="admin", kind="key.revoke", subject="k6")
            await keys.set_limits(connection, "k5", LimitsBody(requests_per_min=3), None)
            await record_event(connection, actor="admin", kind="key.limit", subject="k5")
        await a_whole_read(scheduler, publish)
        assert key_names(scheduler) == [f"k{n}" for n in range(6)]
    table = scheduler.state.routes.table
    assert table is not None
    limited = table.keys.get(KeyId("k5"))
    assert limited is not None
    assert limited.limits.requests_per_min == 3
    await a_whole_read(scheduler, publish)
    assert key_names(scheduler) == [*(f"k{n}" for n in range(6)), "k9"]
    # They are published once.
    before = scheduler.state.routes.table
    await a_whole_read(scheduler, publish)
    assert scheduler.state.routes.table is before


async def a_whole_read(scheduler: SchedulerParts, publish: PublishRoutes) -> None:
    """A turn that reads the whole fleet, and another that publishes the keys that it found."""
    scheduler.clock.now_s += 3.0
    await scheduler.hold_lease.run_once()
    for _ in range(2):
        await publish.run_once()


async def test_many_changed_keys_are_published_some_at_a_time(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_routes, "KEYS_PER_DELTA", 3)
    scheduler, publish = await a_publisher(pool)
    await publish.run_once()
    names = [f"k{n}" for n in range(8)]
    await add_keys(pool, *names)
    for name in names:
        scheduler.state.routes.mark_key_changed(KeyId(name))
    seen = []
    for _ in range(3):
        await publish.run_once()
        seen.append(len(key_names(scheduler)))
    assert seen == [3, 6, 8]


@pytest.mark.parametrize("bytes_max", [10**6, 10])
async def test_a_change_too_large_for_a_delta_is_sent_as_a_table_in_parts(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    monkeypatch.setattr(publish_routes, "DELTA_BYTES_MAX", bytes_max)
    scheduler, publish = await a_publisher(pool)
    await publish.run_once()
    queued: list[Any] = []
    router: Any = SimpleNamespace(
        name="r1",
        role=PeerRole.ROUTER,
        generation=scheduler.state.routes.table.generation,  # type: ignore[union-attr]
        capabilities=frozenset({TABLE_PARTS}),
        keys_held=b"",
        enqueue=queued.append,
    )
    scheduler.state.peers.by_name[PeerRole.ROUTER, "r1"] = router
    await add_keys(pool, "k1")
    scheduler.state.routes.mark_key_changed(KeyId("k1"))
    await publish.run_once()
    (sent,) = queued
    assert isinstance(sent, bytes if bytes_max > 10 else TableParts)
    assert router.generation == scheduler.state.routes.table.generation  # type: ignore[union-attr]


async def test_keys_of_a_failed_turn_are_published_in_the_next(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, publish = await a_publisher(pool)
    await publish.run_once()
    await add_keys(pool, "k1")
    scheduler.state.routes.mark_key_changed(KeyId("k1"))

    async def broken(*_: Any, **__: Any) -> None:
        raise ConnectionError

    with monkeypatch.context() as patched:
        patched.setattr("scheduler.loops.publish_routes.live_keys", broken)
        with pytest.raises(ConnectionError):
            await publish.run_once()
    await publish.run_once()
    assert key_names(scheduler) == ["k1"]


async def test_a_key_is_published_when_its_quota_is_spent(pool: Pool) -> None:
    scheduler, publish = await a_publisher(pool)
    routes = scheduler.state.routes
    async with transaction(pool) as connection:
        body = KeyBody(tenant_id="t", limits=LimitsBody(tokens_per_day=5))
        await keys.add_key(connection, key_id=KeyId("k1"), secret_sha256="s", body=body)
    await publish.run_once()
    job = SumQuotas(pool=pool, lease=scheduler.state.lease, routes=routes, unix_clock=time)
    published = []
    for tokens in (3, 3, 3):
        async with transaction(pool) as connection:
            await connection.execute(
                "INSERT INTO key_use (key_id, day, tokens, spend) VALUES"
                " ('k1', (clock_timestamp() AT TIME ZONE 'UTC')::date, $1, 0)",
                tokens,
            )
        await job.run_once()
        await publish.run_once()
        assert routes.table is not None
        entry = routes.table.keys.get(KeyId("k1"))
        assert entry is not None
        published.append((entry.spent_until > time(), routes.table.generation))
    # Published once: the third use changes nothing.
    assert [is_spent for is_spent, _ in published] == [False, True, True]
    assert published[1][1] == published[2][1] == published[0][1] + 1


async def test_after_lost_history_routes_wait_for_known_nodes(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store may lack deployments whose replicas run; routers use the table that they have."""
    scheduler, publish = await a_publisher(pool)
    hold_lease, state = scheduler.hold_lease, scheduler.state
    await hold_lease.run_once()
    await publish.run_once()
    first = state.lease.epoch
    await restore_counters(pool)
    await hold_lease.run_once()
    assert (state.lease.epoch > first, state.routes.table) == (True, None)
    assert is_without_routes(await publish.run_once(), scheduler)
    reported_agent = SimpleNamespace(name="n1", role=PeerRole.AGENT, has_reported=True)
    with monkeypatch.context() as patched:
        patched.setattr(state.peers, "agents", lambda: [reported_agent])
        published = await publish.run_once()
    assert (published.nodes, state.routes.table is None) == (-1, False)


@pytest.mark.parametrize("step", ["read_fleet", "next_route_generation"])
async def test_a_table_of_the_term_before_is_not_published_in_a_new_one(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """It was read before the loss was noticed, and would end the wait for the nodes' reports."""
    scheduler, publish = await a_publisher(pool)
    hold_lease, state = scheduler.hold_lease, scheduler.state
    await publish.run_once()
    do = getattr(publish_routes, step)

    async def begin_term() -> None:
        await restore_counters(pool)
        await hold_lease.run_once()

    async def meanwhile(*arguments: Any, **fields: Any) -> Any:
        done = await do(*arguments, **fields)
        if step == "read_fleet":
            await begin_term()
        else:
            # As if it began once this transaction, which holds the epoch, is committed.
            lease = Lease(epoch=Epoch(state.lease.epoch + 1), acting_for_s=0.0)
            state.leadership.take(lease, state.lease.clock())
        return done

    state.routes.mark_changed()
    async with using(pool) as connection:
        await connection.execute("UPDATE pop SET city = 'Elsewhere'")
    with monkeypatch.context() as patched:
        patched.setattr(publish_routes, step, meanwhile)
        with pytest.raises(EpochLost):
            await publish.run_once()
    assert state.routes.table is None
    if step == "read_fleet":
        assert is_without_routes(await publish.run_once(), scheduler)


async def test_a_takeover_in_the_wait_after_lost_history_waits_too(pool: Pool) -> None:
    """The other scheduler has not noticed the loss itself."""
    first, publish = await a_publisher(pool)
    await publish.run_once()
    await restore_counters(pool)
    await first.hold_lease.run_once()
    assert is_without_routes(await publish.run_once(), first)
    await expire_lease(pool)
    other = await scheduler_parts(pool, "s2")
    publish = other.publish_routes()
    await other.hold_lease.run_once()
    assert other.state.lease.is_acting
    assert is_without_routes(await publish.run_once(), other)
    other.clock.now_s += other.limits.lost_after_s
    await other.hold_lease.run_once()
    assert (await publish.run_once()).nodes == -1
    # Now that a table is published, a takeover does not wait again.
    await expire_lease(pool)
    third = await scheduler_parts(pool, "s3")
    await third.hold_lease.run_once()
    assert (await third.publish_routes().run_once()).nodes == -1


async def test_keys_do_not_wait_for_reports_after_lost_history(pool: Pool) -> None:
    """Routers keep their routes, and take new keys and revocations at once."""
    scheduler, publish = await a_publisher(pool)
    routes = scheduler.state.routes
    await add_keys(pool, "k1", "k2")
    await publish.run_once()
    await restore_counters(pool)
    await scheduler.hold_lease.run_once()
    frames: dict[str, list[Any]] = {"new": [], "old": [], "fresh": []}
    routers = [
        SimpleNamespace(
            name=name,
            role=PeerRole.ROUTER,
            capabilities={TABLE_PARTS, KEYS_FIRST} if name != "old" else {TABLE_PARTS},
            generation=0 if name == "fresh" else 1,
            keys_held=b"held",
            enqueue=frames[name].append,
        )
        for name in frames
    ]
    scheduler.state.peers.routers = lambda: routers  # type: ignore[method-assign,assignment,return-value]
    await publish.run_once()
    assert routes.table is not None
    assert (key_names(scheduler), routes.table.keys_only) == (["k1", "k2"], True)
    # A router without a table, or of an older version, waits for the routes.
    assert [len(sent) for sent in frames.values()] == [1, 0, 0]
    assert routers[0].keys_held == b"held"
    async with transaction(pool) as connection:
        await keys.revoke_key(connection, "k1", None)
    await add_keys(pool, "k3")
    for name in ("k1", "k3"):
        routes.mark_key_changed(KeyId(name))
    assert (await publish.run_once()).nodes == 0
    assert (key_names(scheduler), routes.table.keys_revoked) == (["k2", "k3"], ("k1",))
    delta = codec.decode(frames["new"][1], codec.decoder(RouteDelta))
    assert [key.key_id for key in delta.keys_set] == ["k3"]
    assert (delta.keys_gone, delta.routes_gone, delta.deployments_gone) == (("k1",), (), ())
    before = routes.table.generation
    scheduler.clock.now_s += scheduler.limits.lost_after_s
    await scheduler.hold_lease.run_once()
    assert (await publish.run_once()).nodes == -1
    assert (routes.table.keys_only, routes.table.generation) == (False, before + 1)
    # All are sent the whole table: no change leads from keys alone to it.
    assert [len(sent) for sent in frames.values()] == [3, 1, 1]
    assert {router.generation for router in routers} == {routes.table.generation}


def is_without_routes(published: PublishCounts, scheduler: SchedulerParts) -> bool:
    table = scheduler.state.routes.table
    return table is not None and table.keys_only and (published.nodes, published.routes) == (0, 0)


async def test_after_lost_history_routes_do_not_wait_for_lost_nodes(pool: Pool) -> None:
    scheduler, publish = await a_publisher(pool)
    hold_lease = scheduler.hold_lease
    await hold_lease.run_once()
    await restore_counters(pool)
    await hold_lease.run_once()
    scheduler.clock.now_s += scheduler.limits.lost_after_s
    await hold_lease.run_once()
    assert (await publish.run_once()).nodes == -1


async def test_after_an_ordinary_takeover_routes_do_not_wait(pool: Pool) -> None:
    _, publish = await a_publisher(pool)
    assert (await publish.run_once()).nodes == -1


async def restore_counters(pool: Pool) -> None:
    """Set the counters back, as a restored backup does."""
    async with transaction(pool) as connection:
        await connection.execute("UPDATE cluster SET generation = 1, route_generation = 1")

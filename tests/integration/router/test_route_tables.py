"""Route tables: from a scheduler, from disk, and ones that the router must not accept."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from isochrone.service import files
from isochrone.service.network.control_link import ControlLink
from isochrone.service.network.http_server import serve_http
from isochrone.wire import codec
from isochrone.wire.client_keys.keys import format_key
from isochrone.wire.ids import BootId, ClusterId, Epoch, KeyId, NodeId, RouterId
from isochrone.wire.peers.control import TABLE_PARTS, Challenge, Register, Welcome
from isochrone.wire.peers.routes import KeyTable, SnapshotWanted, diff
from isochrone.wire.peers.table_parts import split_table
from isochrone.wire.peers.usage import Demand, RoundTrip, RoundTrips, Usage, UsageAck
from router.app import RouterApp, open_router
from tests.integration.router.fake_node import FakeNode, open_node
from tests.integration.router.fleet_of import (
    CLUSTER,
    KEY,
    a_bench,
    a_config,
    a_key,
    a_route,
    a_table,
    an_identity,
)

FROM_ROUTER = codec.decoder(Register | Demand | Usage | RoundTrips | SnapshotWanted)


class FakeScheduler:
    """A scheduler's control endpoint. With `acks` off it acknowledges nothing."""

    def __init__(self) -> None:
        self.port = 0
        self.acks = True
        self.received: list[Any] = []
        self.socket: web.WebSocketResponse | None = None
        self.changed = asyncio.Condition()

    def of(self, kind: type) -> list[Any]:
        """Return the messages of one kind."""
        return [message for message in self.received if isinstance(message, kind)]

    async def until(self, kind: type, count: int) -> list[Any]:
        """Wait for the `count`th message of a kind."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    async def send(self, message: msgspec.Struct) -> None:
        """Send a message to the router."""
        assert self.socket is not None
        await self.socket.send_bytes(codec.encode(message))

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Challenge and welcome a router, then collect its messages."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        challenge = Challenge(protocol=codec.PROTOCOL, cluster_id=CLUSTER, nonce=b"n" * 16)
        await socket.send_bytes(codec.encode(challenge))
        async for frame in socket:
            message = codec.decode(frame.data, FROM_ROUTER)
            if isinstance(message, Register):
                await socket.send_bytes(codec.encode(Welcome(cluster_id=CLUSTER, epoch=Epoch(1))))
                self.socket = socket
            if isinstance(message, Usage) and self.acks:
                await socket.send_bytes(codec.encode(UsageAck(batch_id=message.batch_id)))
            if isinstance(message, Demand) and self.acks:
                await socket.send_bytes(
                    codec.encode(
                        UsageAck(batch_id="", demand_boot=message.boot_id, demand_seq=message.seq)
                    )
                )
            async with self.changed:
                self.received.append(message)
                self.changed.notify_all()
        return socket


@asynccontextmanager
async def a_scheduler() -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler()
    app = web.Application()
    app.router.add_get("/v1/router", scheduler.serve)
    async with serve_http(app, "127.0.0.1", 0) as scheduler.port:
        yield scheduler
        if scheduler.socket is not None:
            await scheduler.socket.close()


async def send_nothing(message: msgspec.Struct) -> bool:
    """Stand in for a closed connection to the scheduler."""
    return False


async def ask(app: RouterApp) -> int:
    url = f"http://127.0.0.1:{app.port}/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
        http.post(url, json=body) as response,
    ):
        return response.status


def generation_of(app: RouterApp) -> int | None:
    return app.fleet.directory.table.generation if app.fleet.directory.table else None


async def until_generation(app: RouterApp, generation: int) -> None:
    async with asyncio.timeout(30):
        while generation_of(app) != generation:
            await app.loops["probe"].wait_turns(1)


async def a_metric(app: RouterApp, name: str) -> float:
    await app.loops["gauges"].wait_turns(1)
    value = app.metrics.registry.get_sample_value(f"isochrone_router_{name}")
    assert value is not None
    return value


async def test_tables_demand_usage_and_round_trips_are_exchanged(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, an_identity(tmp_path)) as app:
            await scheduler.until(Register, 1)
            await scheduler.send(a_table([a_route(node)]))
            await until_generation(app, 1)
            assert await ask(app) == 200
            (batch, *_) = await scheduler.until(Usage, 1)
            assert [row.output_tokens for row in batch.rows] == [8]
            async with asyncio.timeout(30):
                while not any(demand.rows for demand in scheduler.of(Demand)):
                    await scheduler.until(Demand, len(scheduler.of(Demand)) + 1)
            app.loops["round_trips"].nudge()
            (round_trips, *_) = await scheduler.until(RoundTrips, 1)
            assert [row.node_id for row in round_trips.rows] == ["n1"]
            assert 0 < round_trips.rows[0].rtt_ms < 500
            async with asyncio.timeout(30):
                while list((tmp_path / "state" / "usage").glob("*.usage")):
                    await app.loops["usage"].wait_turns(1)


async def health(app: RouterApp) -> tuple[int, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{app.port}/healthz") as response,
        http.get(f"http://127.0.0.1:{app.port}/health") as same,
    ):
        assert (same.status, await same.json()) == (response.status, await response.json())
        return response.status, await response.json()


async def test_the_router_is_unhealthy_until_it_has_a_table(tmp_path: Path) -> None:
    identity = an_identity(tmp_path)
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, identity) as app:
            status, body = await health(app)
            assert (status, body["status"], body["pop"]) == (503, "no_table", "ams")
            assert body["message"].startswith("cannot serve: no scheduler has sent a route table")
            await scheduler.until(Register, 1)
            await scheduler.send(a_table([a_route(node)]))
            await until_generation(app, 1)
            assert await health(app) == (200, {"status": "ok", "pop": "ams"})
    async with open_router(a_config(tmp_path), identity) as app:
        assert await health(app) == (200, {"status": "ok", "pop": "ams"})


async def test_a_gap_requests_a_snapshot_and_a_repeated_delta_is_ignored(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, an_identity(tmp_path)) as app:
            await scheduler.until(Register, 1)
            tables = [a_table([a_route(node)], generation=n) for n in range(1, 5)]
            await scheduler.send(tables[0])
            await scheduler.send(diff(tables[0], tables[1]))
            await until_generation(app, 2)
            await scheduler.send(diff(tables[0], tables[1]))
            await scheduler.send(diff(tables[2], tables[3]))
            (wanted,) = await scheduler.until(SnapshotWanted, 1)
            assert wanted.have == 2
            await scheduler.send(tables[3])
            await until_generation(app, 4)


async def test_unacknowledged_usage_survives_a_restart(tmp_path: Path) -> None:
    identity = an_identity(tmp_path)
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        scheduler.acks = False
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, identity) as app:
            await scheduler.until(Register, 1)
            await scheduler.send(a_table([a_route(node)]))
            await until_generation(app, 1)
            assert await ask(app) == 200
            first, second, *_ = await scheduler.until(Usage, 2)
            assert first == second
        scheduler.received.clear()
        scheduler.acks = True
        async with open_router(config, identity) as app:
            again = (await scheduler.until(Usage, 1))[0]
            assert again == first
            async with asyncio.timeout(30):
                while list((tmp_path / "state" / "usage").glob("*.usage")):
                    await app.loops["usage"].wait_turns(1)


async def test_unacknowledged_demand_is_sent_again_with_its_age(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        scheduler.acks = False
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, an_identity(tmp_path)) as app:
            await scheduler.until(Register, 1)
            await scheduler.send(a_table([a_route(node)]))
            await until_generation(app, 1)
            assert await ask(app) == 200

            def demands() -> list[Demand]:
                return [demand for demand in scheduler.of(Demand) if demand.rows]

            async with asyncio.timeout(30), scheduler.changed:
                await scheduler.changed.wait_for(lambda: len(demands()) >= 2)
            first, second = demands()[:2]
            assert (first.seq, first.boot_id, first.rows) == (
                second.seq, second.boot_id, second.rows,
            )  # fmt: skip
            assert 0 <= first.age_s < second.age_s
            # An acknowledgement for another process of this router has no effect.
            await scheduler.send(
                UsageAck(batch_id="", demand_boot=BootId("x"), demand_seq=first.seq)
            )
            async with asyncio.timeout(30), scheduler.changed:
                count = len(demands())
                await scheduler.changed.wait_for(lambda: len(demands()) > count + 1)
            scheduler.acks = True
            # One more may be on its way already; after that it is not sent again.
            ack = UsageAck(batch_id="", demand_boot=first.boot_id, demand_seq=first.seq)
            await scheduler.send(ack)
            await app.loops["demand"].wait_turns(2)
            count = len(demands())
            await app.loops["demand"].wait_turns(4)
            assert len(demands()) == count


async def test_a_restart_without_a_scheduler_serves_from_the_table_on_disk(tmp_path: Path) -> None:
    identity = an_identity(tmp_path)
    async with open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=("http://127.0.0.1:9",))
        async with open_router(config, identity) as app:
            assert await ask(app) == 401
            await app.follower.on_table(a_table([a_route(node)]), send_nothing)
        async with open_router(config, identity) as app:
            assert await ask(app) == 200
            assert await a_metric(app, "table_age_seconds") >= 0
            assert await a_metric(app, "scheduler_connected") == 0
        # A truncated snapshot falls back to the one before.
        async with open_router(config, identity) as app:
            await app.follower.on_table(a_table([a_route(node)], generation=2), send_nothing)
        snapshot = tmp_path / "state" / "table.snapshot"
        snapshot.write_bytes(snapshot.read_bytes()[:-9])
        async with open_router(config, identity) as app:
            assert generation_of(app) == 1
            assert await ask(app) == 200


async def test_a_table_on_disk_of_another_cluster_is_ignored(tmp_path: Path) -> None:
    left = msgspec.structs.replace(a_table([]), cluster_id=ClusterId("left"))
    (tmp_path / "state").mkdir()
    files.write_snapshot(tmp_path / "state" / "table.snapshot", codec.encode(left))
    async with (
        open_node(FakeNode()) as node,
        open_router(a_config(tmp_path), an_identity(tmp_path)) as app,
    ):
        assert app.fleet.directory.table is None
        await app.follower.on_table(a_table([a_route(node)]), send_nothing)
        assert await ask(app) == 200


async def test_a_table_that_drops_answering_replicas_is_held_until_they_are_gone(
    tmp_path: Path,
) -> None:
    async with a_bench(tmp_path, 3) as bench:
        app = bench.app
        await app.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        truncated = a_table(routes[:1], generation=2)
        empty = a_table([], generation=3, names=())
        for table in (truncated, empty):
            await app.follower.on_table(table, send_nothing)
            await app.loops["recheck"].wait_turns(1)
            assert generation_of(app) == 1
            assert await ask(app) == 200
        assert await a_metric(app, "tables_refused_total") == 2
        # A table of an older generation or another cluster is not accepted either.
        other = msgspec.structs.replace(a_table(routes, generation=9), cluster_id="c-2")
        for table in (a_table(routes, generation=0), other):
            await app.follower.on_table(table, send_nothing)
            assert generation_of(app) == 1
        # A good table is accepted at once.
        await app.follower.on_table(a_table(routes, generation=4), send_nothing)
        await until_generation(app, 4)
        # Once the nodes report the replicas gone, the smaller table is accepted.
        await app.follower.on_table(a_table(routes[:1], generation=5), send_nothing)
        assert generation_of(app) == 4
        for node in bench.nodes[1:]:
            node.disowned = {f"r-{node.name}"}
        await until_generation(app, 5)
        assert await ask(app) == 200


async def test_of_a_held_table_only_additions_are_used(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 3) as bench, open_node(FakeNode("n9")) as added:
        app = bench.app
        await app.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        wrong = a_table([routes[0], a_route(added)], generation=2)
        await app.follower.on_table(wrong, send_nothing)
        for _ in range(3):
            await app.loops["recheck"].wait_turns(1)
            assert app.follower.quarantined is not None
            assert app.fleet.directory.table is not None
            replicas = [route.replica_id for route in app.fleet.directory.table.routes]
            assert replicas == ["r-n1", "r-n2", "r-n3", "r-n9"]


async def test_a_key_revoked_in_a_held_table_is_refused_at_once(tmp_path: Path) -> None:
    other = a_key(format_key(KeyId("o" * 12), b"\x02" * 32))
    async with a_bench(tmp_path, 3) as bench:
        app = bench.app
        await app.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        await app.follower.on_table(
            a_table(routes, generation=2, keys=[a_key(), other]), send_nothing
        )
        assert await ask(app) == 200
        wrong = a_table(routes[:1], generation=3, keys=[other])
        revoking = msgspec.structs.replace(wrong, keys_revoked=(a_key().key_id,))
        await app.follower.on_table(revoking, send_nothing)
        assert app.follower.quarantined is not None
        assert await ask(app) == 401


async def test_a_delta_builds_on_a_held_table(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 3) as bench:
        app = bench.app
        await app.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        wrong, right = a_table(routes[:1], generation=2), a_table(routes, generation=3)
        await app.follower.on_table(wrong, send_nothing)
        assert app.follower.quarantined is not None
        await app.follower.on_table(diff(wrong, right), send_nothing)
        assert app.fleet.directory.table == right
        assert app.follower.quarantined is None


async def test_a_router_that_shuts_down_lets_streams_finish(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.03
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    async with (
        open_node(node),
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
    ):
        async with open_router(a_config(tmp_path), an_identity(tmp_path)) as app:
            app.fleet.adopt(a_table([a_route(node)]))
            url = f"http://127.0.0.1:{app.port}/v1/chat/completions"
            response = await http.post(url, json={**body, "stream": True, "max_tokens": 20})
            await response.content.readuntil(b"t0")
        text = await response.text()
        assert "t19" in text
        assert text.endswith("data: [DONE]\n\n")


async def test_a_table_in_parts_is_adopted_whole_and_followed_by_deltas(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, an_identity(tmp_path)) as app:
            (register, *_) = await scheduler.until(Register, 1)
            assert TABLE_PARTS in register.capabilities
            more = [a_key(format_key(KeyId(f"{n:012d}"), bytes(32))) for n in range(3000)]
            table = a_table([a_route(node)], keys=[*more, a_key()])
            frames = list(split_table(table, 64 * 1024))
            assert len(frames) > 10
            assert scheduler.socket is not None
            for frame in frames[:-1]:
                await scheduler.socket.send_bytes(frame)
            assert await ask(app) == 401
            assert generation_of(app) is None
            await scheduler.socket.send_bytes(frames[-1])
            await until_generation(app, 1)
            assert await ask(app) == 200
            changed = msgspec.structs.replace(
                table, generation=2, keys=KeyTable.of(list(table.keys)[1:])
            )
            await scheduler.send(diff(table, changed))
            await until_generation(app, 2)
            assert app.fleet.directory.table == changed
            assert app.fleet.directory.keys is app.fleet.directory.table.keys
            async with asyncio.timeout(30):
                while scheduler.of(Demand)[-1:] == [] or (
                    scheduler.of(Demand)[-1].table_generation != 2
                ):
                    await scheduler.until(Demand, len(scheduler.of(Demand)) + 1)


async def test_a_message_above_the_limit_is_dropped_at_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_scheduler() as scheduler:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_router(config, an_identity(tmp_path)) as app:
            await scheduler.until(Register, 1)
            assert isinstance(app.link, ControlLink)
            async with asyncio.timeout(30):
                while not app.link.connected:
                    await app.loops["gauges"].wait_turns(1)
            rows = tuple(RoundTrip(node_id=NodeId("n" * 60), rtt_ms=1.0) for _ in range(100))
            large = RoundTrips(router_id=RouterId("router-1"), rows=rows)
            monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 2000)
            assert await app.link.send(large)
            refused = app.metrics.registry.get_sample_value(
                "isochrone_router_messages_refused_total"
            )
            assert refused == 1
            assert await app.link.send(msgspec.structs.replace(large, rows=rows[:1]))
            await scheduler.until(RoundTrips, 1)
            assert [len(message.rows) for message in scheduler.of(RoundTrips)] == [1]
            assert len(scheduler.of(Register)) == 1

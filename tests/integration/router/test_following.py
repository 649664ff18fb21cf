"""Static stability: what the router does with tables, with none, and with a scheduler that lies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from isochrone.service import files
from isochrone.service.http_server import serve_http
from isochrone.wire import codec
from isochrone.wire.control import Challenge, Register, Welcome
from isochrone.wire.ids import BootId, ClusterId, Epoch, KeyId
from isochrone.wire.keys import format_key
from isochrone.wire.routes import SnapshotWanted, diff
from isochrone.wire.usage import Demand, RoundTrips, Usage, UsageAck
from router.app import House, open_house
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
    """The control door as a router meets it. `acks` may be turned off."""

    def __init__(self) -> None:
        self.port = 0
        self.acks = True
        self.heard: list[Any] = []
        self.socket: web.WebSocketResponse | None = None
        self.changed = asyncio.Condition()

    def of(self, kind: type) -> list[Any]:
        """Return the messages of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    async def until(self, kind: type, count: int) -> list[Any]:
        """Wait for the `count`th message of a kind."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.of(kind)) >= count)
        return self.of(kind)

    async def say(self, message: msgspec.Struct) -> None:
        """Send one message down."""
        assert self.socket is not None
        await self.socket.send_bytes(codec.encode(message))

    async def converse(self, request: web.Request) -> web.WebSocketResponse:
        """Challenge, welcome, listen."""
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
                self.heard.append(message)
                self.changed.notify_all()
        return socket


@asynccontextmanager
async def a_scheduler() -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler()
    app = web.Application()
    app.router.add_get("/v1/router", scheduler.converse)
    async with serve_http(app, "127.0.0.1", 0) as scheduler.port:
        yield scheduler
        if scheduler.socket is not None:
            await scheduler.socket.close()


async def nowhere(message: msgspec.Struct) -> bool:
    """Stand for a conversation that is not there."""
    return False


async def ask(house: House) -> int:
    url = f"http://127.0.0.1:{house.port}/v1/chat/completions"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
        http.post(url, json=body) as response,
    ):
        return response.status


def generation_of(house: House) -> int | None:
    return house.fleet.table.generation if house.fleet.table else None


async def until_generation(house: House, generation: int) -> None:
    async with asyncio.timeout(30):
        while generation_of(house) != generation:
            await house.loops["probe"].wait_turns(1)


async def a_metric(house: House, name: str) -> float:
    await house.loops["gauges"].wait_turns(1)
    value = house.metrics.registry.get_sample_value(f"isochrone_router_{name}")
    assert value is not None
    return value


async def test_tables_demand_usage_and_round_trips_travel(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_house(config, an_identity(tmp_path)) as house:
            await scheduler.until(Register, 1)
            await scheduler.say(a_table([a_route(node)]))
            await until_generation(house, 1)
            assert await ask(house) == 200
            (batch, *_) = await scheduler.until(Usage, 1)
            assert [row.output_tokens for row in batch.rows] == [8]
            async with asyncio.timeout(30):
                while not any(demand.rows for demand in scheduler.of(Demand)):
                    await scheduler.until(Demand, len(scheduler.of(Demand)) + 1)
            house.loops["round_trips"].nudge()
            (round_trips, *_) = await scheduler.until(RoundTrips, 1)
            assert [row.node_id for row in round_trips.rows] == ["n1"]
            assert 0 < round_trips.rows[0].rtt_ms < 500
            async with asyncio.timeout(30):
                while list((tmp_path / "state" / "usage").glob("*.usage")):
                    await house.loops["usage"].wait_turns(1)


async def health(house: House) -> tuple[int, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as http,
        http.get(f"http://127.0.0.1:{house.port}/healthz") as response,
    ):
        return response.status, await response.json()


async def test_it_is_unhealthy_until_it_holds_a_table_told_or_on_disk(tmp_path: Path) -> None:
    identity = an_identity(tmp_path)
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_house(config, identity) as house:
            status, said = await health(house)
            assert (status, said["status"], said["pop"]) == (503, "no_table", "ams")
            assert said["message"].startswith("cannot serve: no scheduler has sent a route table")
            await scheduler.until(Register, 1)
            await scheduler.say(a_table([a_route(node)]))
            await until_generation(house, 1)
            assert await health(house) == (200, {"status": "ok", "pop": "ams"})
    async with open_house(a_config(tmp_path), identity) as house:
        assert await health(house) == (200, {"status": "ok", "pop": "ams"})


async def test_a_gap_asks_for_a_snapshot_and_a_repeat_is_nothing(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_house(config, an_identity(tmp_path)) as house:
            await scheduler.until(Register, 1)
            tables = [a_table([a_route(node)], generation=n) for n in range(1, 5)]
            await scheduler.say(tables[0])
            await scheduler.say(diff(tables[0], tables[1]))
            await until_generation(house, 2)
            await scheduler.say(diff(tables[0], tables[1]))
            await scheduler.say(diff(tables[2], tables[3]))
            (wanted,) = await scheduler.until(SnapshotWanted, 1)
            assert wanted.have == 2
            await scheduler.say(tables[3])
            await until_generation(house, 4)


async def test_usage_not_acknowledged_outlives_the_router(tmp_path: Path) -> None:
    identity = an_identity(tmp_path)
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        scheduler.acks = False
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_house(config, identity) as house:
            await scheduler.until(Register, 1)
            await scheduler.say(a_table([a_route(node)]))
            await until_generation(house, 1)
            assert await ask(house) == 200
            first, second, *_ = await scheduler.until(Usage, 2)
            assert first == second
        scheduler.heard.clear()
        scheduler.acks = True
        async with open_house(config, identity) as house:
            again = (await scheduler.until(Usage, 1))[0]
            assert again == first
            async with asyncio.timeout(30):
                while list((tmp_path / "state" / "usage").glob("*.usage")):
                    await house.loops["usage"].wait_turns(1)


async def test_demand_not_acknowledged_comes_again_with_its_age(tmp_path: Path) -> None:
    async with a_scheduler() as scheduler, open_node(FakeNode()) as node:
        scheduler.acks = False
        config = a_config(tmp_path, schedulers=(f"http://127.0.0.1:{scheduler.port}",))
        async with open_house(config, an_identity(tmp_path)) as house:
            await scheduler.until(Register, 1)
            await scheduler.say(a_table([a_route(node)]))
            await until_generation(house, 1)
            assert await ask(house) == 200

            def asked() -> list[Demand]:
                return [demand for demand in scheduler.of(Demand) if demand.rows]

            async with asyncio.timeout(30), scheduler.changed:
                await scheduler.changed.wait_for(lambda: len(asked()) >= 2)
            first, second = asked()[:2]
            assert (first.seq, first.boot_id, first.rows) == (
                second.seq, second.boot_id, second.rows,
            )  # fmt: skip
            assert 0 <= first.age_s < second.age_s
            # What another process of this router sent is not what this one may forget.
            await scheduler.say(
                UsageAck(batch_id="", demand_boot=BootId("x"), demand_seq=first.seq)
            )
            async with asyncio.timeout(30), scheduler.changed:
                heard = len(asked())
                await scheduler.changed.wait_for(lambda: len(asked()) > heard + 1)
            scheduler.acks = True
            # One that was sent before the acknowledgements may be under way; then it is over.
            ack = UsageAck(batch_id="", demand_boot=first.boot_id, demand_seq=first.seq)
            await scheduler.say(ack)
            await house.loops["demand"].wait_turns(2)
            heard = len(asked())
            await house.loops["demand"].wait_turns(4)
            assert len(asked()) == heard


async def test_a_cold_start_without_a_scheduler_serves_from_disk(tmp_path: Path) -> None:
    identity = an_identity(tmp_path)
    async with open_node(FakeNode()) as node:
        config = a_config(tmp_path, schedulers=("http://127.0.0.1:9",))
        async with open_house(config, identity) as house:
            assert await ask(house) == 401
            await house.follower.on_table(a_table([a_route(node)]), nowhere)
        async with open_house(config, identity) as house:
            assert await ask(house) == 200
            assert await a_metric(house, "table_age_seconds") >= 0
            assert await a_metric(house, "scheduler_connected") == 0
        # A torn snapshot falls back to the one before.
        async with open_house(config, identity) as house:
            await house.follower.on_table(a_table([a_route(node)], generation=2), nowhere)
        snapshot = tmp_path / "state" / "table.snapshot"
        snapshot.write_bytes(snapshot.read_bytes()[:-9])
        async with open_house(config, identity) as house:
            assert generation_of(house) == 1
            assert await ask(house) == 200


async def test_a_table_of_a_cluster_left_behind_is_not_served_by(tmp_path: Path) -> None:
    left = msgspec.structs.replace(a_table([]), cluster_id=ClusterId("left"))
    (tmp_path / "state").mkdir()
    files.write_snapshot(tmp_path / "state" / "table.snapshot", codec.encode(left))
    async with (
        open_node(FakeNode()) as node,
        open_house(a_config(tmp_path), an_identity(tmp_path)) as house,
    ):
        assert house.fleet.table is None
        await house.follower.on_table(a_table([a_route(node)]), nowhere)
        assert await ask(house) == 200


async def test_a_table_that_drops_what_answers_is_refused_until_it_ends(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 3) as bench:
        house = bench.house
        await house.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        truncated = a_table(routes[:1], generation=2)
        empty = a_table([], generation=3, names=())
        for table in (truncated, empty):
            await house.follower.on_table(table, nowhere)
            await house.loops["reconsider"].wait_turns(1)
            assert generation_of(house) == 1
            assert await ask(house) == 200
        assert await a_metric(house, "tables_refused_total") == 2
        # An older database, of the same cluster or another, is not followed either.
        other = msgspec.structs.replace(a_table(routes, generation=9), cluster_id="c-2")
        for table in (a_table(routes, generation=0), other):
            await house.follower.on_table(table, nowhere)
            assert generation_of(house) == 1
        # What is good comes through at once.
        await house.follower.on_table(a_table(routes, generation=4), nowhere)
        await until_generation(house, 4)
        # A real end: the nodes say that the replicas are gone, and the shrink is believed.
        await house.follower.on_table(a_table(routes[:1], generation=5), nowhere)
        assert generation_of(house) == 4
        for node in bench.nodes[1:]:
            node.disowned = {f"r-{node.name}"}
        await until_generation(house, 5)
        assert await ask(house) == 200


async def test_a_held_table_adds_but_does_not_drop(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 3) as bench, open_node(FakeNode("n9")) as added:
        house = bench.house
        await house.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        wrong = a_table([routes[0], a_route(added)], generation=2)
        await house.follower.on_table(wrong, nowhere)
        for _ in range(3):
            await house.loops["reconsider"].wait_turns(1)
            assert house.follower.held is not None
            assert house.fleet.table is not None
            replicas = [route.replica_id for route in house.fleet.table.routes]
            assert replicas == ["r-n1", "r-n2", "r-n3", "r-n9"]


async def test_a_key_revoked_in_a_held_table_is_refused_at_once(tmp_path: Path) -> None:
    other = a_key(format_key(KeyId("o" * 12), b"\x02" * 32))
    async with a_bench(tmp_path, 3) as bench:
        house = bench.house
        await house.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        await house.follower.on_table(a_table(routes, generation=2, keys=[a_key(), other]), nowhere)
        assert await ask(house) == 200
        wrong = a_table(routes[:1], generation=3, keys=[other])
        revoking = msgspec.structs.replace(wrong, keys_revoked=(a_key().key_id,))
        await house.follower.on_table(revoking, nowhere)
        assert house.follower.held is not None
        assert await ask(house) == 401


async def test_a_delta_builds_on_a_held_table(tmp_path: Path) -> None:
    async with a_bench(tmp_path, 3) as bench:
        house = bench.house
        await house.loops["probe"].wait_turns(2)
        routes = [a_route(node) for node in bench.nodes]
        wrong, right = a_table(routes[:1], generation=2), a_table(routes, generation=3)
        await house.follower.on_table(wrong, nowhere)
        assert house.follower.held is not None
        await house.follower.on_table(diff(wrong, right), nowhere)
        assert house.fleet.table == right
        assert house.follower.held is None


async def test_draining_lets_streams_finish(tmp_path: Path) -> None:
    node = FakeNode()
    node.itl_s = 0.03
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    async with (
        open_node(node),
        aiohttp.ClientSession(headers={"authorization": f"Bearer {KEY}"}) as http,
    ):
        async with open_house(a_config(tmp_path), an_identity(tmp_path)) as house:
            house.fleet.adopt(a_table([a_route(node)]))
            url = f"http://127.0.0.1:{house.port}/v1/chat/completions"
            response = await http.post(url, json={**body, "stream": True, "max_tokens": 20})
            await response.content.readuntil(b"t0")
        text = await response.text()
        assert "t19" in text
        assert text.endswith("data: [DONE]\n\n")

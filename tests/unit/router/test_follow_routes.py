"""Following the scheduler: which tables are served and stored, with a clock set by hand."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from isochrone.service import files
from isochrone.wire import codec
from isochrone.wire.client_keys.key_sums import kept_buckets
from isochrone.wire.ids import (
    ClusterId,
    DeploymentId,
    Epoch,
    Generation,
    KeyId,
    ModelId,
    NodeId,
    PopId,
    ReplicaId,
)
from isochrone.wire.peers.routes import (
    DeploymentEntry,
    Pop,
    Route,
    RouteTable,
    RouteTablePart,
    SnapshotWanted,
    diff,
)
from isochrone.wire.peers.table_parts import read_table, split_table
from router.decide.admission.limits import KeyLimiter
from router.decide.routes.route_directory import RouteDirectory, TableIndexes
from router.decide.routes.table_acceptance import EMPTY_TABLE_HELD_S, SILENCE_COUNTS_AFTER_S
from router.decide.routes.withdrawn_routes import WITHDRAWN_MAX, WITHDRAWN_S, WithdrawnRoutes
from router.fleet_state import FleetState
from router.loops import follow_routes
from router.loops.follow_routes import TableFollower
from router.recording.metrics import Metrics
from router.table_file import WRITE_SHARE
from tests.unit.wire.test_table_parts import PART
from tests.unit.wire.test_table_parts import a_table as keys_table

CLUSTER = ClusterId("c-1")
A_POP = Pop(pop=PopId("iad"), city="Ashburn", country="US", latitude=39.0, longitude=-77.5)


class Bench:
    """A follower, its clock, and what it wrote. Each write takes `write_s`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.write_s = 0.001
        self.written: list[RouteTable] = []
        self.fleet = FleetState(PopId("ams"), self.clock, "boot")
        self.follower = TableFollower(
            fleet=self.fleet,
            limiter=KeyLimiter(),
            metrics=Metrics(),
            cluster_id=CLUSTER,
            snapshot=Path("/nonexistent"),
            clock=self.clock,
        )
        patch.setattr(files, "write_snapshot", self._write)

    def clock(self) -> float:
        return self.now_s

    def _write(self, path: Path, payload: Any) -> None:
        self.now_s += self.write_s
        self.written.append(
            read_table(payload if isinstance(payload, bytes) else b"".join(payload))
        )

    async def offer(self, replicas: str, generation: int) -> None:
        async def send(message: object) -> bool:
            raise AssertionError(f"sent {message}")

        await self.follower.on_table(a_table(replicas, generation), send)

    async def offer_part(self, part: RouteTablePart) -> None:
        async def send(message: object) -> bool:
            raise AssertionError(f"sent {message}")

        await self.follower.on_table(part, send)

    def probe(self, answering: str, silent: str = "", disowned: str = "") -> None:
        """Have nodes answer or not, and disown their replicas."""
        for name in answering:
            self.fleet.nodes.record_round_trip(NodeId(f"n{name}"), 1.0, self.now_s)
        for name in silent:
            self.fleet.nodes.record_timeout(NodeId(f"n{name}"))
        for name in disowned:
            self.fleet.nodes.record_refusal(ReplicaId(name), "unknown_replica")

    def served(self) -> str:
        return "".join(sorted(route.replica_id for route in self.fleet.directory.routes))


def a_route(name: str) -> Route:
    return Route(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("d"),
        version=1,
        node_id=NodeId(f"n{name}"),
        pop=PopId("ams"),
        address=f"http://n{name}:1",
    )


def a_table(replicas: str, generation: int) -> RouteTable:
    return RouteTable(
        cluster_id=CLUSTER,
        generation=Generation(generation),
        epoch=Epoch(1),
        deployments=(
            DeploymentEntry(
                deployment_id=DeploymentId("d"), name="m", model_id=ModelId("m"), context_tokens=9
            ),
        ),
        routes=tuple(a_route(name) for name in replicas),
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


async def test_the_last_of_two_changes_is_written_without_a_third(bench: Bench) -> None:
    await bench.offer("a", 1)
    await bench.follower.persist()
    rest_s = bench.write_s * (1 / WRITE_SHARE)
    await bench.offer("ab", 2)
    # Less time has passed than writing the first one allows.
    assert rest_s > 0.0
    assert await bench.follower.persist() == 2
    assert [table.generation for table in bench.written] == [1, 2]
    await bench.follower.persist()
    assert len(bench.written) == 2, "nothing has changed"


async def test_a_router_that_starts_keeps_its_routes_until_nodes_were_probed(bench: Bench) -> None:
    await bench.offer("abc", 1)
    await bench.offer("a", 2)
    assert bench.served() == "abc", "nothing has been probed yet"
    bench.now_s += SILENCE_COUNTS_AFTER_S
    bench.probe("a", silent="bc")
    assert await bench.follower.recheck() == "accepted"
    assert bench.served() == "a"


async def test_an_empty_table_drops_no_silent_replica_for_a_while(bench: Bench) -> None:
    await bench.offer("ab", 1)
    bench.now_s += 3600.0
    bench.probe("", silent="ab")
    await bench.offer("", 2)
    assert bench.served() == "ab"
    # A newer one that is as empty starts no new wait.
    bench.now_s += EMPTY_TABLE_HELD_S - 1
    await bench.offer("", 3)
    assert bench.served() == "ab"
    bench.now_s += 1
    assert await bench.follower.recheck() == "accepted"
    assert bench.served() == ""


async def test_an_empty_table_drops_what_nodes_have_disowned(bench: Bench) -> None:
    await bench.offer("ab", 1)
    bench.now_s += 3600.0
    bench.probe("ab", disowned="ab")
    await bench.offer("", 2)
    assert bench.served() == ""


def is_asked(bench: Bench) -> str:
    return "".join(sorted(route.replica_id for route in bench.follower.dropped()))


async def withdraw(bench: Bench, replicas: str) -> None:
    """Publish replicas, then a table without them, as when all their engines have crashed."""
    await bench.offer(replicas, 1)
    bench.probe(replicas, disowned=replicas)
    await bench.offer("", 2)
    assert bench.served() == ""


async def test_a_withdrawn_replica_is_served_when_its_node_serves_it_again(bench: Bench) -> None:
    await withdraw(bench, "ab")
    assert is_asked(bench) == "ab"
    bench.follower.record_answer(a_route("a"), "unknown_replica")
    assert bench.served() == ""
    bench.follower.record_answer(a_route("a"), "")
    assert (bench.served(), is_asked(bench)) == ("a", "b")
    assert bench.follower.progress().generation == 2
    # A table that knows it no better does not end it, and one with routes does.
    await bench.offer("", 3)
    assert bench.served() == "a"
    await bench.offer("b", 4)
    assert (bench.served(), is_asked(bench)) == ("b", "")


async def test_a_replica_withdrawn_while_another_had_a_route_is_asked_once_none_has(
    bench: Bench,
) -> None:
    asked: list[str] = []
    bench.follower.on_withdrawn = lambda: asked.append(is_asked(bench))
    await bench.offer("ab", 1)
    bench.probe("ab", disowned="b")
    await bench.offer("a", 2)
    # A node is not asked for a replica that no request needs.
    assert (bench.served(), is_asked(bench), asked) == ("a", "", [])
    bench.probe("", disowned="a")
    await bench.offer("", 3)
    assert (bench.served(), asked) == ("", ["ab"])
    bench.follower.record_answer(a_route("b"), "")
    assert bench.served() == "b"
    # One that has a route again is asked afresh when it is needed.
    await bench.offer("a", 4)
    assert (bench.served(), is_asked(bench)) == ("a", "")
    bench.probe("", disowned="a")
    await bench.offer("", 5)
    assert (bench.served(), asked) == ("", ["ab", "ab"])


async def test_a_table_on_disk_has_no_replica_withdrawn_from_a_routed_deployment(
    bench: Bench,
) -> None:
    await bench.offer("ab", 1)
    bench.probe("ab", disowned="b")
    await bench.offer("a", 2)
    await bench.follower.persist()
    stored = bench.written[-1]
    assert ([route.replica_id for route in stored.routes], stored.generation) == (["a"], 2)


def test_a_limited_number_of_withdrawn_replicas_is_remembered() -> None:
    """Those of deployments without a route stay, and of these the ones that serve."""
    withdrawn = WithdrawnRoutes()
    names = [chr(0x4E00 + number) for number in range(WITHDRAWN_MAX + 10)]
    many, one = a_table("".join(names), 1), a_table(names[0], 2)
    assert not withdrawn.adopt(many, one, 0.0)
    assert withdrawn.adopt(one, a_table("", 3), 1.0)
    asked = [route.replica_id for route in withdrawn.silent(2.0)]
    # The last ones of a deployment that kept a route, then the first ones of one that has none.
    assert asked == list(names[10:])
    assert withdrawn.record_answer(asked[-1], serves=True)
    more = "".join(chr(0x6E00 + number) for number in range(20))
    withdrawn.adopt(a_table(more, 4), a_table("", 5), 3.0)
    assert [route.replica_id for route in withdrawn.serving()] == [asked[-1]]
    assert len(withdrawn.silent(4.0)) == WITHDRAWN_MAX - 1


async def test_a_withdrawn_replica_that_is_disowned_again_is_not_served(bench: Bench) -> None:
    await withdraw(bench, "a")
    bench.follower.record_answer(a_route("a"), "")
    bench.probe("a", disowned="a")
    await bench.follower.recheck()
    assert (bench.served(), is_asked(bench)) == ("", "a")


async def test_a_withdrawn_replica_is_asked_for_a_limited_time(bench: Bench) -> None:
    await withdraw(bench, "a")
    bench.now_s += WITHDRAWN_S
    assert is_asked(bench) == ""


async def test_a_replica_of_a_deployment_that_was_deleted_is_not_asked(bench: Bench) -> None:
    await withdraw(bench, "a")
    deleted = msgspec.structs.replace(a_table("", 3), deployments=())
    bench.follower.accept(deleted)
    assert is_asked(bench) == ""


async def test_withdrawn_replicas_that_serve_again_index_no_table_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds may answer in one turn of the event loop, beside a table of thousands."""
    await withdraw(bench, "abc")
    with monkeypatch.context() as patch:
        patch.setattr(TableIndexes, "steps", None)
        for name in "cab":
            bench.follower.record_answer(a_route(name), "")
    directory = bench.fleet.directory
    assert directory.table is not None
    whole = RouteDirectory()
    whole.adopt(directory.table)
    assert [route.replica_id for route in directory.table.routes] == ["a", "b", "c"]
    for name in "abc":
        assert directory.route(ReplicaId(name)) == whole.route(ReplicaId(name))
        assert directory.replicas_on(NodeId(f"n{name}")) == [name]
    served = bench.fleet.routing(DeploymentId("d")).replicas.slots
    assert sorted(served) == ["a", "b", "c"]


async def test_a_table_is_indexed_in_slices_while_withdrawn_replicas_serve(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await withdraw(bench, "ab")
    bench.follower.record_answer(a_route("a"), "")
    # Indexing it whole, in place of its slices, would fail.
    monkeypatch.setattr(RouteDirectory, "adopt", None)
    table = msgspec.structs.replace(a_table("", 3), pops=(A_POP,))
    bench.follower.accept(table, await bench.follower.prepare(table))
    assert (bench.served(), bench.follower.progress().generation) == ("a", 3)
    # A change of keys alone needs no indexes at all.
    keys = msgspec.structs.replace(table, generation=Generation(4))
    assert await bench.follower.prepare(keys) is None
    bench.follower.accept(keys)
    assert (bench.served(), bench.follower.progress().generation) == ("a", 4)


async def test_a_router_that_starts_again_knows_withdrawn_replicas(bench: Bench) -> None:
    """Without a generation: the scheduler sends it a whole table."""
    await withdraw(bench, "a")
    await bench.follower.persist()
    stored = bench.written[-1]
    assert [route.replica_id for route in stored.routes] == ["a"]
    assert stored.generation == 0


async def test_a_router_that_comes_back_keeps_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)

    async def send(message: object) -> bool:
        raise AssertionError(f"sent {message}")

    async def offer(table: RouteTable, held: bytes) -> int:
        kept = kept_buckets(held, table.keys.sums) if held else None
        parts = [codec.decode(frame, PART) for frame in split_table(table, kept=kept) if frame]
        for part in parts:
            await bench.follower.on_table(part, send)
        return sum(len(part.keys) for part in parts)

    assert bench.follower.registering().keys_held == b""
    first = msgspec.structs.replace(a_table("ab", 1), keys=keys_table(2000).keys)
    assert await offer(first, b"") == 2000
    held = bench.follower.registering().keys_held
    assert held == first.keys.sums.encode()
    # A change that arrives after the registration: the answer to it was made without it.
    changed = first.keys.replaced([], [first.keys.pieces[0][0].key_id])
    second = msgspec.structs.replace(first, generation=Generation(2), keys=changed)
    await bench.follower.on_table(diff(first, second), send)
    third = msgspec.structs.replace(first, generation=Generation(3))
    assert await offer(third, held) == 0
    assert bench.fleet.directory.table == third


async def test_requests_have_their_turn_between_the_parts_of_a_table(bench: Bench) -> None:
    table = msgspec.structs.replace(a_table("ab", 1), keys=keys_table(3000).keys)
    parts = [codec.decode(frame, PART) for frame in split_table(table, 4096) if frame]
    assert len(parts) > 20
    turns: list[int] = []
    for number, part in enumerate(parts):
        asyncio.get_running_loop().call_soon(turns.append, number)
        await bench.offer_part(part)
        assert turns[-1] == number


class UsedKeys:
    """Stands for the limits' state of keys, and counts how many are forgotten at once."""

    def __init__(self, count: int) -> None:
        self.keys = [KeyId(f"k{number}") for number in range(count)]
        self.at_once: list[int] = []
        self.turns = 0

    def key_ids(self) -> list[KeyId]:
        return self.keys

    def forget(self, key_ids: Iterable[KeyId]) -> None:
        assert self.turns == len(self.at_once), "requests had their turn"
        self.at_once.append(len(list(key_ids)))
        asyncio.get_running_loop().call_soon(self._note_turn)

    def _note_turn(self) -> None:
        self.turns += 1


async def test_keys_that_left_the_table_are_forgotten_some_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_routes, "KEYS_PER_SLICE", 3)
    used = UsedKeys(8)
    monkeypatch.setattr(bench.follower, "_limiter", used)
    await bench.follower.persist()
    assert used.at_once == [3, 3, 2]


async def test_keys_alone_leave_the_routes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a scheduler with a restored database knows before its nodes have reported."""
    bench = Bench(monkeypatch)

    async def send(message: object) -> bool:
        raise AssertionError(f"sent {message}")

    async def offer(table: RouteTable) -> None:
        for frame in split_table(table):
            await bench.follower.on_table(codec.decode(frame, PART), send)

    keys = keys_table(30).keys
    alone = RouteTable(
        cluster_id=CLUSTER,
        generation=Generation(7),
        epoch=Epoch(2),
        keys_only=True,
        keys=keys,
        keys_revoked=(KeyId("leaked"),),
    )
    # Nothing to add them to: the whole table follows.
    await offer(alone)
    assert bench.fleet.directory.table is None
    first = a_table("ab", 1)
    await offer(first)
    bench.probe("ab")
    await offer(alone)
    expected = msgspec.structs.replace(
        first,
        generation=Generation(7),
        epoch=Epoch(2),
        keys=keys,
        keys_revoked=(KeyId("leaked"),),
    )
    assert bench.fleet.directory.table == expected and bench.follower.quarantined is None
    fewer = keys.replaced([], [keys.pieces[0][0].key_id])
    revoked = msgspec.structs.replace(alone, generation=Generation(8), keys=fewer)
    await bench.follower.on_table(diff(alone, revoked), send)
    assert bench.fleet.directory.keys == fewer and bench.served() == "ab"
    older = msgspec.structs.replace(alone, generation=Generation(6))
    await offer(older)
    assert bench.fleet.directory.keys == fewer


async def test_a_router_that_missed_a_change_tells_which_keys_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    first = msgspec.structs.replace(a_table("ab", 1), keys=keys_table(30).keys)
    wanted: list[SnapshotWanted] = []

    async def send(message: object) -> bool:
        assert isinstance(message, SnapshotWanted)
        wanted.append(message)
        return True

    await bench.follower.on_table(first, send)
    table, later = (msgspec.structs.replace(first, generation=Generation(n)) for n in (5, 6))
    await bench.follower.on_table(diff(table, later), send)
    assert wanted == [SnapshotWanted(have=Generation(1), keys_held=first.keys.sums.encode())]

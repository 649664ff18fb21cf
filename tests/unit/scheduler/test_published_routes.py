"""What each router is sent of the route table."""

from typing import Any, cast

import msgspec
import pytest

from isochrone.wire import codec
from isochrone.wire.ids import Generation, KeyId
from isochrone.wire.peers.control import TABLE_PARTS
from scheduler.state import published_routes
from scheduler.state.published_routes import PublishedRoutes, TableParts
from tests.unit.wire.test_table_parts import a_table


class FakeRouter:
    """A router's connection that keeps what is queued."""

    def __init__(self, name: str, *capabilities: str) -> None:
        self.name = name
        self.capabilities = frozenset(capabilities)
        self.generation = Generation(0)
        self.keys_held = b""
        self.queued: list[Any] = []

    def enqueue(self, message: Any) -> None:
        self.queued.append(message)


def published(keys: int) -> PublishedRoutes:
    routes = PublishedRoutes(lambda: None)
    routes.replace(a_table(keys, generation=7))
    return routes


def send(routes: PublishedRoutes, router: FakeRouter) -> None:
    routes.send_table(cast(Any, router))


def test_each_part_is_encoded_once_for_all_routers() -> None:
    routes, first, second = published(3000), FakeRouter("a", TABLE_PARTS), FakeRouter("b")
    second.capabilities = first.capabilities
    send(routes, first)
    send(routes, second)
    (parts,), (same,) = first.queued, second.queued
    assert isinstance(parts, TableParts)
    assert parts is same
    assert parts.frame(0) is same.frame(0)
    assert first.generation == second.generation == 7


def test_keys_that_changed_before_a_term_are_not_published_again_after_its_first_table() -> None:
    """A scheduler that stood by may have changed any number of them, which it reads with all."""
    routes = published(3)
    routes.mark_key_changed(KeyId("k1"))
    routes.replace(None)
    routes.mark_key_changed(KeyId("k2"))
    assert routes.take_changed_keys(10) == {"k2"}


def test_an_older_router_gets_one_frame_while_it_fits() -> None:
    routes, old = published(10), FakeRouter("old")
    send(routes, old)
    assert routes.table is not None
    assert old.queued == [codec.encode(routes.table)]
    assert old.generation == 7


@pytest.mark.parametrize("keys", [10, 1000])
def test_an_older_router_that_cannot_be_sent_the_table_is_named(
    keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 2000)
    routes, old, new = published(keys), FakeRouter("old"), FakeRouter("new", TABLE_PARTS)
    send(routes, old)
    send(routes, new)
    assert (old.queued, old.generation) == ([], 0)
    assert len(new.queued) == 1
    assert "upgrade" in routes.following.behind(0.0)["old"]
    assert list(routes.following.behind(0.0)) == ["old"]


def test_a_table_that_no_router_would_take_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published_routes, "TABLE_ENTRIES_MAX", 9)
    routes, router = published(10), FakeRouter("r", TABLE_PARTS)
    send(routes, router)
    assert router.queued == []
    assert "10 keys and replicas, the limit is 9" in routes.following.behind(0.0)["r"]


def test_a_router_that_has_the_keys_is_not_sent_them_again() -> None:
    routes, back, new = published(3000), FakeRouter("b", TABLE_PARTS), FakeRouter("n", TABLE_PARTS)
    back.keys_held = routes.keys.sums.encode()
    send(routes, back)
    send(routes, new)
    (few,), (all_,) = back.queued, new.queued
    assert sum_bytes(few) < sum_bytes(all_) / 3
    # What it has is known for one table only: deltas change it.
    assert back.keys_held == b""
    send(routes, back)
    assert back.queued[1] is all_


def test_routers_that_come_one_by_one_while_the_table_changes_share_its_parts() -> None:
    routes, routers = published(3000), [FakeRouter(f"r{n}", TABLE_PARTS) for n in range(3)]
    send(routes, routers[0])
    for generation in (8, 9):
        assert routes.table is not None
        table = msgspec.structs.replace(routes.table, generation=Generation(generation))
        routes.replace(table, b"delta %d" % generation)
        send(routes, routers[generation - 7])
    parts = routers[0].queued[0]
    assert routers[1].queued == [parts, b"delta 8"]
    assert routers[2].queued == [parts, b"delta 8", b"delta 9"]
    assert routers[2].generation == 9


@pytest.mark.parametrize("deltas", [[b""], [b"x" * 9], [b"x", b"x", b"x"]])
def test_a_table_is_encoded_again_when_too_much_has_changed(
    deltas: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_routes, "DELTAS_AFTER_PARTS_MAX", 2)
    monkeypatch.setattr(published_routes, "DELTA_BYTES_AFTER_PARTS_MAX", 8)
    routes, first, second = (
        published(30),
        FakeRouter("a", TABLE_PARTS),
        FakeRouter("b", TABLE_PARTS),
    )
    send(routes, first)
    for delta in deltas:
        routes.replace(routes.table, delta)
    send(routes, second)
    (parts,) = second.queued
    assert parts is not first.queued[0]


def test_few_tables_without_the_keys_that_routers_have_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(published_routes, "PARTIAL_TABLES_MAX", 2)
    routes = published(3000)
    held = [a_table(keys).keys.sums.encode() for keys in (2800, 2900, 2950)]
    sent = []
    for sums in (held[0], held[1], held[0], held[2], held[0]):
        router = FakeRouter("r", TABLE_PARTS)
        router.keys_held = sums
        send(routes, router)
        sent.append(router.queued[0])
    first, other, same, third, again = sent
    assert same is first
    assert len({id(parts) for parts in (first, other, third, again)}) == 4


def sum_bytes(parts: TableParts) -> int:
    size = index = 0
    while (frame := parts.frame(index)) is not None:
        size, index = size + len(frame), index + 1
    return size

"""Blocks in the PoP's store: named and sealed, and missing whenever anything is wrong with them."""

import hashlib
import socket
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from isochrone.wire.kv.kv_store import MEMBER_TTL_S
from nodeagent.engine.kvcache.store_ports import listening_ports
from nodeagent.engine.kvcache.store_tier import (
    CALLS_MAX,
    FORGOTTEN_AFTER_S,
    HANGS_AFTER_S,
    PAUSE_S,
    READS_MAX,
    StoreLost,
    StoreTier,
)

MODEL, OTHER_MODEL = b"m" * 16, b"o" * 16
BLOCK_BYTES = 100
"""Not a multiple of what contents are aligned to."""
DIGESTS = [hashlib.sha256(bytes([number])).digest() for number in range(6)]


class Store:
    """The store's contents, and how it fails."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.objects_max = 100
        self.is_lost = False
        self.calls = 0
        self.left = 0

    def exist(self, names: Sequence[str]) -> list[bool]:
        self.calls += 1
        if self.is_lost:
            raise StoreLost("lost")
        return [name in self.objects for name in names]

    def get(self, names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        self.calls += 1
        whole = []
        for name, place in zip(names, places, strict=True):
            stored = self.objects.get(name, b"")
            is_whole = not self.is_lost and len(stored) == place.nbytes
            if is_whole:
                place.copy_(torch.frombuffer(bytearray(stored), dtype=torch.uint8))
            whole.append(is_whole)
        return whole

    def put(self, names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        self.calls += 1
        stored = []
        for name, place in zip(names, places, strict=True):
            has_capacity = not self.is_lost and len(self.objects) < self.objects_max
            if has_capacity:
                self.objects.setdefault(name, place.numpy().tobytes())
            stored.append(has_capacity)
        return stored

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)

    def register(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def close(self) -> None:
        self.left += 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_tier(
    join: Callable[[], Store], model: bytes = MODEL, clock: Callable[[], float] = lambda: 0.0
) -> StoreTier:
    """Return a tier that takes three blocks at a time, which has joined."""
    tier = StoreTier(join, lambda: model, BLOCK_BYTES, 4 * 3 * 192, clock)
    tier._keep_joining()
    assert tier.part_blocks == 3
    return tier


def contents(*numbers: int) -> Tensor:
    rows = [torch.full((BLOCK_BYTES // 4,), float(number)) for number in numbers]
    return torch.stack(rows)


def test_another_engine_of_the_model_finds_what_was_stored() -> None:
    store = Store()
    first, second = a_tier(lambda: store), a_tier(lambda: store)
    assert first.missing(DIGESTS[:4]) == DIGESTS[:4]
    assert first.write(DIGESTS[:3], contents(0, 1, 2)) == 3
    assert second.count_prefix(DIGESTS) == 3
    assert second.missing(DIGESTS[:4]) == DIGESTS[3:4]
    read = second.read(DIGESTS[:3])
    assert torch.equal(read.view(torch.float32), contents(0, 1, 2))
    # It is a copy: the next read does not change it.
    second.write(DIGESTS[3:4], contents(3))
    second.read(DIGESTS[3:4])
    assert torch.equal(read.view(torch.float32), contents(0, 1, 2))
    assert second.counts()["kv_store_read_blocks_total"] == 4


def test_a_read_ends_before_what_is_missing_and_takes_one_part_at_most() -> None:
    store = Store()
    tier = a_tier(lambda: store)
    tier.write([DIGESTS[0], DIGESTS[2]], contents(0, 2))
    assert tier.count_prefix(DIGESTS) == 1
    assert len(tier.read(DIGESTS[:3])) == 1
    tier.write(DIGESTS[1:2], contents(1))
    tier.write(DIGESTS[3:6], contents(3, 4, 5))
    assert (tier.count_prefix(DIGESTS), len(tier.read(DIGESTS))) == (6, 3)


def test_another_model_finds_nothing() -> None:
    store = Store()
    a_tier(lambda: store).write(DIGESTS[:2], contents(0, 1))
    other = a_tier(lambda: store, OTHER_MODEL)
    assert (other.count_prefix(DIGESTS), len(other.read(DIGESTS))) == (0, 0)


@pytest.mark.parametrize("fault", ["flipped", "of another name", "of another model", "unsealed"])
def test_a_wrong_block_is_deleted_and_ends_the_read(fault: str) -> None:
    store = Store()
    tier = a_tier(lambda: store)
    tier.write(DIGESTS[:3], contents(0, 1, 2))
    names = list(store.objects)
    if fault == "flipped":
        changed = bytearray(store.objects[names[1]])
        changed[-1] ^= 1
        store.objects[names[1]] = bytes(changed)
    elif fault == "of another name":
        store.objects[names[1]] = store.objects[names[2]]
    elif fault == "of another model":
        other = Store()
        a_tier(lambda: other, OTHER_MODEL).write(DIGESTS[1:2], contents(1))
        (store.objects[names[1]],) = other.objects.values()
    else:
        store.objects[names[1]] = bytes(len(store.objects[names[1]]))
    assert torch.equal(tier.read(DIGESTS[:3]).view(torch.float32), contents(0))
    assert tier.counts()["kv_store_wrong_blocks_total"] == 1
    assert tier.missing(DIGESTS[:3]) == DIGESTS[1:2]
    assert tier.write(DIGESTS[1:2], contents(1)) == 1
    assert torch.equal(tier.read(DIGESTS[:3]).view(torch.float32), contents(0, 1, 2))


def test_a_block_of_another_size_is_missing() -> None:
    store = Store()
    tier = a_tier(lambda: store)
    tier.write(DIGESTS[:2], contents(0, 1))
    for name in list(store.objects):
        store.objects[name] *= 4
    assert len(tier.read(DIGESTS[:2])) == 0


def test_a_full_store_is_no_error() -> None:
    store = Store()
    tier = a_tier(lambda: store)
    store.objects_max = 2
    assert tier.write(DIGESTS[:3], contents(0, 1, 2)) == 2
    assert tier.counts()["kv_store_refused_blocks_total"] == 1


def test_a_lost_store_is_empty_and_is_not_asked_for_a_while() -> None:
    store, clock = Store(), Clock()
    tier = a_tier(lambda: store, clock=clock)
    tier.write(DIGESTS[:2], contents(0, 1))
    store.is_lost = True
    assert tier.count_prefix(DIGESTS) == 0
    calls = store.calls
    # Nothing is copied off the device for a store that is lost.
    assert tier.missing(DIGESTS[:2]) == []
    assert (tier.count_prefix(DIGESTS), len(tier.read(DIGESTS[:2]))) == (0, 0)
    assert tier.write(DIGESTS[2:3], contents(2)) == 0
    assert store.calls == calls
    store.is_lost, clock.now_s = False, PAUSE_S
    assert tier.count_prefix(DIGESTS) == 2


def test_a_store_with_too_many_calls_is_not_written_to() -> None:
    """What it has is not known then. To store all of it again would make the wait longer."""
    store = Store()
    tier = a_tier(lambda: store)
    tier.write(DIGESTS[:2], contents(0, 1))
    tier._calls = CALLS_MAX
    assert (tier.missing(DIGESTS[:3]), tier.count_prefix(DIGESTS)) == ([], 0)
    tier._calls = 0
    assert tier.missing(DIGESTS[:3]) == DIGESTS[2:3]


def test_a_member_that_cannot_use_its_buffer_leaves_before_it_joins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each member gives memory to the store."""
    monkeypatch.setattr("nodeagent.engine.kvcache.store_tier.JOIN_AGAIN_S", 0.0)
    members: list[Store] = []

    class Refusing(Store):
        def register(self, buffer: Tensor) -> None:
            if len(members) < 3:
                raise StoreLost("cannot register memory")

    def join() -> Store:
        members.append(Refusing())
        return members[-1]

    a_tier(join)
    assert [member.left for member in members] == [1, 1, 0]


def test_an_engine_that_ends_while_it_joins_leaves_the_store() -> None:
    store = Store()

    def join() -> Store:
        tier.close(1.0)
        return store

    tier = StoreTier(join, lambda: MODEL, BLOCK_BYTES, 4 * 3 * 192, lambda: 0.0)
    tier._keep_joining()
    assert (store.left, tier.counts()["kv_store_joined"]) == (1, 0)


def test_calls_that_hang_leave_the_store_empty_for_others() -> None:
    store = Store()
    tier = a_tier(lambda: store)
    tier.write(DIGESTS[:1], contents(0))
    may_end, has_begun = threading.Event(), threading.Semaphore(0)
    answer = store.exist

    def hang(names: Sequence[str]) -> list[bool]:
        has_begun.release()
        may_end.wait()
        return answer(names)

    store.exist = hang  # type: ignore[method-assign]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(tier.count_prefix(DIGESTS)))
        for _ in range(CALLS_MAX)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert has_begun.acquire(timeout=60)
    assert tier.count_prefix(DIGESTS) == 0
    may_end.set()
    for thread in threads:
        thread.join()
    assert found == [1] * CALLS_MAX
    assert tier.count_prefix(DIGESTS) == 1


def test_a_read_that_hangs_holds_up_no_other_once_the_master_has_forgotten_its_engine() -> None:
    """Mooncake gives up after a minute. Until then all fetches of the engine waited for that one,
    and each request for its fetch."""
    store, clock = Store(), Clock()
    tier = a_tier(lambda: store, clock=clock)
    tier.write(DIGESTS[:1], contents(0))
    may_end, has_begun = threading.Event(), threading.Semaphore(0)
    answer = store.get

    def hang(names: Sequence[str], places: Sequence[Tensor]) -> list[bool]:
        has_begun.release()
        may_end.wait()
        return answer(names, places)

    store.get = hang  # type: ignore[method-assign]
    read: list[Tensor] = []
    hung = [
        threading.Thread(target=lambda: read.append(tier.read(DIGESTS[:1])))
        for _ in range(READS_MAX)
    ]
    for thread in hung[1:]:
        thread.start()
        assert has_begun.acquire(timeout=60)
    store.get = answer  # type: ignore[method-assign]
    # It may only be slow.
    assert (tier.count_prefix(DIGESTS), len(tier.read(DIGESTS[:1]))) == (1, 1)
    clock.now_s = HANGS_AFTER_S
    assert (tier.count_prefix(DIGESTS), len(tier.read(DIGESTS[:1]))) == (0, 0)
    clock.now_s = FORGOTTEN_AFTER_S
    assert (tier.count_prefix(DIGESTS), len(tier.read(DIGESTS[:1]))) == (1, 1)
    # All parts are in use: nothing waits for one while the store is not to be used.
    store.get = hang  # type: ignore[method-assign]
    hung[0].start()
    assert has_begun.acquire(timeout=60)
    clock.now_s += HANGS_AFTER_S
    assert (tier.count_prefix(DIGESTS), len(tier.read(DIGESTS[:1]))) == (0, 0)
    may_end.set()
    for thread in hung:
        thread.join()
    assert [len(blocks) for blocks in read] == [1] * len(hung)


def test_the_store_is_joined_once_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.engine.kvcache.store_tier.JOIN_AGAIN_S", 0.0)
    store, attempts = Store(), 0

    def join() -> Store:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise StoreLost("no master yet")
        return store

    tier = a_tier(join)
    assert (attempts, tier.counts()["kv_store_joined"]) == (3, 1)
    tier.close(60.0)
    assert (store.left, tier.counts()["kv_store_joined"]) == (1, 0)
    assert tier.count_prefix(DIGESTS) == 0


def test_an_engine_does_not_join_while_the_master_names_the_memory_of_one_that_died() -> None:
    """It listened at the port of its predecessor, copied from that one's addresses, and crashed."""
    assert FORGOTTEN_AFTER_S > MEMBER_TTL_S
    attempts = 0

    def join() -> Store:
        nonlocal attempts
        attempts += 1
        return Store()

    tier = StoreTier(join, lambda: MODEL, BLOCK_BYTES, 4 * 3 * 192, Clock())
    before = set(threading.enumerate())
    tier.start()
    (joining,) = set(threading.enumerate()) - before
    tier.close(0.0)
    joining.join(60.0)
    assert (joining.is_alive(), attempts) == (False, 0)


def test_an_engine_does_not_join_while_the_master_names_one_that_died_since_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nodeagent.engine.kvcache.store_tier.LOOK_S", 0.0)
    clock, joined_at_s = Clock(), list[float]()

    def listening() -> set[int]:
        clock.now_s += 0.5
        return {9501, 9504} if clock.now_s < 7.0 else {9501}

    def join() -> Store:
        joined_at_s.append(clock.now_s)
        return Store()

    tier = StoreTier(join, lambda: MODEL, BLOCK_BYTES, 4 * 3 * 192, clock, listening)
    tier._keep_joining(FORGOTTEN_AFTER_S)
    assert joined_at_s == [7.0 + FORGOTTEN_AFTER_S]
    tier.close(60.0)


def test_the_ports_at_which_processes_listen_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        port = server.getsockname()[1]
        bound.bind(("127.0.0.1", 0))
        assert listening_ports(port, port) == {port}
        assert listening_ports(port + 1, 65_535).isdisjoint({port, bound.getsockname()[1]})
    assert not listening_ports(port, port)


def test_an_engine_serves_before_it_has_joined() -> None:
    def join() -> Store:
        raise StoreLost("no master")

    tier = StoreTier(join, lambda: MODEL, BLOCK_BYTES, 0, Clock())
    assert (tier.count_prefix(DIGESTS), tier.missing(DIGESTS)) == (0, [])
    assert (len(tier.read(DIGESTS)), tier.write(DIGESTS[:1], contents(0))) == (0, 0)
    assert tier.part_blocks == 1
    tier.close(0.0)

"""The queue's warm half: who is woken, who leaves, and what becomes of those behind."""

import asyncio
from collections.abc import Callable

import pytest

from isochrone.wire.ids import DeploymentId, TenantId
from router.admission_queue import AdmissionQueue, AdmissionRefused, QueueEntry, RefusalReason

D = DeploymentId("d")


class Bench:
    """A lane with so many tokens of room, and requests that come for some."""

    def __init__(self, room: int, depth_max: int = 100, bytes_max: int = 1000) -> None:
        self.room = room
        self.waiting = AdmissionQueue(depth_max, bytes_max, asyncio.get_running_loop().time)
        self.order: list[str] = []
        self.looks = 0

    async def serve(
        self, name: str, tokens: int = 1, timeout_s: float = 5.0, size_bytes: int = 0
    ) -> QueueEntry:
        """Take room as the pipeline does; `name`'s first letter is the tenant."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        place = QueueEntry(D, TenantId(name[0]), tokens, until_s, size_bytes=size_bytes)
        try:
            while True:
                self.looks += 1
                if self.waiting.must_wait(place) or self.room < tokens:
                    await self.waiting.wait(place)
                    continue
                self.waiting.admit(place)
                self.room -= tokens
                self.order.append(name)
                return place
        finally:
            self.waiting.leave(place)

    def free(self, tokens: int = 1) -> None:
        """Let room come."""
        self.room += tokens
        self.waiting.wake(D)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0)


async def test_room_is_taken_in_turn_and_only_the_head_looks() -> None:
    bench = Bench(room=0)
    tasks = [asyncio.create_task(bench.serve(name)) for name in ("a1", "a2", "a3", "a4", "b1")]
    await bench.until(lambda: bench.waiting.depth == 5)
    looks = bench.looks
    bench.free(3)
    await bench.until(lambda: len(bench.order) == 3)
    assert bench.order == ["a1", "b1", "a2"]
    # Three took room and the fourth looked in vain, whoever else waits.
    assert bench.looks - looks <= 5
    bench.free(2)
    await asyncio.gather(*tasks)
    assert bench.order == ["a1", "b1", "a2", "a3", "a4"]
    assert bench.waiting.depth == 0


async def test_nobody_overtakes_the_head_into_room_that_is_too_small_for_it() -> None:
    bench = Bench(room=5)
    large = asyncio.create_task(bench.serve("a", tokens=10))
    await bench.until(lambda: bench.waiting.depth == 1)
    small = asyncio.create_task(bench.serve("a-small", tokens=1))
    await bench.until(lambda: bench.waiting.depth == 2)
    bench.free(5)
    await large
    bench.free(1)
    await small
    assert bench.order == ["a", "a-small"]


async def test_who_leaves_lets_the_next_move_up_at_once() -> None:
    bench = Bench(room=5)
    large = asyncio.create_task(bench.serve("a", tokens=10))
    await bench.until(lambda: bench.waiting.depth == 1)
    small = asyncio.create_task(bench.serve("b", tokens=1))
    await bench.until(lambda: bench.waiting.depth == 2)
    large.cancel()
    await asyncio.wait((large,))
    # No room came and no timer is due: that the head left is what wakes it.
    for _ in range(10):
        await asyncio.sleep(0)
    assert small.done()
    assert bench.order == ["b"]
    assert bench.waiting.depth == 0


async def test_each_waits_until_its_own_deadline() -> None:
    bench = Bench(room=0)
    patient = asyncio.create_task(bench.serve("a", timeout_s=5.0))
    await bench.until(lambda: bench.waiting.depth == 1)
    with pytest.raises(AdmissionRefused) as caught:
        await bench.serve("b", timeout_s=0.05)
    assert caught.value.reason is RefusalReason.DEADLINE
    assert bench.waiting.depth == 1
    bench.free()
    await patient


async def test_who_makes_way_is_told_so() -> None:
    bench = Bench(room=0, depth_max=3)
    flood = [asyncio.create_task(bench.serve(f"a{n}")) for n in range(3)]
    await bench.until(lambda: bench.waiting.depth == 3)
    with pytest.raises(AdmissionRefused) as caught:
        await bench.serve("a3")
    assert caught.value.reason is RefusalReason.FULL
    quiet = asyncio.create_task(bench.serve("b"))
    with pytest.raises(AdmissionRefused) as caught:
        await flood[2]
    assert caught.value.reason is RefusalReason.DISPLACED
    bench.free(3)
    await asyncio.gather(quiet, *flood[:2])
    assert bench.order == ["a0", "b", "a1"]


async def test_the_impatient_do_not_wait_nor_overtake() -> None:
    bench = Bench(room=0)
    patient = asyncio.create_task(bench.serve("a"))
    await bench.until(lambda: bench.waiting.depth == 1)
    until_s = asyncio.get_running_loop().time() + 5
    place = QueueEntry(D, TenantId("b"), 1, until_s, can_wait=False)
    assert bench.waiting.must_wait(place)
    with pytest.raises(AdmissionRefused) as caught:
        await bench.waiting.wait(place)
    assert caught.value.reason is RefusalReason.BUSY
    bench.free()
    await patient


async def test_what_a_node_refused_goes_back_to_the_head() -> None:
    bench = Bench(room=0)
    place = QueueEntry(D, TenantId("a"), 1, asyncio.get_running_loop().time() + 5)
    first = asyncio.create_task(bench.waiting.wait(place))
    await bench.until(lambda: bench.waiting.depth == 1)
    others = [asyncio.create_task(bench.serve(name)) for name in ("a2", "b1")]
    await bench.until(lambda: bench.waiting.depth == 3)
    bench.waiting.wake(D)
    await first
    assert bench.waiting.admit(place) is not None
    assert bench.waiting.depth == 2
    again = asyncio.create_task(bench.waiting.wait(place))
    await bench.until(lambda: bench.waiting.depth == 3)
    assert not bench.waiting.must_wait(place)
    bench.waiting.wake(D)
    await again
    bench.waiting.admit(place)
    bench.free(2)
    await asyncio.gather(*others)
    assert bench.order == ["b1", "a2"]


async def test_one_tenants_bodies_leave_room_for_anothers() -> None:
    bench = Bench(room=0, bytes_max=1000)
    first = asyncio.create_task(bench.serve("a1", size_bytes=400))
    await bench.until(lambda: bench.waiting.bytes == 400)
    with pytest.raises(AdmissionRefused) as refused:
        await bench.serve("a2", size_bytes=400)
    assert refused.value.reason is RefusalReason.BYTES
    second = asyncio.create_task(bench.serve("b1", size_bytes=400))
    await bench.until(lambda: bench.waiting.bytes == 800)
    bench.free(2)
    await asyncio.gather(first, second)
    assert bench.order == ["a1", "b1"]
    assert bench.waiting.bytes == 0

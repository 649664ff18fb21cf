"""The admission queue: which request is woken, which leaves, and what the others behind it do."""

import asyncio
from collections.abc import Callable

import pytest

from isochrone.wire.ids import DeploymentId, TenantId
from router.admission_queue import AdmissionQueue, AdmissionRefused, QueueEntry, RefusalReason

D = DeploymentId("d")


class OneLane:
    """One deployment with a capacity of tokens, and requests that use some of it."""

    def __init__(self, capacity: int, depth_max: int = 100, bytes_max: int = 1000) -> None:
        self.capacity = capacity
        self.regional = 0
        """Capacity in the region, which requests limited to it may use."""
        self.queue = AdmissionQueue(depth_max, bytes_max, asyncio.get_running_loop().time)
        self.refused: set[str] = set()
        """Tenants whose requests nodes refuse, whatever the capacity."""
        self.order: list[str] = []
        self.looks = 0

    async def serve(
        self,
        name: str,
        tokens: int = 1,
        timeout_s: float = 5.0,
        size_bytes: int = 0,
        *,
        is_limited: bool = False,
    ) -> QueueEntry:
        """Use capacity as the pipeline does. The first letter of `name` is the tenant.

        What `is_limited` to the region uses only the capacity there.
        """
        until_s = asyncio.get_running_loop().time() + timeout_s
        regions = ("DE",) if is_limited else ()
        entry = QueueEntry(
            D, TenantId(name[0]), tokens, until_s, size_bytes=size_bytes, regions=regions
        )
        try:
            while True:
                self.looks += 1
                capacity = self.regional if is_limited else self.capacity + self.regional
                entry.was_refused = name[0] in self.refused
                if self.queue.must_wait(entry) or capacity < tokens or entry.was_refused:
                    await self.queue.wait(entry)
                    continue
                self.queue.admit(entry)
                if is_limited or self.capacity < tokens:
                    self.regional -= tokens
                else:
                    self.capacity -= tokens
                self.order.append(name)
                return entry
        finally:
            self.queue.leave(entry)

    def free(self, tokens: int = 1) -> None:
        """Give back capacity."""
        self.capacity += tokens
        self.queue.wake(D)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0)


async def test_capacity_is_used_in_order_and_only_the_head_looks_for_it() -> None:
    lane = OneLane(capacity=0)
    tasks = [asyncio.create_task(lane.serve(name)) for name in ("a1", "a2", "a3", "a4", "b1")]
    await lane.until(lambda: lane.queue.depth == 5)
    looks = lane.looks
    lane.free(3)
    await lane.until(lambda: len(lane.order) == 3)
    assert lane.order == ["a1", "b1", "a2"]
    # Three were admitted and the fourth looked in vain; the fifth did not look.
    assert lane.looks - looks <= 5
    lane.free(2)
    await asyncio.gather(*tasks)
    assert lane.order == ["a1", "b1", "a2", "a3", "a4"]
    assert lane.queue.depth == 0


async def test_a_request_that_waits_for_its_region_blocks_no_other() -> None:
    lane = OneLane(capacity=2)
    limited = asyncio.create_task(lane.serve("a-limited", is_limited=True, timeout_s=60.0))
    await lane.until(lambda: lane.queue.depth == 1)
    await lane.serve("b1")
    await lane.serve("a2")
    behind = asyncio.create_task(lane.serve("c-limited", is_limited=True, timeout_s=60.0))
    await lane.until(lambda: lane.queue.depth == 2)
    lane.regional = 2
    lane.free(0)
    await asyncio.gather(limited, behind)
    assert lane.order == ["b1", "a2", "a-limited", "c-limited"]
    assert lane.queue.depth == 0


async def test_a_tenants_first_request_passes_one_whose_tenant_is_refused() -> None:
    lane = OneLane(capacity=3)
    lane.refused = {"a"}
    waiting = [asyncio.create_task(lane.serve("a1"))]
    await lane.until(lambda: lane.queue.depth == 1)
    await lane.serve("b1")
    await lane.serve("b2")
    # Once its own are refused, the next ones wait in their turn.
    lane.refused = {"a", "b"}
    for name in ("b3", "b4"):
        waiting.append(asyncio.create_task(lane.serve(name)))
        await lane.until(lambda: lane.queue.depth == len(waiting))
    lane.refused = set()
    lane.free(1)
    lane.free(1)
    await asyncio.gather(*waiting)
    assert lane.order == ["b1", "b2", "a1", "b3", "b4"]


async def test_a_tenants_first_request_does_not_pass_a_head_without_capacity() -> None:
    lane = OneLane(capacity=5)
    large = asyncio.create_task(lane.serve("a", tokens=10))
    await lane.until(lambda: lane.queue.depth == 1)
    small = asyncio.create_task(lane.serve("b", tokens=1))
    await lane.until(lambda: lane.queue.depth == 2)
    lane.free(6)
    await asyncio.gather(large, small)
    assert lane.order == ["a", "b"]


async def test_the_region_and_the_rest_take_turns_at_what_becomes_free() -> None:
    lane = OneLane(capacity=0)
    waiting = [
        asyncio.create_task(lane.serve(f"{name}{number}", timeout_s=60.0, is_limited=name == "b"))
        for number in range(4)
        for name in "ab"
    ]
    await lane.until(lambda: lane.queue.depth == 8)
    for _ in range(8):
        lane.regional += 1
        lane.free(0)
        for _ in range(20):
            # The one that was woken uses it, and the next one of its lane looks in vain.
            await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert sorted(name[0] for name in lane.order[:4]) == ["a", "a", "b", "b"]


async def test_a_small_request_does_not_overtake_a_large_head() -> None:
    lane = OneLane(capacity=5)
    large = asyncio.create_task(lane.serve("a", tokens=10))
    await lane.until(lambda: lane.queue.depth == 1)
    small = asyncio.create_task(lane.serve("a-small", tokens=1))
    await lane.until(lambda: lane.queue.depth == 2)
    lane.free(5)
    await large
    lane.free(1)
    await small
    assert lane.order == ["a", "a-small"]


async def test_the_next_request_moves_up_at_once_when_the_head_leaves() -> None:
    lane = OneLane(capacity=5)
    large = asyncio.create_task(lane.serve("a", tokens=10))
    await lane.until(lambda: lane.queue.depth == 1)
    small = asyncio.create_task(lane.serve("b", tokens=1))
    await lane.until(lambda: lane.queue.depth == 2)
    large.cancel()
    await asyncio.wait((large,))
    # No capacity was given back and no timer is due: only the leaving head can wake it.
    for _ in range(10):
        await asyncio.sleep(0)
    assert small.done()
    assert lane.order == ["b"]
    assert lane.queue.depth == 0


async def test_each_request_waits_until_its_own_deadline() -> None:
    lane = OneLane(capacity=0)
    waiting = asyncio.create_task(lane.serve("a", timeout_s=5.0))
    await lane.until(lambda: lane.queue.depth == 1)
    with pytest.raises(AdmissionRefused) as caught:
        await lane.serve("b", timeout_s=0.05)
    assert caught.value.reason is RefusalReason.DEADLINE
    assert lane.queue.depth == 1
    lane.free()
    await waiting


async def test_a_displaced_request_is_refused() -> None:
    lane = OneLane(capacity=0, depth_max=3)
    flood = [asyncio.create_task(lane.serve(f"a{n}")) for n in range(3)]
    await lane.until(lambda: lane.queue.depth == 3)
    with pytest.raises(AdmissionRefused) as caught:
        await lane.serve("a3")
    assert caught.value.reason is RefusalReason.FULL
    quiet = asyncio.create_task(lane.serve("b"))
    with pytest.raises(AdmissionRefused) as caught:
        await flood[2]
    assert caught.value.reason is RefusalReason.DISPLACED
    lane.free(3)
    await asyncio.gather(quiet, *flood[:2])
    assert lane.order == ["a0", "b", "a1"]


async def test_a_request_that_cannot_wait_neither_waits_nor_overtakes() -> None:
    lane = OneLane(capacity=0)
    waiting = asyncio.create_task(lane.serve("a"))
    await lane.until(lambda: lane.queue.depth == 1)
    until_s = asyncio.get_running_loop().time() + 5
    entry = QueueEntry(D, TenantId("b"), 1, until_s, can_wait=False)
    assert lane.queue.must_wait(entry)
    with pytest.raises(AdmissionRefused) as caught:
        await lane.queue.wait(entry)
    assert caught.value.reason is RefusalReason.BUSY
    lane.free()
    await waiting


async def test_a_request_that_a_node_refused_goes_before_the_later_ones_of_its_tenant() -> None:
    lane = OneLane(capacity=0)
    entry = QueueEntry(D, TenantId("a"), 1, asyncio.get_running_loop().time() + 5)
    first = asyncio.create_task(lane.queue.wait(entry))
    await lane.until(lambda: lane.queue.depth == 1)
    other = asyncio.create_task(lane.serve("a2"))
    await lane.until(lambda: lane.queue.depth == 2)
    lane.queue.wake(D)
    await first
    assert lane.queue.admit(entry) is not None
    assert lane.queue.depth == 1
    again = asyncio.create_task(lane.queue.wait(entry))
    await lane.until(lambda: lane.queue.depth == 2)
    assert not lane.queue.must_wait(entry)
    lane.queue.wake(D)
    await again
    lane.queue.admit(entry)
    lane.free()
    await other
    assert lane.order == ["a2"]


async def test_a_tenant_that_has_just_come_passes_a_refused_request() -> None:
    """A node that refuses one tenant may admit another."""
    lane = OneLane(capacity=0)
    entry = QueueEntry(D, TenantId("a"), 1, asyncio.get_running_loop().time() + 5)
    first = asyncio.create_task(lane.queue.wait(entry))
    await lane.until(lambda: lane.queue.depth == 1)
    other = asyncio.create_task(lane.serve("b1"))
    await lane.until(lambda: lane.queue.depth == 2)
    lane.queue.wake(D)
    await first
    lane.queue.admit(entry)
    again = asyncio.create_task(lane.queue.wait(entry))
    await lane.until(lambda: lane.queue.depth == 2)
    assert lane.queue.must_wait(entry)
    lane.free()
    await other
    lane.queue.wake(D)
    await again
    assert lane.order == ["b1"]


async def test_the_bodies_of_one_tenant_leave_space_for_another() -> None:
    lane = OneLane(capacity=0, bytes_max=1000)
    first = asyncio.create_task(lane.serve("a1", size_bytes=400))
    await lane.until(lambda: lane.queue.bytes == 400)
    with pytest.raises(AdmissionRefused) as refused:
        await lane.serve("a2", size_bytes=400)
    assert refused.value.reason is RefusalReason.BYTES
    second = asyncio.create_task(lane.serve("b1", size_bytes=400))
    await lane.until(lambda: lane.queue.bytes == 800)
    lane.free(2)
    await asyncio.gather(first, second)
    assert lane.order == ["a1", "b1"]
    assert lane.queue.bytes == 0

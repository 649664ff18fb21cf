"""Which replicas sleep so that another can wake, and the memory that awake ones are granted."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.ids import DeviceId, ReplicaId
from nodeagent.decide.replicas.sleep import (
    AWAKE_MIN_S,
    DEMAND_HALF_LIFE_S,
    YIELD_AFTER_S,
    AwakeReplica,
    RecentDemand,
    plan_wake,
)
from nodeagent.host.awake_memory import AwakeMemory, CannotWake
from tests.builders import a_spec

CPU = DeviceId("cpu")
NOW_S = 100.0


def awake(name: str, memory_bytes: int = 4, **fields: Any) -> AwakeReplica:
    values: dict[str, Any] = {
        "may_sleep": True,
        "requests": 0,
        "used_s": NOW_S - 10,
        "awake_since_s": NOW_S - 20,
    }
    return AwakeReplica(ReplicaId(name), (CPU,), memory_bytes, **{**values, **fields})


def victims(
    *replicas: AwakeReplica, wanted: int = 4, budget: int = 8, waited_s: float = 0.0
) -> Any:
    return plan_wake((CPU,), wanted, replicas, {CPU: budget}, now_s=NOW_S, waited_s=waited_s)


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ([], ()),
        ([awake("a")], ()),
        ([awake("a"), awake("b", used_s=50.0)], ("b",)),
        ([awake("a", used_s=50.0, requests=1), awake("b")], ("b",)),
        ([awake("a", used_s=50.0, may_sleep=False), awake("b")], ("b",)),
        ([awake("a", 2, used_s=1.0), awake("b", 2, used_s=2.0), awake("c")], ("a", "b")),
        # Fewer recent requests count before a longer time without any.
        ([awake("a", used_s=50.0, demand=3.0), awake("b", demand=1.0)], ("b",)),
        # Only as many as needed, and of the device that is full.
        ([awake("a", used_s=50.0)._replace(device_ids=(DeviceId("gpu1"),)), awake("b")], ()),
    ],
)
def test_the_least_recently_used_idle_replicas_sleep(
    replicas: list[AwakeReplica], expected: tuple[str, ...]
) -> None:
    assert victims(*replicas).sleeping == expected


def test_a_replica_that_just_woke_stays_awake_for_a_while() -> None:
    young = awake("a", awake_since_s=NOW_S - AWAKE_MIN_S / 2)
    plan = victims(young, wanted=8)
    assert plan.sleeping is None
    assert 0 < plan.retry_s <= AWAKE_MIN_S
    assert victims(young._replace(awake_since_s=NOW_S - AWAKE_MIN_S), wanted=8).sleeping == ("a",)


def test_the_longest_awake_busy_replica_yields_to_one_that_waits_for_long() -> None:
    busy = [awake("a", requests=1, awake_since_s=10.0), awake("b", requests=2, awake_since_s=5.0)]
    assert victims(*busy).yielding is None
    assert victims(*busy, waited_s=YIELD_AFTER_S).yielding == "b"
    yielding = [busy[0], busy[1]._replace(is_yielding=True)]
    assert victims(*yielding, waited_s=YIELD_AFTER_S).yielding is None
    assert victims(awake("a", requests=1, may_sleep=False), wanted=8, waited_s=9).yielding is None


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 2)), max_size=8),
    wanted=st.integers(1, 10),
)
def test_a_granted_wake_fits_and_no_busy_or_fixed_replica_sleeps(
    sizes: list[tuple[int, bool, int]], wanted: int
) -> None:
    replicas = [
        awake(str(number), size, may_sleep=may_sleep, requests=requests)
        for number, (size, may_sleep, requests) in enumerate(sizes)
    ]
    plan = victims(*replicas, wanted=wanted, budget=10)
    if plan.sleeping is None:
        return
    staying = [r for r in replicas if r.replica_id not in plan.sleeping]
    slept = [r for r in replicas if r.replica_id in plan.sleeping]
    assert all(r.may_sleep and not r.requests for r in slept)
    assert not slept or sum(r.memory_bytes for r in staying) + wanted <= 10


def test_recent_demand_fades() -> None:
    demand = RecentDemand()
    demand.add(0.0)
    demand.add(0.0)
    assert demand.at(DEMAND_HALF_LIFE_S) == 1.0
    assert demand.at(20 * DEMAND_HALF_LIFE_S) < 0.01


class FakeEngine:
    """Counts the sleeps and wakes of one engine."""

    def __init__(self) -> None:
        self.switches: list[str] = []
        self.wakes = True

    async def fall_asleep(self) -> bool:
        self.switches.append("sleep")
        return True

    async def wake_up(self) -> bool:
        self.switches.append("wake")
        return self.wakes


class Node:
    """A device of 8 bytes with replicas of 4, over-committed four times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.memory = AwakeMemory(self.budgets, self.clock)
        self.engines: dict[str, FakeEngine] = {}

    async def budgets(self) -> Mapping[DeviceId, int]:
        return {CPU: 8}

    def clock(self) -> float:
        self.now_s += AWAKE_MIN_S
        return self.now_s

    async def start(self, name: str, overcommit: float = 4.0) -> FakeEngine:
        spec = a_spec(name, memory_bytes=4, overcommit=overcommit)
        await self.memory.admit(spec)
        engine = self.engines[name] = FakeEngine()
        self.memory.settle(spec.replica_id, engine)
        return engine

    async def use(self, name: str) -> None:
        async with self.memory.use(ReplicaId(name)):
            pass


async def test_three_replicas_share_the_memory_of_two() -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    assert (a.switches, b.switches, c.switches) == (["sleep"], [], [])
    assert node.memory.wake_ms(ReplicaId("a")) > 0
    assert node.memory.wake_ms(ReplicaId("b")) == 0
    await node.use("a")
    assert a.switches == ["sleep", "wake"]
    assert b.switches == ["sleep"]
    assert node.memory.asleep_count() == 1


async def test_requests_of_one_replica_share_a_wake() -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    await asyncio.gather(*(node.use("a") for _ in range(5)))
    assert a.switches == ["sleep", "wake"]


async def test_a_replica_sleeps_however_many_test_requests_the_agent_sends_it() -> None:
    node = Node()
    _, b, c = [await node.start(name) for name in "abc"]
    await node.use("b")
    for _ in range(20):
        async with node.memory.use(ReplicaId("c"), is_test=True):
            pass
    await node.use("a")
    assert (b.switches, c.switches) == ([], ["sleep"])


async def test_a_busy_replica_is_not_put_to_sleep_but_yields_after_a_while() -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    async with node.memory.use(ReplicaId("b")), node.memory.use(ReplicaId("c")):
        waiting = asyncio.create_task(node.use("a"))
        while node.memory.is_awake(ReplicaId("b")) and node.memory.is_awake(ReplicaId("c")):
            await asyncio.to_thread(int)
            node.memory._changed.set()
        assert (b.switches, c.switches) == ([], [])
        assert not waiting.done()
        late = [asyncio.create_task(node.use(name)) for name in "bc"]
    await waiting
    await asyncio.gather(*late)
    assert a.switches[:2] == ["sleep", "wake"]


async def test_a_replica_that_ends_frees_its_memory_and_fails_who_waits() -> None:
    node = Node()
    a, b, _ = [await node.start(name) for name in "abc"]
    node.memory.forget(ReplicaId("b"))
    await node.use("a")
    assert (a.switches, b.switches) == (["sleep", "wake"], [])
    await node.start("d")
    asleep = next(name for name in "ac" if not node.memory.is_awake(ReplicaId(name)))
    node.engines[asleep].wakes = False
    with pytest.raises(CannotWake):
        await node.use(asleep)


async def test_an_engine_that_did_not_wake_is_not_tried_again_and_has_a_problem() -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    a.wakes = False
    assert not node.memory.wake_problem(ReplicaId("a"))
    for _ in range(3):
        with pytest.raises(CannotWake):
            await node.use("a")
    assert a.switches == ["sleep", "wake"]
    assert node.memory.wake_problem(ReplicaId("a"))
    node.memory.forget(ReplicaId("a"))
    await node.start("a")
    assert not node.memory.wake_problem(ReplicaId("a"))
    await node.use("a")


async def test_without_over_commitment_nothing_waits() -> None:
    node = Node()
    for name in "abcde":
        await node.start(name, overcommit=1.0)
        await node.use(name)
    assert all(engine.switches == [] for engine in node.engines.values())


async def test_a_replica_that_is_not_over_committed_takes_memory_from_those_that_are() -> None:
    node = Node()
    a, b = [await node.start(name) for name in "ab"]
    fixed = await node.start("fixed", overcommit=1.0)
    assert a.switches == ["sleep"]
    await node.use("a")
    assert b.switches == ["sleep"]
    assert fixed.switches == []

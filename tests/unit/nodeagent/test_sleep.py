"""Which replicas sleep so that another can wake, and the memory that awake ones are granted."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isochrone.wire.ids import DeviceId, ReplicaId
from nodeagent.decide.replicas.sleep import (
    AWAKE_MIN_S,
    DEMAND_HALF_LIFE_S,
    FIRST_WAKE_S,
    LATE_MIN_S,
    LATE_SLOWER,
    SHORTAGE_LIMIT_S,
    SLEEP_LIMIT_MIN_S,
    START_SLOWER_MAX,
    WAKE_LIMIT_MAX_S,
    WAKE_LIMIT_MIN_S,
    WAKE_SLOWER_MAX,
    YIELD_AFTER_S,
    AwakeReplica,
    RecentDemand,
    SleepOutcome,
    WakeOutcome,
    WakePlan,
    expected_wake_s,
    late_after_s,
    plan_wake,
    sleep_limit_s,
    wake_limit_s,
)
from nodeagent.host import awake_memory
from nodeagent.host.awake_memory import AwakeMemory, CannotWake
from tests.builders import a_spec, an_artifact

CPU = DeviceId("cpu")
GPU = DeviceId("gpu0")
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


def test_after_a_refusal_one_more_replica_sleeps() -> None:
    """The budgets are kept, but the device has less memory than that."""

    def plan(*replicas: AwakeReplica) -> WakePlan:
        return plan_wake((CPU,), 4, replicas, {CPU: 16}, now_s=NOW_S, waited_s=2.0, is_short=True)

    assert plan(awake("a", used_s=50.0), awake("b")).sleeping == ("a",)
    busy = plan(awake("a", requests=1))
    assert (busy.sleeping, busy.yielding, busy.can_fit) == (None, "a", True)
    fixed = plan(awake("a", may_sleep=False))
    assert (fixed.sleeping, fixed.yielding, fixed.can_fit) == (None, None, False)
    assert not plan().can_fit


def test_nothing_yields_to_a_replica_that_would_not_fit_then() -> None:
    replicas = [awake("a", may_sleep=False), awake("b", 2, requests=1)]
    plan = victims(*replicas, wanted=6, waited_s=2.0)
    assert (plan.sleeping, plan.yielding, plan.can_fit) == (None, None, False)
    plan = victims(*replicas, wanted=4, waited_s=2.0)
    assert (plan.sleeping, plan.yielding, plan.can_fit) == (None, "b", True)


def test_recent_demand_fades() -> None:
    demand = RecentDemand()
    demand.add(0.0)
    demand.add(0.0)
    assert demand.at(DEMAND_HALF_LIFE_S) == 1.0
    assert demand.at(20 * DEMAND_HALF_LIFE_S) < 0.01


@pytest.mark.parametrize(
    ("wake_s", "start_s", "expected"),
    [
        (0.0, 0.0, WAKE_LIMIT_MAX_S),
        (0.0, 6.0, START_SLOWER_MAX * 6.0),
        (0.0, 1.0, WAKE_LIMIT_MIN_S),
        (0.1, 6.0, WAKE_LIMIT_MIN_S),
        (2.0, 60.0, WAKE_SLOWER_MAX * 2.0),
        (20.0, 60.0, WAKE_LIMIT_MAX_S),
    ],
)
def test_a_wake_may_take_some_times_as_long_as_before(
    wake_s: float, start_s: float, expected: float
) -> None:
    assert wake_limit_s(wake_s, start_s, weights_bytes=0) == expected


@pytest.mark.parametrize("wake_s", [0.0, 5.0])
def test_a_large_model_may_be_read_from_a_slow_disk(wake_s: float) -> None:
    """Also if it was always in memory before. 70B in 16 bits take 467 s at 300 MB/s."""
    assert wake_limit_s(wake_s, 60.0, weights_bytes=140 * 10**9) > 140e9 / 300e6


def test_a_large_model_may_be_copied_to_host_memory_before_it_sleeps() -> None:
    assert sleep_limit_s(140 * 10**9) > 140e9 / 1.5e9
    assert sleep_limit_s(0) == SLEEP_LIMIT_MIN_S


class FakeEngine:
    """Counts the sleeps and wakes of one engine."""

    def __init__(self) -> None:
        self.switches: list[str] = []
        self.wakes = WakeOutcome.AWAKE
        self.outcome = SleepOutcome.ASLEEP
        self.may_switch = asyncio.Event()
        self.may_switch.set()
        self.wake_limits_s: list[float] = []
        self.sleep_limits_s: list[float] = []

    async def fall_asleep(self, timeout_s: float) -> SleepOutcome:
        self.switches.append("sleep")
        self.sleep_limits_s.append(timeout_s)
        await self.may_switch.wait()
        return self.outcome

    async def wake_up(self, timeout_s: float) -> WakeOutcome:
        self.switches.append("wake")
        self.wake_limits_s.append(timeout_s)
        await self.may_switch.wait()
        return self.wakes


class Node:
    """A node whose devices have 8 bytes, with replicas of 4, over-committed four times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.memory = AwakeMemory(self.budgets, self.clock)
        self.engines: dict[str, FakeEngine] = {}

    async def budgets(self) -> Mapping[DeviceId, int]:
        return {CPU: 8, GPU: 8}

    def clock(self) -> float:
        self.now_s += AWAKE_MIN_S
        return self.now_s

    async def start(
        self, name: str, overcommit: float = 4.0, device: DeviceId = CPU, **fields: Any
    ) -> FakeEngine:
        spec = a_spec(name, memory_bytes=4, overcommit=overcommit, device_ids=(device,), **fields)
        await self.memory.admit(spec)
        engine = self.engines[name] = FakeEngine()
        self.memory.settle(spec.replica_id, engine)
        return engine

    async def use(self, name: str) -> None:
        async with asyncio.timeout(10.0), self.memory.use(ReplicaId(name)):
            pass

    def is_awake(self, name: str) -> bool:
        return self.memory.is_awake(ReplicaId(name))


async def reached(condition: Callable[[], object]) -> None:
    """Let other tasks run until `condition` holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.to_thread(int)
    raise AssertionError(condition)


def _looked_again(node: Node) -> bool:
    """Have the queue looked at now instead of after a while."""
    node.memory._changed.set()
    return True


async def cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


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


async def test_an_engine_has_the_time_that_its_weights_take() -> None:
    node = Node()
    size_bytes, small = 140 * 10**9, an_artifact()
    file = msgspec.structs.replace(small.files[0], size_bytes=size_bytes)
    large = msgspec.structs.replace(small, files=(file,))
    a, b, _ = [await node.start(name, artifact=large) for name in "abc"]
    await node.use("a")
    assert a.sleep_limits_s == b.sleep_limits_s == [sleep_limit_s(size_bytes)]
    assert a.wake_limits_s == [wake_limit_s(0.0, 0.0, size_bytes)]


async def test_a_first_wake_is_expected_to_take_as_long_as_its_weights() -> None:
    """Half a second was reported for any model, so that routers chose one that had to read 140 GB
    before a replica that was awake in another city."""
    node = Node()
    small = an_artifact()
    file = msgspec.structs.replace(small.files[0], size_bytes=140 * 10**9)
    large = msgspec.structs.replace(small, files=(file,))
    spec = a_spec("a", memory_bytes=4, overcommit=4.0, artifact=large)
    node.memory.adopt(spec)
    node.memory.settle(spec.replica_id, FakeEngine(), is_asleep=True)
    assert node.memory.wake_ms(spec.replica_id) == 1000 * (140 + FIRST_WAKE_S)


@pytest.mark.parametrize(
    ("wake_s", "start_s", "expected"),
    [
        (0.0, 0.0, 16.5),
        (0.0, 60.0, 16.5),
        # A start reads them too.
        (0.0, 4.0, 4.0),
        (1.5, 4.0, 1.5),
    ],
)
def test_a_wake_is_expected_to_take_as_long_as_earlier_ones_else_as_its_weights(
    wake_s: float, start_s: float, expected: float
) -> None:
    assert expected_wake_s(wake_s, start_s, weights_bytes=16 * 10**9) == expected


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
    node.engines[asleep].wakes = WakeOutcome.FAILED
    with pytest.raises(CannotWake):
        await node.use(asleep)


async def test_an_engine_that_did_not_wake_is_not_tried_again_and_has_a_problem() -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    a.wakes = WakeOutcome.FAILED
    assert not node.memory.switch_problem(ReplicaId("a"))
    for _ in range(3):
        with pytest.raises(CannotWake):
            await node.use("a")
    assert a.switches == ["sleep", "wake"]
    assert node.memory.switch_problem(ReplicaId("a"))
    node.memory.forget(ReplicaId("a"))
    await node.start("a")
    assert not node.memory.switch_problem(ReplicaId("a"))
    await node.use("a")


async def test_an_engine_that_did_not_wake_keeps_its_memory_until_it_has_ended() -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    a.wakes = WakeOutcome.FAILED
    with pytest.raises(CannotWake):
        await node.use("a")
    assert (b.switches, c.switches) == (["sleep"], [])
    await node.use("b")
    assert (b.switches, c.switches) == (["sleep", "wake"], ["sleep"])
    node.memory.forget(ReplicaId("a"))
    await node.use("c")
    assert (b.switches, c.switches) == (["sleep", "wake"], ["sleep", "wake"])


async def test_an_engine_that_did_not_fall_asleep_has_a_problem_and_another_one_sleeps() -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    b.outcome = SleepOutcome.FAILED
    await node.use("a")
    assert (a.switches, b.switches, c.switches) == (["sleep", "wake"], ["sleep"], ["sleep"])
    assert node.memory.switch_problem(ReplicaId("b"))
    with pytest.raises(CannotWake):
        await node.use("b")


async def test_a_wake_whose_requests_have_gone_is_not_done() -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    async with AsyncExitStack() as busy:
        for name in "bc":
            await busy.enter_async_context(node.memory.use(ReplicaId(name)))
        first, last = (asyncio.create_task(node.use("a")) for _ in range(2))
        await reached(
            lambda: _looked_again(node) and not (node.is_awake("b") and node.is_awake("c"))
        )
        await cancelled(first)
        assert not node.is_awake("b") or not node.is_awake("c")
        await cancelled(last)
        # Nothing has to yield any more.
        await reached(lambda: node.is_awake("b") and node.is_awake("c"))
    assert (a.switches, b.switches, c.switches) == (["sleep"], [], [])
    await node.use("a")
    assert a.switches == ["sleep", "wake"]


async def test_a_request_that_goes_while_another_replica_falls_asleep_wakes_nothing() -> None:
    node = Node()
    a, b, _ = [await node.start(name) for name in "abc"]
    b.may_switch.clear()
    waiting = asyncio.create_task(node.use("a"))
    await reached(lambda: b.switches)
    await cancelled(waiting)
    b.may_switch.set()
    switching = node.memory._switching
    assert switching is not None
    await switching
    assert node.memory.asleep_count() == 2
    assert a.switches == ["sleep"]
    await node.use("b")
    assert b.switches == ["sleep", "wake"]


async def test_a_wake_that_waits_for_one_device_does_not_hold_up_those_of_others() -> None:
    node = Node()
    a, b, _ = [await node.start(name) for name in "abc"]
    d, e, _ = [await node.start(name, device=GPU) for name in "def"]
    async with AsyncExitStack() as busy:
        for name in "bc":
            await busy.enter_async_context(node.memory.use(ReplicaId(name)))
        waiting = asyncio.create_task(node.use("a"))
        await reached(
            lambda: _looked_again(node) and not (node.is_awake("b") and node.is_awake("c"))
        )
        await node.use("d")
        assert (d.switches, e.switches) == (["sleep", "wake"], ["sleep"])
        assert (a.switches, b.switches) == (["sleep"], [])
    await waiting
    assert a.switches == ["sleep", "wake"]


async def test_a_wake_that_takes_long_shows_in_the_times_of_the_others() -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abcd"]
    a.may_switch.clear()
    before_ms = node.memory.wake_ms(ReplicaId("b"))
    waiting = asyncio.create_task(node.use("a"))
    await reached(lambda: a.switches[-1] == "wake")
    node.now_s += 60.0
    assert node.memory.wake_ms(ReplicaId("b")) > 60_000 > before_ms
    a.may_switch.set()
    await waiting
    assert node.memory.wake_ms(ReplicaId("b")) < 60_000
    assert a.wake_limits_s == [pytest.approx(WAKE_LIMIT_MIN_S)]


@pytest.fixture
def late_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every switch that is not done at once for late."""
    monkeypatch.setattr(awake_memory, "late_after_s", lambda _: 0.0)


@pytest.mark.parametrize(
    ("expected_s", "late_s"),
    [(0.1, LATE_MIN_S), (LATE_MIN_S, LATE_SLOWER * LATE_MIN_S), (30.0, LATE_SLOWER * 30.0)],
)
def test_a_switch_is_late_after_some_times_as_long_as_expected(
    expected_s: float, late_s: float
) -> None:
    assert late_after_s(expected_s) == late_s


async def test_a_wake_that_hangs_does_not_hold_up_those_of_other_replicas(
    late_at_once: None,
) -> None:
    """Nor does it lose its memory: only one of the others is awake beside it."""
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    a.may_switch.clear()
    hanging = asyncio.create_task(node.use("a"))
    await reached(lambda: "wake" in a.switches)
    assert node.memory.reason(ReplicaId("a")) == awake_memory.SWITCHING
    for name in ("b", "c", "b"):
        await node.use(name)
        assert [other for other in "bc" if node.is_awake(other)] == [name]
    assert a.switches == ["sleep", "wake"]
    assert (b.switches[-1], c.switches[-1]) == ("wake", "sleep")
    node.now_s += 60.0
    assert node.memory.wake_ms(ReplicaId("a")) > 60_000 > node.memory.wake_ms(ReplicaId("c"))
    assert not hanging.done()
    a.may_switch.set()
    await hanging
    assert node.is_awake("a")
    assert a.switches == ["sleep", "wake"]


async def test_a_replica_that_hangs_as_it_falls_asleep_keeps_its_memory(
    late_at_once: None,
) -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    b.may_switch.clear()
    waiting = asyncio.create_task(node.use("a"))
    await waiting
    assert (a.switches, b.switches, c.switches) == (["sleep", "wake"], ["sleep"], ["sleep"])
    late = asyncio.create_task(node.use("b"))
    # It has not fallen asleep: another model would not fit beside "a".
    await node.use("c")
    assert not node.is_awake("a")
    b.may_switch.set()
    await late
    assert b.switches == ["sleep", "wake"]


async def test_a_wake_that_hangs_and_whose_request_has_gone_is_not_done_twice(
    late_at_once: None,
) -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    a.may_switch.clear()
    gone = asyncio.create_task(node.use("a"))
    await reached(lambda: "wake" in a.switches)
    await cancelled(gone)
    assert not node.memory.switch_problem(ReplicaId("a"))
    late = [asyncio.create_task(node.use("a")) for _ in range(3)]
    await node.use("b")
    await node.use("c")
    assert a.switches == ["sleep", "wake"]
    a.wakes = WakeOutcome.FAILED
    a.may_switch.set()
    for request in late:
        with pytest.raises(CannotWake):
            await request
    assert node.memory.switch_problem(ReplicaId("a"))
    assert node.memory.asleep_count() == 1
    assert not node.memory._queue


async def test_a_late_wake_of_an_engine_that_has_ended_wakes_nothing(late_at_once: None) -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    a.may_switch.clear()
    hanging = asyncio.create_task(node.use("a"))
    await reached(lambda: "wake" in a.switches)
    node.memory.forget(ReplicaId("a"))
    with pytest.raises(CannotWake):
        await hanging
    again = await asyncio.wait_for(node.start("a"), 10.0)
    a.may_switch.set()
    await reached(lambda: not node.memory._in_progress)
    assert not node.memory.switch_problem(ReplicaId("a"))
    await node.use("a")
    assert again.switches in ([], ["sleep", "wake"])


async def test_a_wake_without_memory_puts_another_replica_to_sleep_and_is_tried_again() -> None:
    node = Node()
    a, b, c = [await node.start(name) for name in "abc"]
    a.wakes = WakeOutcome.NO_MEMORY
    c.may_switch.clear()
    waiting = asyncio.create_task(node.use("a"))
    await reached(lambda: c.switches)
    assert (a.switches, b.switches, c.switches) == (["sleep", "wake"], ["sleep"], ["sleep"])
    assert not node.memory.switch_problem(ReplicaId("a"))
    assert "less free memory than planned" in node.memory.reason(ReplicaId("a"))
    assert node.memory.wake_ms(ReplicaId("a")) > 1000 * SHORTAGE_LIMIT_S
    a.wakes = WakeOutcome.AWAKE
    c.may_switch.set()
    await waiting
    assert a.switches == ["sleep", "wake", "wake"]
    assert node.memory.reason(ReplicaId("a")) == ""
    assert node.memory.reason(ReplicaId("b")) == "asleep: the next request wakes it"


async def test_a_wake_that_finds_no_memory_for_long_is_refused_without_a_restart() -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    a.wakes = WakeOutcome.NO_MEMORY
    waiting = asyncio.create_task(node.use("a"))
    await reached(lambda: _looked_again(node) and waiting.done())
    with pytest.raises(CannotWake, match="less free memory than planned"):
        await waiting
    assert a.switches.count("wake") > 2
    assert not node.memory.switch_problem(ReplicaId("a"))
    # The others are served meanwhile.
    await node.use("b")
    await node.use("c")
    a.wakes = WakeOutcome.AWAKE
    await node.use("a")


async def test_a_start_that_cannot_fit_holds_up_no_wake_of_its_device() -> None:
    node = Node()
    await node.start("fixed", overcommit=1.0)
    a = await node.start("a")
    b = await node.start("b")
    assert a.switches == ["sleep"]
    large = a_spec("large", memory_bytes=6, overcommit=4.0, device_ids=(CPU,))
    starting = asyncio.create_task(node.memory.admit(large))
    await reached(lambda: node.memory._queue)
    waiting = asyncio.create_task(node.use("a"))
    await reached(lambda: _looked_again(node) and waiting.done())
    assert (a.switches, b.switches) == (["sleep", "wake"], ["sleep"])
    assert "cannot sleep have the memory of cpu" in node.memory.reason(large.replica_id)
    node.memory.forget(ReplicaId("fixed"))
    await reached(lambda: _looked_again(node) and starting.done())
    assert node.is_awake("large")


async def test_a_start_that_waits_for_another_start_says_so() -> None:
    """With "cannot sleep" operators looked for a deployment without over-commitment."""
    node = Node()
    first, second = [
        a_spec(name, memory_bytes=8, overcommit=4.0, device_ids=(CPU,)) for name in ("x", "y")
    ]
    await node.memory.admit(first)
    starting = asyncio.create_task(node.memory.admit(second))
    await reached(lambda: node.memory._queue and _looked_again(node))
    expected = "waits to start: replicas that are starting have the memory of cpu"
    assert node.memory.reason(second.replica_id) == expected
    node.memory.forget(first.replica_id)
    await reached(lambda: _looked_again(node) and starting.done())


async def test_a_prefill_leg_does_not_wait_for_the_replica_that_waits_for_it() -> None:
    """Both legs' replicas share a device that holds one of them."""
    node = Node()
    await node.start("fixed", overcommit=1.0)
    prefill, decode = [await node.start(name) for name in ("prefill", "decode")]
    async with node.memory.use(ReplicaId("decode")):

        async def read_prompt() -> None:
            async with node.memory.use(ReplicaId("prefill"), is_leg=True):
                pass

        with pytest.raises(CannotWake, match="other replicas use its memory"):
            await asyncio.wait_for(read_prompt(), 5.0)
        assert node.is_awake("decode"), "it need not yield"
    assert (prefill.switches, decode.switches) == (["sleep"], [])
    async with node.memory.use(ReplicaId("prefill"), is_leg=True):
        assert (prefill.switches, decode.switches) == (["sleep", "wake"], ["sleep"])


async def test_a_prefill_leg_does_not_wait_for_an_engine_that_has_just_ended() -> None:
    node = Node()
    a, *_ = [await node.start(name) for name in "abc"]
    budgets = node.memory._budgets

    async def ends_meanwhile() -> Mapping[DeviceId, int]:
        node.memory.forget(ReplicaId("a"))
        return await budgets()

    node.memory._budgets = ends_meanwhile
    with pytest.raises(CannotWake, match="ended"):
        async with node.memory.use(ReplicaId("a"), is_leg=True):
            pass
    assert a.switches == ["sleep"]
    assert not node.memory._queue


async def test_an_adopted_engine_has_memory_until_it_says_that_it_sleeps() -> None:
    node = Node()
    specs = [a_spec(name, memory_bytes=4, overcommit=4.0) for name in "xy"]
    for spec in specs:
        node.memory.adopt(spec)
    starting = asyncio.create_task(node.start("z"))
    await reached(lambda: node.memory._queue)
    x, y = FakeEngine(), FakeEngine()
    node.memory.settle(ReplicaId("x"), x, is_asleep=True)
    await starting
    node.memory.settle(ReplicaId("y"), y)
    assert [node.is_awake(name) for name in "xyz"] == [False, True, True]
    await node.use("x")
    assert x.switches == ["wake"]
    assert x.wake_limits_s == [WAKE_LIMIT_MAX_S]
    assert len(y.switches) + len(node.engines["z"].switches) == 1


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

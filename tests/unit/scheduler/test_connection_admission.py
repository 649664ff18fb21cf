"""A fleet that connects at once registers at the configured rate, a few at a time, in order."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.peers.control import PeerRole
from scheduler.decide.membership.connection_admission import (
    BURST_S,
    UNSERVED_MAX,
    UNSERVED_TIMEOUT_S,
    ConnectionAdmission,
    Places,
)
from scheduler.state.lease_state import LeaseState
from scheduler.state.peers.peer_admission import PeerAdmission, TurnTaken
from scheduler.state.peers.peer_registry import PeerRegistry

AGENT = PeerRole.AGENT


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 400),
    per_s=st.sampled_from([10.0, 50.0, 200.0]),
    served_after_s=st.sampled_from([0.0, 0.3, 3.0, float("inf")]),
)
def test_peers_are_admitted_at_the_rate_as_long_as_they_are_served(
    count: int, per_s: float, served_after_s: float
) -> None:
    admission = ConnectionAdmission(per_s)
    now, admitted = 0.0, list[float]()
    served = 0
    while len(admitted) < count:
        while served < len(admitted) and admitted[served] + served_after_s <= now:
            admission.served(f"n{served}")
            served += 1
        wait_s = admission.wait_s(now)
        if wait_s == 0:
            admission.admit(f"n{len(admitted)}", now)
            admitted.append(now)
        elif served < len(admitted):
            now = min(now + wait_s, admitted[served] + served_after_s)
        else:
            now += wait_s
    for index, at in enumerate(admitted):
        ahead = admitted[index + UNSERVED_MAX] - at if index + UNSERVED_MAX < count else 1e9
        assert ahead >= min(served_after_s, UNSERVED_TIMEOUT_S) - 1e-6
        later = sum(1 for other in admitted[index:] if other <= at + 1.0)
        assert later <= per_s * (1.0 + BURST_S) + 2
    longest_s = min(served_after_s, UNSERVED_TIMEOUT_S) * count / UNSERVED_MAX
    assert admitted[-1] <= count / per_s + longest_s + 1e-6, "nothing is idle while peers wait"


def test_places_can_begin_at_a_later_time() -> None:
    places = Places(10.0)
    assert [round(places.take(5.0), 3) for _ in range(3)] == [5.0, 5.1, 5.2]


class Turns:
    """An admission on a clock that stands still, and the peers that wait for their turn."""

    def __init__(self) -> None:
        self.now_s = 0.0
        lease = LeaseState(holder="s1", ttl_s=6.0, clock=lambda: self.now_s)
        self.admission = PeerAdmission(per_s=1000.0, lease=lease, peers=PeerRegistry())
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self.admission.wait_turn(AGENT, name))
        await self.settle()

    async def release(self, name: str) -> None:
        self.admission.release(AGENT, name)
        await self.settle()

    async def settle(self) -> None:
        """Let each task run as far as it can."""
        for _ in range(3):
            await asyncio.wait(self.tasks.values(), timeout=0)

    def admitted(self, *names: str) -> list[bool]:
        return [self.tasks[name].done() for name in names]


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    """Turns of which as many are taken as may be unserved."""
    turns = Turns()
    taken = [f"n{index}" for index in range(UNSERVED_MAX)]
    await turns.ask(*taken)
    assert all(turns.admitted(*taken))
    yield turns
    for task in turns.tasks.values():
        task.cancel()
    await asyncio.gather(*turns.tasks.values(), return_exceptions=True)


async def test_peers_have_their_turns_in_order_as_others_are_served(turns: Turns) -> None:
    await turns.ask("a", "b", "c")
    assert turns.admitted("a", "b", "c") == [False] * 3
    assert turns.admission.waiting == 3
    await turns.release("n7")
    assert turns.admitted("a", "b", "c") == [True, False, False]
    await turns.release("n8")
    await turns.release("n9")
    assert turns.admitted("a", "b", "c") == [True] * 3


async def test_a_peer_that_left_takes_no_turn(turns: Turns) -> None:
    await turns.ask("a", "b")
    turns.tasks["a"].cancel()
    await turns.release("n0")
    assert turns.admitted("b") == [True]
    assert turns.admission.waiting == 0


async def test_a_peer_that_leaves_with_its_turn_gives_it_to_the_next(turns: Turns) -> None:
    await turns.ask("a", "b")
    turns.admission.release(AGENT, "n0")  # it is the turn of "a", whose task has not run yet
    turns.tasks["a"].cancel()
    await turns.settle()
    assert turns.tasks["a"].cancelled()
    assert turns.admitted("b") == [True]


async def test_a_peer_that_connects_again_keeps_its_place(turns: Turns) -> None:
    await turns.ask("a", "b")
    first = turns.tasks["a"]
    await turns.ask("a")
    with pytest.raises(TurnTaken):
        await first
    await turns.release("n0")
    assert turns.admitted("a", "b") == [True, False]


async def test_peers_that_are_never_served_do_not_hold_up_the_others(turns: Turns) -> None:
    await turns.ask("a")
    turns.now_s = UNSERVED_TIMEOUT_S
    await turns.ask("b")
    assert turns.admitted("a", "b") == [True, True]


async def test_when_the_term_ends_nobody_waits_any_longer(turns: Turns) -> None:
    await turns.ask("a", "b")
    turns.admission.dismiss()
    await turns.settle()
    assert turns.admitted("a", "b") == [True, True]
    assert turns.admission.waiting == 0

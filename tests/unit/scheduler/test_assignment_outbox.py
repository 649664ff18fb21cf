"""Assignments are queued in the order in which they are read."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isochrone.wire.ids import ClusterId, Generation
from scheduler.decide.membership import AssignmentFollowing
from scheduler.state.peers import assignment_outbox
from scheduler.state.peers.assignment_outbox import AssignmentOutbox
from scheduler.state.peers.peer_registry import PeerRegistry


async def test_an_assignment_that_takes_long_to_read_does_not_replace_a_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have one generation if only a prefetch or a revocation was added meanwhile."""
    reads, may_end = 0, asyncio.Event()

    @asynccontextmanager
    async def no_connection(*_: Any) -> AsyncIterator[None]:
        yield None

    async def read_assignment(*_: Any, **__: Any) -> Any:
        nonlocal reads
        reads += 1
        number = reads
        if number == 1:
            await may_end.wait()
        return SimpleNamespace(number=number, generation=Generation(7))

    monkeypatch.setattr(assignment_outbox, "using", no_connection)
    monkeypatch.setattr(assignment_outbox, "read_assignment", read_assignment)
    outbox = AssignmentOutbox(
        pool=cast(Any, None),
        peers=PeerRegistry(),
        lease=cast(Any, SimpleNamespace(epoch=1, clock=lambda: 0.0)),
        following=AssignmentFollowing(),
        cluster_id=ClusterId("c1"),
    )
    queued: list[Any] = []
    peer = cast(Any, SimpleNamespace(name="n1", enqueue=queued.append, assigning=asyncio.Lock()))
    sends = [asyncio.create_task(outbox.send(peer)) for _ in range(2)]
    for _ in range(10):
        await asyncio.wait(sends, timeout=0)
    may_end.set()
    await asyncio.gather(*sends)
    assert [assignment.number for assignment in queued] == [1, 2]

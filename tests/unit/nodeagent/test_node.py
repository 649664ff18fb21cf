"""What a node holds: the newest assignment, also while its disk takes none."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from isochrone.wire.assignment import Assignment
from isochrone.wire.ids import BootId
from nodeagent.node import NodeState
from tests.unit.nodeagent.test_decide import an_assignment


class FullDisk:
    """A ledger whose disk is full until it is `freed`; it holds up the first write."""

    def __init__(self) -> None:
        self.is_full = True
        self.writing = asyncio.Event()
        self.may_go_on = threading.Event()
        self._loop = asyncio.get_running_loop()

    def write(self, assignment: Assignment) -> None:
        self._loop.call_soon_threadsafe(self.writing.set)
        assert self.may_go_on.wait(5.0)
        if self.is_full:
            raise OSError(28, "No space left on device")


async def test_the_newest_assignment_is_taken_when_the_disk_takes_it_again() -> None:
    ledger: Any = FullDisk()
    identity: Any = SimpleNamespace(name="n1", cluster_id="c")
    devices: Any = None
    node = NodeState(identity, BootId("b"), ledger, devices)
    ledger.may_go_on.set()
    await node.take(an_assignment(generation=5))
    ledger.may_go_on.clear()
    ledger.writing.clear()
    newer = asyncio.create_task(node.take(an_assignment(generation=6)))
    await ledger.writing.wait()
    # The older one is tried again while the newer is being refused by the disk.
    again = asyncio.create_task(node.take_unkept())
    ledger.may_go_on.set()
    await asyncio.gather(newer, again)
    assert node.assignment is None
    ledger.is_full = False
    await node.take_unkept()
    assert node.assignment is not None
    assert node.assignment.generation == 6

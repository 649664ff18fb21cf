"""The node keeps the newest assignment, even while its disk refuses to store one."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from isochrone.wire.ids import BootId
from isochrone.wire.peers.assignment import Assignment
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.node import LACKING_CHARACTERS, NodeState
from tests.unit.nodeagent.test_decide import an_assignment


class FullDisk:
    """An assignment file on a full disk. Each write waits until it `may_proceed`."""

    def __init__(self) -> None:
        self.is_full = True
        self.writing = asyncio.Event()
        self.may_proceed = threading.Event()
        self._loop = asyncio.get_running_loop()

    def write(self, assignment: Assignment) -> None:
        self._loop.call_soon_threadsafe(self.writing.set)
        assert self.may_proceed.wait(5.0)
        if self.is_full:
            raise OSError(28, "No space left on device")


def test_a_change_of_what_engines_lack_is_reported_at_once() -> None:
    anything: Any = SimpleNamespace(name="n1", cluster_id="c")
    node = NodeState(anything, BootId("b"), anything, anything, CacheSalts(bytes(32)))
    reports: list[dict[str, str]] = []
    node.nudge_report = lambda: reports.append(node.lacking_engines)
    for lacking in ("it cannot start: " + 1000 * "x", "it is not installed", "it is not installed"):
        node.note_missing({"mock": "", "vllm": lacking})
    node.note_missing({"mock": "", "vllm": ""})
    first, *others = reports
    assert len(first["vllm"]) == LACKING_CHARACTERS
    assert others == [{"vllm": "it is not installed"}, {}]


async def test_the_newest_assignment_is_accepted_once_the_disk_stores_it() -> None:
    file: Any = FullDisk()
    identity: Any = SimpleNamespace(name="n1", cluster_id="c")
    devices: Any = None
    node = NodeState(identity, BootId("b"), file, devices, CacheSalts(bytes(32)))
    file.may_proceed.set()
    await node.accept(an_assignment(generation=5))
    assert "No space left on device" in node.assignment_refusal
    file.may_proceed.clear()
    file.writing.clear()
    newer = asyncio.create_task(node.accept(an_assignment(generation=6)))
    await file.writing.wait()
    # The older assignment is retried while the disk is refusing the newer one.
    retry = asyncio.create_task(node.retry_unsaved())
    file.may_proceed.set()
    await asyncio.gather(newer, retry)
    assert node.assignment is None
    file.is_full = False
    await node.retry_unsaved()
    assert node.assignment is not None
    assert node.assignment.generation == 6
    assert not node.assignment_refusal

"""What rank 0 says of its workers when it cannot go on."""

import os
import socket
from threading import Timer

from nodeagent.engine.workers.worker_group import CommandChannel, WorkerGroup, WorkerHandle

GENEROUS_S = 30.0


def test_a_worker_that_ends_just_after_its_connections_broke_is_named() -> None:
    here, there = socket.socketpair()
    ended, ends = os.pipe()
    with here, there:
        group = WorkerGroup([WorkerHandle(2, 0, ended, CommandChannel(here))])
        assert group.describe_lost() == ""
        ending = Timer(0.05, os.close, [ends])
        ending.start()
        assert group.describe_lost(GENEROUS_S) == "rank 2 (on another node) has ended"
        ending.join()
    os.close(ended)
    assert WorkerGroup().describe_lost(GENEROUS_S) == ""

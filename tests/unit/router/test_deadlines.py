"""Deadlines expire, unless it was the event loop that caused the delay."""

from router.dataplane.deadlines import NEVER, SWEEP_S, Deadlines
from tests.unit.router.in_memory import ManualLoop


class Watched:
    """An object with a deadline that counts how often it expired."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.expired = 0

    def on_due(self) -> None:
        self.expired += 1


def test_a_loop_that_was_blocked_reads_before_deadlines_expire() -> None:
    loop = ManualLoop()
    deadlines = Deadlines(loop.time)
    late, early = Watched(loop.now_s + 0.5), Watched(loop.now_s + SWEEP_S / 2)
    for watched in (late, early):
        deadlines.add(watched)
    loop.settle(deadlines.start)
    loop.now_s += 30.0
    loop.settle()
    assert (late.expired, early.expired) == (0, 1)
    loop.now_s += SWEEP_S + 0.01
    loop.settle()
    assert (late.expired, late.due_s) == (1, NEVER)
    deadlines.stop()
    loop.close()

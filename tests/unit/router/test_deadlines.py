"""Who waits too long hears of it, unless it was the loop that kept him waiting."""

from router.dataplane.deadlines import NEVER, SWEEP_S, Deadlines
from tests.unit.router.wire import StillLoop


class Waiter:
    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.told = 0

    def on_due(self) -> None:
        self.told += 1


def test_a_loop_that_was_held_up_reads_before_it_judges() -> None:
    loop = StillLoop()
    deadlines = Deadlines(loop.time)
    late, early = Waiter(loop.now_s + 0.5), Waiter(loop.now_s + SWEEP_S / 2)
    for waiter in (late, early):
        deadlines.add(waiter)
    loop.settle(deadlines.start)
    loop.now_s += 30.0
    loop.settle()
    assert (late.told, early.told) == (0, 1)
    loop.now_s += SWEEP_S + 0.01
    loop.settle()
    assert (late.told, late.due_s) == (1, NEVER)
    deadlines.stop()
    loop.close()

"""An exchange being tried: what it touched, to return to if the whole is no better.

Rule: the sum over the wishes it touched is compared, and the exchange is kept or undone whole.
"""

from collections.abc import Iterable
from typing import Final

from scheduler.decide.placement.search.deployment_state import DeploymentState, PlannedReplica
from scheduler.decide.placement.search.greedy_search import GreedySearch
from scheduler.decide.placement.search.load_assignment import LoadAssignment

ENOUGH: Final = 1e-6


class EffortBudget:
    """How much may still be tried: counted, not timed, so that a plan repeats."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, much: int) -> bool:
        """Take a share for one attempt; False where none is left."""
        if self.left <= 0:
            return False
        self.left -= much
        return True


class Savepoint:
    """What the touched wishes and the ground were, to return to."""

    def __init__(self, search: GreedySearch, touched: Iterable[DeploymentState]) -> None:
        self._search = search
        self._wishes: dict[DeploymentState, tuple[list[PlannedReplica], LoadAssignment]] = {}
        for wish in touched:
            self.touch(wish)

    def touch(self, wish: DeploymentState) -> None:
        """Remember a wish as it is, before it is first changed."""
        if wish not in self._wishes:
            self._wishes[wish] = (list(wish.seats), wish.flow)

    def cost_before(self) -> float:
        """Return what the touched wishes came to before."""
        return sum(_cost(wish, *saved) for wish, saved in self._wishes.items())

    def cost_now(self) -> float:
        """Return what they come to."""
        return sum(wish.cost() for wish in self._wishes)

    def undo(self) -> None:
        """Return to what was."""
        for wish, (seats, flow) in self._wishes.items():
            for seated in [s for s in wish.seats if s not in seats]:
                self._search.release(seated)
            for seated in [s for s in seats if s not in wish.seats]:
                self._search.occupy(seated)
            wish.seats, wish.flow = seats, flow
            wish.stamp += 1


def in_order(wishes: Iterable[DeploymentState]) -> list[DeploymentState]:
    """Return some wishes, each once, as they stand in the search."""
    return sorted(set(wishes), key=lambda wish: wish.number)


def _cost(wish: DeploymentState, seats: list[PlannedReplica], flow: LoadAssignment) -> float:
    held = sum(seated.hold + seated.start for seated in seats)
    return flow.cost() + wish.shortfall([seated.pop for seated in seats]) + held

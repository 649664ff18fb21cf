"""An exchange being tried: what it touched, to return to if the whole is no better.

Rule: the sum over the wishes it touched is compared, and the exchange is kept or undone whole.
"""

from collections.abc import Iterable
from typing import Final

from scheduler.decide.flow import Flow
from scheduler.decide.search import Search
from scheduler.decide.wish import Seated, Wish

ENOUGH: Final = 1e-6

Holder = tuple[int, Seated]
"""A wish, by its number, and one of its seats."""


class Effort:
    """How much may still be tried: counted, not timed, so that a plan repeats."""

    def __init__(self, left: int) -> None:
        self.left = left

    def spend(self, much: int) -> bool:
        """Take a share for one attempt; False where none is left."""
        if self.left <= 0:
            return False
        self.left -= much
        return True


class Saved:
    """What the touched wishes and the ground were, to return to."""

    def __init__(self, search: Search, touched: Iterable[int]) -> None:
        self._search = search
        self._wishes: dict[int, tuple[list[Seated], Flow]] = {}
        for number in touched:
            self.touch(number)

    def touch(self, number: int) -> None:
        """Remember a wish as it is, before it is first changed."""
        if number not in self._wishes:
            wish = self._search.wishes[number]
            self._wishes[number] = (list(wish.seats), wish.flow)

    def cost_before(self) -> float:
        """Return what the touched wishes came to before."""
        return sum(_cost(self._search.wishes[n], *saved) for n, saved in self._wishes.items())

    def cost_now(self) -> float:
        """Return what they come to."""
        return sum(self._search.wishes[number].cost() for number in self._wishes)

    def undo(self) -> None:
        """Return to what was."""
        search = self._search
        for number, (seats, flow) in self._wishes.items():
            wish = search.wishes[number]
            for seated in [s for s in wish.seats if s not in seats]:
                search.release(wish, seated)
            for seated in [s for s in seats if s not in wish.seats]:
                search.occupy(wish, seated)
            wish.seats, wish.flow = seats, flow
            wish.stamp += 1


def _cost(wish: Wish, seats: list[Seated], flow: Flow) -> float:
    held = sum(seated.hold + seated.start for seated in seats)
    return flow.cost() + wish.shortfall([seated.pop for seated in seats]) + held

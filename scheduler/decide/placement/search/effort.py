"""The budget of attempts that the local search may make.

Attempts are counted, not timed, so that the same cluster state always gives the same plan.
"""


class EffortBudget:
    """Counts down the attempts that are left."""

    def __init__(self, attempts: int) -> None:
        self._left = attempts

    @property
    def is_spent(self) -> bool:
        """Say whether no attempt is left."""
        return self._left <= 0

    @property
    def left(self) -> int:
        """The attempts that are left."""
        return max(0, self._left)

    def add(self, attempts: int) -> None:
        """Allow `attempts` more."""
        self._left = self.left + attempts

    def spend(self, attempts: int) -> bool:
        """Take `attempts` from the budget; False, and nothing is taken, if it is spent."""
        if self._left <= 0:
            return False
        self._left -= attempts
        return True

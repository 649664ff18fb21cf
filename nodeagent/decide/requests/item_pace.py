"""Decides when the next item of a batch may begin in a vendor engine.

A step of such an engine computes all new prompts, and nothing interrupts it: a client's request
that arrives meanwhile waits for its end. Items that begin together would make one long step, and,
because they also end together, do so again and again.

Rule 1: items begin one after another, a little faster than they end when they have all seats. So
their prompts are spread over the steps, and seats that became free together still fill.
Rule 2: however long items take, the next one begins once the engine should have read the last one's
prompt.
Rule 3: while a client's request has no first token, none begins, because it would lengthen the step
that reads the client's prompt. The item that began last ends for it if its prompt may not be read
yet: it loses next to nothing.
Rule 4: what Rule 3 delays is limited, and is caught up by Rule 1. So items begin at least as often
as they end, however many clients there are.
"""

from typing import Final

PACE_SHARE: Final = 0.7
"""The shortest time from the begin of one item to the next, as a share of the mean time between the
ends of items that have all seats. The rest is what items catch up."""

TURNS_BEHIND_MAX: Final = 2
"""How many begins items may fall behind for clients. A free sequence is lost capacity where an
engine reads prompts beside many sequences at no cost, as GPUs do."""

NEWEST_WEIGHT: Final = 0.125
"""The weight of the item that ended last in the mean time that items take."""


class ItemPace:
    """The begins and ends of items in one engine. Times are monotonic seconds of the node."""

    def __init__(self, seats_max: int) -> None:
        self._seats_max = max(1, seats_max)
        self._item_s = 0.0
        """The mean time of an item in the engine; 0 before the first end."""
        self._interval_s = 0.0
        """The time after the last begin by Rules 1 and 2."""
        self._next_s = 0.0
        self._delay_s = 0.0
        """How far items are behind because of clients."""
        self._held_since_s: float | None = None
        """Since when an item waits for a client's first token only."""
        self.unread_prompts = 0
        """How many requests of clients in the engine have no first token."""

    def due_s(self, now_s: float) -> float:
        """Return when an item that has a free seat may begin: now, or later."""
        if now_s < self._next_s:
            return self._next_s
        if not self.unread_prompts:
            return now_s
        if self._held_since_s is None:
            self._held_since_s = now_s
        return max(now_s, self._held_since_s + self._delay_s_max() - self._delay_s)

    def record_begin(self, now_s: float, read_s: float) -> None:
        """Note that an item begins, whose prompt the engine should have read at `read_s`."""
        if self._held_since_s is not None:
            self._delay_s += now_s - self._held_since_s
            self._held_since_s = None
        self._interval_s = read_s - now_s
        if self._item_s:
            self._interval_s = min(self._interval_s, PACE_SHARE * self._item_s / self._seats_max)
        self._next_s = now_s + self._interval_s
        caught_up_s = self._interval_s * (1 / PACE_SHARE - 1)
        self._delay_s = min(max(0.0, self._delay_s - caught_up_s), self._delay_s_max())

    def record_end(self, began_s: float, now_s: float) -> None:
        """Note that an item that began at `began_s` is answered."""
        took_s = max(0.0, now_s - began_s)
        weight = NEWEST_WEIGHT if self._item_s else 1.0
        self._item_s += weight * (took_s - self._item_s)

    def may_preempt(self) -> bool:
        """Return whether an item whose prompt is not read may end for a client's request."""
        # Half a turn, because sums of turns are not exact.
        return self._delay_s + self._turn_s() / 2 < self._delay_s_max()

    def record_preemption(self) -> None:
        """Note that an item whose prompt was not read has ended for a client's request."""
        self._delay_s = min(self._delay_s_max(), self._delay_s + self._turn_s())

    def _turn_s(self) -> float:
        """Return the time between two begins at which items begin as often as they end."""
        return self._interval_s / PACE_SHARE

    def _delay_s_max(self) -> float:
        return TURNS_BEHIND_MAX * self._turn_s()

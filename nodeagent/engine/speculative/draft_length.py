"""How many drafted tokens a step verifies: as many as pay, by what was measured.

A step that computes more rows takes longer; a drafted token that is accepted saves a step. So the
drafts of all sequences are ranked by the chance that they are accepted, and the best are taken up
to where tokens per second are most: none where rows are dear (a full batch), many where they are
nearly free (one sequence, bound by memory).
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from statistics import median
from typing import Final

_CHANCE_FIRST: Final = 0.6
_LEARN: Final = 0.1
_SAMPLES: Final = 8
_FORGET_STEPS: Final = 50
"""After so many steps one sample of each size is dropped: a size that one stall made look dear, and
that is therefore not taken, is soon tried again."""
_ROW_PRIOR: Final = 0.05
"""What one more row is taken to cost, as a share of a step, before it was measured."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Tokens drafted for one sequence, and the chance of each that it and all before it hold."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(slots=True)
class Acceptance:
    """How often drafts of each source hold, learned token by token."""

    parent: "Acceptance | None" = None
    """Where a sequence of which nothing is known yet begins: what held for others."""
    _chances: dict[str, float] = field(default_factory=dict)

    def chance(self, source: str) -> float:
        """Return the chance that a token of `source` is accepted, where all before it were."""
        own = self._chances.get(source)
        if own is not None:
            return own
        return self.parent.chance(source) if self.parent is not None else _CHANCE_FIRST

    def note(self, source: str, accepted: bool) -> None:
        """Learn from one drafted token."""
        before = self.chance(source)
        self._chances[source] = before + _LEARN * (float(accepted) - before)
        if self.parent is not None:
            self.parent.note(source, accepted)


@dataclass(slots=True)
class StepCosts:
    """Seconds of a step by its rows, measured."""

    _seconds: dict[int, deque[float]] = field(default_factory=dict)
    _noted: int = 0

    def note(self, rows: int, seconds: float) -> None:
        """Take one step's measure."""
        self._seconds.setdefault(_size(rows), deque(maxlen=_SAMPLES)).append(seconds)
        self._noted += 1
        if self._noted % _FORGET_STEPS == 0:
            for size, samples in list(self._seconds.items()):
                samples.popleft()
                if not samples:
                    del self._seconds[size]

    @property
    def known(self) -> bool:
        """True where anything was measured."""
        return bool(self._seconds)

    def seconds(self, rows: int) -> float:
        """Return what a step of `rows` takes, estimated from the nearest sizes measured."""
        size = _size(rows)
        below = max((known for known in self._seconds if known <= size), default=None)
        above = min((known for known in self._seconds if known > size), default=None)
        if below is None and above is None:
            return _prior(size)
        if below is None or above is None:
            near = above if below is None else below
            assert near is not None
            return median(self._seconds[near]) * _prior(size) / _prior(near)
        low, high = median(self._seconds[below]), median(self._seconds[above])
        return low + (high - low) * (size - below) / (above - below)


def choose_depths(
    offers: Ordered[Offer], rows: int, rows_max: int, seconds: Callable[[int], float]
) -> list[int]:
    """Return how many tokens of each offer to verify in a step of `rows` sequences."""
    ranked = sorted(
        ((chance, index) for index, offer in enumerate(offers) for chance in offer.chances),
        key=lambda pair: -pair[0],
    )
    best, taken, tokens = rows / seconds(rows), 0, float(rows)
    for count, (chance, _) in enumerate(ranked[: max(rows_max - rows, 0)], 1):
        tokens += chance
        rate = tokens / seconds(rows + count)
        if rate > best:
            best, taken = rate, count
    depths = [0] * len(offers)
    for _, index in ranked[:taken]:
        # An offer's chances only fall, so its best tokens are its first.
        depths[index] += 1
    return depths


def promise(chances: Ordered[float], pass_share: float) -> float:
    """Return what drafts of a model are worth at best, in tokens that cost nothing.

    A pass takes `pass_share` of a step. Another drafter's offers, which cost none, compare with it.
    """
    best, held, tokens = 0.0, 1.0, 1.0
    for count, chance in enumerate(chances, 1):
        held *= chance
        tokens += held
        best = max(best, tokens / (1 + pass_share * count) - 1)
    return best


def choose_ahead(
    chances: Ordered[float],
    drafting: int,
    rows: int,
    rows_max: int,
    seconds: Callable[[int], float],
    pass_s: float,
) -> int:
    """Return how many tokens a model is to draft for each of `drafting` of `rows` sequences.

    `chances` are those of its first, second, ... draft, where all before it held; each costs a
    pass of `pass_s`. None are drafted where the step is faster without.
    """
    best, depth = rows / seconds(rows), 0
    held, tokens = 1.0, float(rows)
    for count, chance in enumerate(chances, 1):
        if rows + drafting * count > rows_max:
            break
        held *= chance
        tokens += drafting * held
        rate = tokens / (seconds(rows + drafting * count) + pass_s * count)
        if rate > best:
            best, depth = rate, count
    return depth


def _prior(rows: int) -> float:
    return 1 + _ROW_PRIOR * (rows - 1)


def _size(rows: int) -> int:
    """Round up: 1 to 4 apart, then half steps between powers of two."""
    if rows <= 4:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power

"""Decides how many drafted tokens a step verifies, from measured step times and acceptance rates.

A step with more rows takes longer, and each accepted draft saves a step. The drafts of all
sequences are ranked by their chance to be accepted, and the best are taken as long as the expected
tokens per second rise: none if rows are expensive (a full batch), many if rows are almost free (one
sequence on a memory-bound device).
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from statistics import median
from typing import Final

_CHANCE_INITIAL: Final = 0.6
"""The assumed chance of a draft from a source that was never verified."""
_LEARNING_RATE: Final = 0.1
_SAMPLES_MAX: Final = 8
"""Step times kept for each size of a step."""
_FORGET_STEPS: Final = 50
"""After this many steps the oldest sample of each size is dropped. A size that one stall made look
expensive is not chosen, so it would never be measured again otherwise."""
_ROW_COST_INITIAL: Final = 0.05
"""The assumed cost of one more row, as a share of a one-row step, before it is measured."""


@dataclass(frozen=True, slots=True)
class DraftProposal:
    """Tokens drafted for one sequence.

    `chances[i]` is the chance that `tokens[i]` and all before it are accepted.
    """

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(slots=True)
class AcceptanceRates:
    """The rate at which drafts of each source are accepted, as an exponential moving average."""

    parent: "AcceptanceRates | None" = None
    """The rates over all sequences, used for sources that this sequence has not tried."""
    _rates: dict[str, float] = field(default_factory=dict)

    def chance(self, source: str) -> float:
        """Return the chance that a draft of `source` is accepted if all before it were."""
        own = self._rates.get(source)
        if own is not None:
            return own
        return self.parent.chance(source) if self.parent is not None else _CHANCE_INITIAL

    def record(self, source: str, accepted: bool) -> None:
        """Learn from one drafted token."""
        rate = self.chance(source)
        self._rates[source] = rate + _LEARNING_RATE * (float(accepted) - rate)
        if self.parent is not None:
            self.parent.record(source, accepted)


@dataclass(slots=True)
class StepCosts:
    """Measured step times by the number of rows."""

    _samples: dict[int, deque[float]] = field(default_factory=dict)
    _recorded: int = 0

    def record(self, rows: int, seconds: float) -> None:
        """Record the time of one step."""
        self._samples.setdefault(_size_class(rows), deque(maxlen=_SAMPLES_MAX)).append(seconds)
        self._recorded += 1
        if self._recorded % _FORGET_STEPS == 0:
            for size, samples in list(self._samples.items()):
                samples.popleft()
                if not samples:
                    del self._samples[size]

    @property
    def known(self) -> bool:
        """True if at least one step was measured."""
        return bool(self._samples)

    def seconds(self, rows: int) -> float:
        """Estimate the time of a step of `rows` from the nearest measured sizes."""
        size = _size_class(rows)
        below = max((known for known in self._samples if known <= size), default=None)
        above = min((known for known in self._samples if known > size), default=None)
        if below is None and above is None:
            return _assumed_cost(size)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return median(self._samples[nearest]) * _assumed_cost(size) / _assumed_cost(nearest)
        low, high = median(self._samples[below]), median(self._samples[above])
        return low + (high - low) * (size - below) / (above - below)


def choose_draft_lengths(
    proposals: Ordered[DraftProposal], rows: int, rows_max: int, seconds: Callable[[int], float]
) -> list[int]:
    """Return how many tokens of each proposal to verify in a step of `rows` sequences.

    `seconds` estimates the time of a step by its rows, of which there may be `rows_max`.
    """
    ranked = sorted(
        (
            (chance, index)
            for index, proposal in enumerate(proposals)
            for chance in proposal.chances
        ),
        key=lambda pair: -pair[0],
    )
    best_rate, taken, tokens = rows / seconds(rows), 0, float(rows)
    for count, (chance, _) in enumerate(ranked[: max(rows_max - rows, 0)], 1):
        tokens += chance
        rate = tokens / seconds(rows + count)
        if rate > best_rate:
            best_rate, taken = rate, count
    lengths = [0] * len(proposals)
    for _, index in ranked[:taken]:
        # The chances of a proposal only fall, so its best tokens are its first.
        lengths[index] += 1
    return lengths


def best_expected_gain(chances: Ordered[float], pass_share: float) -> float:
    """Return the gain of drafting with a model, as a number of drafts that cost nothing.

    `chances` are those of its first, second, ... draft if all before it were accepted. A pass of
    the draft model takes `pass_share` of a step. The result compares with the summed chances of a
    proposal that cost nothing to draft.
    """
    best, all_accepted, tokens = 0.0, 1.0, 1.0
    for count, chance in enumerate(chances, 1):
        all_accepted *= chance
        tokens += all_accepted
        best = max(best, tokens / (1 + pass_share * count) - 1)
    return best


def choose_model_draft_length(
    chances: Ordered[float],
    drafting: int,
    rows: int,
    rows_max: int,
    seconds: Callable[[int], float],
    pass_s: float,
) -> int:
    """Return how many tokens a draft model drafts for each of `drafting` of `rows` sequences.

    `chances` are those of its first, second, ... draft if all before it were accepted. Each costs
    one pass of `pass_s` seconds. The result is 0 if the step is faster without drafts.
    """
    best_rate, length = rows / seconds(rows), 0
    all_accepted, tokens = 1.0, float(rows)
    for count, chance in enumerate(chances, 1):
        if rows + drafting * count > rows_max:
            break
        all_accepted *= chance
        tokens += drafting * all_accepted
        rate = tokens / (seconds(rows + drafting * count) + pass_s * count)
        if rate > best_rate:
            best_rate, length = rate, count
    return length


def _assumed_cost(rows: int) -> float:
    """Return the cost of a step relative to a one-row step, before anything is measured."""
    return 1 + _ROW_COST_INITIAL * (rows - 1)


def _size_class(rows: int) -> int:
    """Round `rows` up to 1, 2, 3, 4, or to a power of two or the middle between two of them."""
    if rows <= 4:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power

"""What one city will ask of one deployment: a quantile, some slots ahead.

Several simple forecasts stand side by side: the level alone (persistence), the level carried along
the day's or the week's shape, yesterday, last week. Each learns its own error's quantile and is
weighed by how well that quantile did lately (pinball loss), so that a season is believed only
where it beats persistence: much traffic is weakly seasonal.

Rule 1: values are forecast as z = log(value + FLOOR x mean): ratios where traffic is thick,
differences where it is thin, and a zero is a number like others.
Rule 2: a slot never observed is unknown, not zero; what was foretold for it is not judged.
Rule 3: all state is in `Series`: saved, read back and replayed bit for bit.
"""

from array import array
from collections.abc import Iterator, Sequence
from math import exp, isfinite, isnan, log, nan
from typing import Any, Final, NamedTuple

import msgspec

SLOT_S: Final = 600
DAY_SLOTS: Final = 144
WEEK_SLOTS: Final = 1008
HORIZONS: Final = (1, 6, 18)
"""Slots ahead that are foretold: ten minutes, an hour (a large model's start), three hours."""

FLOOR: Final = 0.3
"""Part of the mean below which differences count and ratios do not."""

SMOOTHING: Final = (1.0, 0.5, 0.2)
"""How fast each level follows: at once, in two slots, in five."""

LEANS: Final = (0.5, 1.0)
"""How much of a season's rise from now is believed."""

SEASON_RATE: Final = 0.2
"""What a day adds to the shape of the days before."""

QUANTILE_RATE: Final = 0.03
SCALE_RATE: Final = 0.005
SCALE_SURPRISE_MAX: Final = 4.0
"""An error counts at most so many times the usual one: an outage does not widen the quantiles."""

LOSS_RATE: Final = 0.007
TRUST: Final = 16.0
"""How sharply the better forecast is preferred: weight = (least loss / its loss) ** TRUST."""

SCALE_MIN: Final = 1e-3
VALUE_MAX: Final = 1e15
MEAN_MIN: Final = 1e-9


class Expert(NamedTuple):
    """One way to foretell: which level (-1: none), along which season, how much of it."""

    level: int
    season: int
    lean: float


PART_MIN: Final = 0.1
"""A newcomer is thought to ask no less than this part of its mean now, and no more than 1 / it."""

LAYOUT: Final = 1
"""The layout of a saved state: it changes with the experts, the horizons and the slots."""

_saved = msgspec.msgpack.Decoder(
    tuple[int, tuple[int, int, float, float, tuple[float, ...]], tuple[bytes, ...]]
)

NO_SEASON, DAILY, WEEKLY = 0, 1, 2

EXPERTS: Final = (
    *(
        expert
        for level in range(len(SMOOTHING))
        for expert in (
            Expert(level, NO_SEASON, 0.0),
            *(Expert(level, season, lean) for lean in LEANS for season in (DAILY, WEEKLY)),
        )
    ),
    Expert(-1, DAILY, 0.0),
    Expert(-1, WEEKLY, 0.0),
)


class HorizonState:
    """What is learned of one horizon: pending forecasts, and each expert's errors.

    `told` holds `slots` rows of one forecast an expert; `told_at` the slot each row was told in.
    `offset` and `loss` hold one number an expert and quantile.
    """

    __slots__ = ("loss", "offset", "scale", "slots", "told", "told_at")

    def __init__(self, slots: int, taus: int) -> None:
        """Know nothing yet."""
        self.slots = slots
        self.told = _blank(slots * len(EXPERTS))
        self.told_at = array("q", [-1] * slots)
        self.scale = _blank(len(EXPERTS))
        self.offset = array("f", [0.0] * (len(EXPERTS) * taus))
        self.loss = _blank(len(EXPERTS) * taus)


class Series:
    """One series as learned so far. `day` and `week` hold z by slot, NaN where never seen."""

    __slots__ = (
        "ahead", "along", "day", "levels", "mean", "observed", "quantiles", "slot", "week", "z",
    )  # fmt: skip

    def __init__(self, slot: int, value: float, quantiles: Sequence[float] = (0.9,)) -> None:
        """Begin with the first value, which must be over zero."""
        self.slot = slot - 1
        self.mean = min(max(value, MEAN_MIN), VALUE_MAX)
        self.quantiles = tuple(quantiles)
        self.observed = 0
        self.z = 0.0
        self.levels = _blank(len(SMOOTHING))
        self.along = _blank(2 * len(SMOOTHING))
        self.day = _blank(DAY_SLOTS)
        self.week = _blank(WEEK_SLOTS)
        self.ahead = [HorizonState(slots, len(self.quantiles)) for slots in HORIZONS]
        observe(self, slot, value)


def observe(series: Series, slot: int, value: float) -> bool:
    """Learn what a slot asked; False where the slot is past or the value is no demand."""
    if slot <= series.slot or not isfinite(value) or value < 0:
        return False
    value = min(value, VALUE_MAX)
    series.slot = slot
    series.observed += 1
    series.mean += (value - series.mean) / min(series.observed, WEEK_SLOTS)
    series.mean = max(series.mean, MEAN_MIN)
    z = log(value + FLOOR * series.mean)
    for ahead in series.ahead:
        _judge(series, ahead, value, z)
    _learn(series, z)
    for ahead in series.ahead:
        row = slot % ahead.slots
        start = row * len(EXPERTS)
        ahead.told_at[row] = slot
        for index, expert in enumerate(EXPERTS):
            ahead.told[start + index] = _point(series, expert, slot + ahead.slots)
    return True


def forecast(series: Series, horizon: int, quantile: int = 0) -> float:
    """Return the quantile of the value `HORIZONS[horizon]` slots after the last one observed."""
    ahead = series.ahead[horizon]
    taus = len(series.quantiles)
    losses = [ahead.loss[index * taus + quantile] for index in range(len(EXPERTS))]
    least = min((loss for loss in losses if not isnan(loss)), default=nan)
    if isnan(least):
        return _value(series, series.z)
    # A hair above zero: a series that is always zero has no loss to divide by.
    least += 1e-9 * series.mean
    start = (series.slot % ahead.slots) * len(EXPERTS)
    weight = total = 0.0
    for index, loss in enumerate(losses):
        if not isnan(loss):
            trust = (least / (loss + 1e-9 * series.mean)) ** TRUST
            weight += trust
            total += trust * (ahead.told[start + index] + ahead.offset[index * taus + quantile])
    return _value(series, total / weight)


def borrow_shape(series: Series, donors: Sequence[tuple[Series, int]]) -> None:
    """Give a newcomer the shape and the errors of its like.

    Each donor comes with its shift: how many slots later than the donor's the newcomer's day runs.
    """
    known = [(donor, shift) for donor, shift in donors if donor.observed >= DAY_SLOTS]
    if not known:
        return
    _find_mean(series, known)
    for slot in range(series.slot - WEEK_SLOTS + 1, series.slot + 1):
        rises, risen = [], []
        for donor, shift in known:
            now = donor.day[(series.slot - shift) % DAY_SLOTS]
            rises.append(donor.day[(slot - shift) % DAY_SLOTS] - now)
            # A newcomer to the west asks later than its donor has been asked: a day earlier.
            late = max(0, -(-(slot - shift - donor.slot) // DAY_SLOTS))
            risen.append(donor.week[(slot - shift - late * DAY_SLOTS) % WEEK_SLOTS] - now)
        series.day[slot % DAY_SLOTS] = series.z + _mean(rises, nan)
        series.week[slot % WEEK_SLOTS] = series.z + _mean(risen, nan)
    for number, season in enumerate((series.day, series.week)):
        for level in range(len(SMOOTHING)):
            now = season[series.slot % len(season)]
            series.along[number * len(SMOOTHING) + level] = now
    for number, ahead in enumerate(series.ahead):
        theirs = [(donor.ahead[number], series.mean / donor.mean) for donor, _ in known]
        for index in range(len(ahead.offset)):
            ahead.offset[index] = _mean([one.offset[index] for one, _ in theirs], 0.0)
            ahead.loss[index] = _mean([one.loss[index] * ratio for one, ratio in theirs], nan)
        for index in range(len(ahead.scale)):
            ahead.scale[index] = _mean([one.scale[index] for one, _ in theirs], nan)
        row = (series.slot % ahead.slots) * len(EXPERTS)
        for index, expert in enumerate(EXPERTS):
            ahead.told[row + index] = _point(series, expert, series.slot + ahead.slots)


def serialize(series: Series) -> bytes:
    """Return the state as bytes, for the store."""
    numbers = (series.slot, series.observed, series.mean, series.z, series.quantiles)
    return msgspec.msgpack.encode((LAYOUT, numbers, [one.tobytes() for one in _arrays(series)]))


def deserialize(data: bytes) -> Series | None:
    """Return the state that was saved; None where it is not one, or is of another layout."""
    try:
        layout, numbers, blobs = _saved.decode(data)
        if layout != LAYOUT:
            return None
        slot, observed, mean, z, quantiles = numbers
        series = Series(slot, 1.0, quantiles)
        for one, blob in zip(_arrays(series), blobs, strict=True):
            size = len(one)
            del one[:]
            one.frombytes(blob)
            if len(one) != size:
                return None
    except (msgspec.DecodeError, ValueError):
        return None
    series.observed, series.mean, series.z = observed, mean, z
    return series


def _find_mean(series: Series, donors: Sequence[tuple[Series, int]]) -> None:
    """Guess a newcomer's mean: what it asks now, against what its like ask at this time of day."""
    value = _value(series, series.z)
    parts = []
    for donor, shift in donors:
        usual = donor.day[(series.slot - shift) % DAY_SLOTS]
        if not isnan(usual):
            parts.append(_value(donor, usual) / donor.mean)
    part = min(max(_mean(parts, 1.0), PART_MIN), 1 / PART_MIN)
    series.mean = max(value / part, MEAN_MIN)
    series.observed = DAY_SLOTS // 2
    series.z = log(value + FLOOR * series.mean)
    series.levels = array("f", [series.z] * len(SMOOTHING))


def _judge(series: Series, ahead: HorizonState, value: float, z: float) -> None:
    """Hold what was told for this slot against what came."""
    row = series.slot % ahead.slots
    if ahead.told_at[row] != series.slot - ahead.slots:
        return
    taus = series.quantiles
    start = row * len(EXPERTS)
    for index in range(len(EXPERTS)):
        error = z - ahead.told[start + index]
        scale = ahead.scale[index]
        if isnan(scale):
            scale = abs(error) + SCALE_MIN
        surprise = min(abs(error), SCALE_SURPRISE_MAX * scale)
        scale = max(SCALE_MIN, scale + SCALE_RATE * (surprise - scale))
        ahead.scale[index] = scale
        for at, tau in enumerate(taus, index * len(taus)):
            offset = ahead.offset[at]
            told = _value(series, ahead.told[start + index] + offset)
            loss = tau * (value - told) if value >= told else (1 - tau) * (told - value)
            before = ahead.loss[at]
            ahead.loss[at] = loss if isnan(before) else before + LOSS_RATE * (loss - before)
            ahead.offset[at] = offset + QUANTILE_RATE * scale * (tau - (error < offset))


def _learn(series: Series, z: float) -> None:
    """Move the levels, the seasons smoothed as the levels are, and the seasons."""
    series.z = z
    day, week = series.slot % DAY_SLOTS, series.slot % WEEK_SLOTS
    series.day[day] = _toward(series.day[day], z, SEASON_RATE)
    seasons = (series.day[day], series.week[week])
    series.week[week] = z
    for level, rate in enumerate(SMOOTHING):
        series.levels[level] = _toward(series.levels[level], z, rate)
        for number, now in enumerate(seasons):
            at = number * len(SMOOTHING) + level
            if not isnan(now):
                series.along[at] = _toward(series.along[at], now, rate)


def _point(series: Series, expert: Expert, target: int) -> float:
    """Return an expert's z of a slot ahead; what it lacks, the plain level stands in for."""
    if expert.level < 0:
        back = target - (DAY_SLOTS if expert.season == DAILY else WEEK_SLOTS)
        seen = series.week[back % WEEK_SLOTS]
        return series.levels[0] if isnan(seen) else seen
    level = series.levels[expert.level]
    if expert.season == NO_SEASON:
        return level
    is_daily = expert.season == DAILY
    then = series.day[target % DAY_SLOTS] if is_daily else series.week[target % WEEK_SLOTS]
    now = series.along[(expert.season - 1) * len(SMOOTHING) + expert.level]
    if isnan(then) or isnan(now):
        return level
    return level + expert.lean * (then - now)


def _blank(size: int) -> "array[float]":
    return array("f", [nan] * size)


def _toward(old: float, new: float, rate: float) -> float:
    return new if isnan(old) else old + rate * (new - old)


def _value(series: Series, z: float) -> float:
    # exp() of 40 is over VALUE_MAX: no forecast overflows.
    return min(max(0.0, exp(min(z, 40.0)) - FLOOR * series.mean), VALUE_MAX)


def _mean(values: Sequence[float], default: float) -> float:
    known = [value for value in values if not isnan(value)]
    return sum(known) / len(known) if known else default


def _arrays(series: Series) -> "Iterator[array[Any]]":
    yield from (series.levels, series.along, series.day, series.week)
    for ahead in series.ahead:
        yield from (ahead.told, ahead.told_at, ahead.scale, ahead.offset, ahead.loss)

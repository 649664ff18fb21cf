"""Forecast of one series: a quantile of its value some slots ahead.

Several simple experts forecast side by side: the level alone (persistence), the level moved along
the daily or weekly shape, yesterday, last week. Each learns the quantile of its own error, and is
weighted by how well that quantile did recently (pinball loss). So a season is used only where it
beats persistence; much traffic is weakly seasonal.

Rule 1: values are forecast as z = log(value + FLOOR x mean): ratios matter for large values,
differences for small ones, and zero is an ordinary value.
Rule 2: a slot that was not observed is unknown, not zero; forecasts for it are not judged.
Rule 3: all state is in `Series`, and can be stored and replayed bit for bit.
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
"""Slots ahead to forecast: ten minutes, an hour (the start of a large model), three hours."""

FLOOR: Final = 0.3
"""The share of the mean below which differences matter more than ratios."""

SMOOTHING: Final = (1.0, 0.5, 0.2)
"""How fast each level follows the value: at once, within two slots, within five."""

LEANS: Final = (0.5, 1.0)
"""The share of a season's change from now that is applied."""

SEASON_RATE: Final = 0.2
"""The weight of the latest day in the daily shape."""

QUANTILE_RATE: Final = 0.03
SCALE_RATE: Final = 0.005
SCALE_SURPRISE_MAX: Final = 4.0
"""An error counts at most this many times the usual one: an outage must not widen quantiles."""

LOSS_RATE: Final = 0.007
TRUST: Final = 16.0
"""How sharply better experts are preferred: weight = (least loss / own loss) ** TRUST."""

SCALE_MIN: Final = 1e-3
VALUE_MAX: Final = 1e15
MEAN_MIN: Final = 1e-9


class Expert(NamedTuple):
    """One way to forecast: a level (index, or -1 for none) plus a share of a season's change."""

    level: int
    season: int
    lean: float


PART_MIN: Final = 0.1
"""The first value of a new series is taken to be between this share of its mean and 1 / share."""

LAYOUT: Final = 1
"""The version of the stored state; it changes with the experts, the horizons and the slots."""

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
    """The state of one horizon: pending forecasts, and the errors of each expert.

    `forecasts` has `slots` rows with one forecast per expert, and `made_at` the slot in which each
    row was made. `scale` has one number per expert, `offset` and `loss` one per expert and
    quantile.
    """

    __slots__ = ("forecasts", "loss", "made_at", "offset", "scale", "slots")

    def __init__(self, slots: int, taus: int) -> None:
        """Begin without any observation; `taus` is the number of quantiles."""
        self.slots = slots
        self.forecasts = _blank(slots * len(EXPERTS))
        self.made_at = array("q", [-1] * slots)
        self.scale = _blank(len(EXPERTS))
        self.offset = array("f", [0.0] * (len(EXPERTS) * taus))
        self.loss = _blank(len(EXPERTS) * taus)


class Series:
    """One series as learned so far.

    `day` and `week` hold z by slot of the day and week, NaN where never observed. `along` holds the
    seasons smoothed at the rate of each level. `ahead` has the state of each horizon.
    """

    __slots__ = (
        "ahead", "along", "day", "levels", "mean", "observed", "quantiles", "slot", "week", "z",
    )  # fmt: skip

    def __init__(self, slot: int, value: float, quantiles: Sequence[float] = (0.9,)) -> None:
        """Begin with the first value, which must be above zero."""
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
    """Learn the value of a slot; False if the slot is past or the value is invalid."""
    if slot <= series.slot or not isfinite(value) or value < 0:
        return False
    value = min(value, VALUE_MAX)
    series.slot = slot
    series.observed += 1
    series.mean += (value - series.mean) / min(series.observed, WEEK_SLOTS)
    series.mean = max(series.mean, MEAN_MIN)
    z = log(value + FLOOR * series.mean)
    for state in series.ahead:
        _judge_forecasts(series, state, value, z)
    _update(series, z)
    for state in series.ahead:
        row = slot % state.slots
        start = row * len(EXPERTS)
        state.made_at[row] = slot
        for index, expert in enumerate(EXPERTS):
            state.forecasts[start + index] = _expert_z(series, expert, slot + state.slots)
    return True


def forecast(series: Series, horizon: int, quantile: int = 0) -> float:
    """Return a quantile of the value `HORIZONS[horizon]` slots after the last observed one."""
    state = series.ahead[horizon]
    taus = len(series.quantiles)
    losses = [state.loss[index * taus + quantile] for index in range(len(EXPERTS))]
    loss_min = min((loss for loss in losses if not isnan(loss)), default=nan)
    if isnan(loss_min):
        return _value(series, series.z)
    # Slightly above zero: a series that is always zero has no loss to divide by.
    loss_min += 1e-9 * series.mean
    start = (series.slot % state.slots) * len(EXPERTS)
    weight = total = 0.0
    for index, loss in enumerate(losses):
        if not isnan(loss):
            trust = (loss_min / (loss + 1e-9 * series.mean)) ** TRUST
            weight += trust
            total += trust * (
                state.forecasts[start + index] + state.offset[index * taus + quantile]
            )
    return _value(series, total / weight)


def borrow_shape(series: Series, donors: Sequence[tuple[Series, int]]) -> None:
    """Give a new series the shape and the errors of its donors.

    Each donor comes with a shift: by how many slots the new series' day is later than the donor's.
    """
    known = [(donor, shift) for donor, shift in donors if donor.observed >= DAY_SLOTS]
    if not known:
        return
    _estimate_mean(series, known)
    for slot in range(series.slot - WEEK_SLOTS + 1, series.slot + 1):
        rises, risen = [], []
        for donor, shift in known:
            now = donor.day[(series.slot - shift) % DAY_SLOTS]
            rises.append(donor.day[(slot - shift) % DAY_SLOTS] - now)
            # West of the donor, these slots are ahead of the donor's last: use the day before.
            late = max(0, -(-(slot - shift - donor.slot) // DAY_SLOTS))
            risen.append(donor.week[(slot - shift - late * DAY_SLOTS) % WEEK_SLOTS] - now)
        series.day[slot % DAY_SLOTS] = series.z + _mean(rises, nan)
        series.week[slot % WEEK_SLOTS] = series.z + _mean(risen, nan)
    for number, season in enumerate((series.day, series.week)):
        for level in range(len(SMOOTHING)):
            now = season[series.slot % len(season)]
            series.along[number * len(SMOOTHING) + level] = now
    for number, state in enumerate(series.ahead):
        donor_states = [(donor.ahead[number], series.mean / donor.mean) for donor, _ in known]
        for index in range(len(state.offset)):
            state.offset[index] = _mean([other.offset[index] for other, _ in donor_states], 0.0)
            state.loss[index] = _mean(
                [other.loss[index] * ratio for other, ratio in donor_states], nan
            )
        for index in range(len(state.scale)):
            state.scale[index] = _mean([other.scale[index] for other, _ in donor_states], nan)
        row = (series.slot % state.slots) * len(EXPERTS)
        for index, expert in enumerate(EXPERTS):
            state.forecasts[row + index] = _expert_z(series, expert, series.slot + state.slots)


def serialize(series: Series) -> bytes:
    """Return the state of a series as bytes, for the store."""
    numbers = (series.slot, series.observed, series.mean, series.z, series.quantiles)
    return msgspec.msgpack.encode(
        (LAYOUT, numbers, [values.tobytes() for values in _arrays(series)])
    )


def deserialize(data: bytes) -> Series | None:
    """Return a series from its stored state; None if it is invalid or of another layout."""
    try:
        layout, numbers, blobs = _saved.decode(data)
        if layout != LAYOUT:
            return None
        slot, observed, mean, z, quantiles = numbers
        series = Series(slot, 1.0, quantiles)
        for values, blob in zip(_arrays(series), blobs, strict=True):
            size = len(values)
            del values[:]
            values.frombytes(blob)
            if len(values) != size:
                return None
    except ValueError:
        return None
    series.observed, series.mean, series.z = observed, mean, z
    return series


def _estimate_mean(series: Series, donors: Sequence[tuple[Series, int]]) -> None:
    """Estimate the mean of a new series from its value now and its donors' at this time of day."""
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


def _judge_forecasts(series: Series, state: HorizonState, value: float, z: float) -> None:
    """Learn from the error of the forecasts made for this slot."""
    row = series.slot % state.slots
    if state.made_at[row] != series.slot - state.slots:
        return
    taus = series.quantiles
    start = row * len(EXPERTS)
    for index in range(len(EXPERTS)):
        error = z - state.forecasts[start + index]
        scale = state.scale[index]
        if isnan(scale):
            scale = abs(error) + SCALE_MIN
        surprise = min(abs(error), SCALE_SURPRISE_MAX * scale)
        scale = max(SCALE_MIN, scale + SCALE_RATE * (surprise - scale))
        state.scale[index] = scale
        for cell, tau in enumerate(taus, index * len(taus)):
            offset = state.offset[cell]
            quantile = _value(series, state.forecasts[start + index] + offset)
            loss = tau * (value - quantile) if value >= quantile else (1 - tau) * (quantile - value)
            before = state.loss[cell]
            state.loss[cell] = loss if isnan(before) else before + LOSS_RATE * (loss - before)
            state.offset[cell] = offset + QUANTILE_RATE * scale * (tau - (error < offset))


def _update(series: Series, z: float) -> None:
    """Update the levels, the seasons, and the seasons smoothed like the levels."""
    series.z = z
    day, week = series.slot % DAY_SLOTS, series.slot % WEEK_SLOTS
    series.day[day] = _toward(series.day[day], z, SEASON_RATE)
    seasons = (series.day[day], series.week[week])
    series.week[week] = z
    for level, rate in enumerate(SMOOTHING):
        series.levels[level] = _toward(series.levels[level], z, rate)
        for number, now in enumerate(seasons):
            cell = number * len(SMOOTHING) + level
            if not isnan(now):
                series.along[cell] = _toward(series.along[cell], now, rate)


def _expert_z(series: Series, expert: Expert, target: int) -> float:
    """Return an expert's z for a later slot; the plain level where its season is unknown."""
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
    for state in series.ahead:
        yield from (state.forecasts, state.made_at, state.scale, state.offset, state.loss)

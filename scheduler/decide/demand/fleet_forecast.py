"""Forecasts of the demand of every city for every deployment, as rates that a planner can add up.

A series is forecast as work: uncached prompt tokens plus weighted output tokens. Its usual mix
turns work back into rates. A new series borrows its shape from the same deployment in the nearest
time zones, else from other deployments in its own city.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from isochrone.wire.ids import DeploymentId, PopId
from scheduler.decide.cluster import DemandRate
from scheduler.decide.demand.series_forecast import (
    DAY_SLOTS,
    HORIZONS,
    SLOT_S,
    Series,
    borrow_shape,
    deserialize,
    forecast,
    observe,
    serialize,
)

QUANTILE: Final = 0.9
"""The quantile that capacity is planned for: demand stays below it nine times in ten."""

PLANNED_AHEAD: Final = tuple(range(len([slots for slots in HORIZONS if slots <= 6])))
"""The horizons that placement plans for: those within an hour, which a large model may take to
start."""

LATER: Final = (len(HORIZONS) - 1,)
"""The horizon that weights are prefetched for."""

LATER_S: Final = (HORIZONS[-1] - 1) * SLOT_S
"""The time from the end of the last learned slot to the start of the slot forecast for LATER."""

OUTPUT_WEIGHT: Final = 8.0
"""The work of an output token in prompt tokens: decoding reads the weights for each token."""

MIX_RATE: Final = 0.05
SERIES_MAX: Final = 20_000
"""Series kept, of about 7 KiB each. The smallest are dropped first; they are planned by current
demand alone."""

FORGET_SLOTS: Final = 14 * DAY_SLOTS
DONORS_MAX: Final = 3
DONOR_SHIFT_MAX: Final = DAY_SLOTS // 4
NEGLIGIBLE: Final = 1e-3

SeriesKey = tuple[DeploymentId, PopId]


class SlotDemand(NamedTuple):
    """The demand of one slot, per second."""

    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    uncached_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0

    @property
    def work(self) -> float:
        """Prompt tokens and output tokens on one scale."""
        return self.uncached_tokens_per_s + OUTPUT_WEIGHT * self.output_tokens_per_s


class KnownSeries(msgspec.Struct):
    """One series, the rates of one unit of its work, and the last slot with any demand."""

    series: Series
    mix: SlotDemand
    demand_slot: int


class FleetForecast:
    """All series learned so far. `longitudes` of the PoPs say which are near in time zone."""

    def __init__(self, longitudes: Mapping[PopId, float]) -> None:
        """Begin without any series."""
        self.longitudes = longitudes
        self._known: dict[SeriesKey, KnownSeries] = {}

    def __len__(self) -> int:
        """Return the number of series."""
        return len(self._known)

    def sorted_keys(self) -> list[SeriesKey]:
        """Return the keys of all series, sorted."""
        return sorted(self._known)

    def learn(self, slot: int, key: SeriesKey, demand: SlotDemand) -> None:
        """Learn the demand of a slot, which may be zero."""
        known = self._known.get(key)
        if known is None:
            if demand.work > 0:
                self._begin(slot, key, demand)
            return
        observe(known.series, slot, demand.work)
        if demand.work > 0:
            known.demand_slot = slot
            known.mix = SlotDemand(
                *(
                    old + MIX_RATE * (new / demand.work - old)
                    for old, new in zip(known.mix, demand, strict=True)
                )
            )
        elif slot - known.demand_slot > FORGET_SLOTS:
            del self._known[key]

    def forecast(
        self, key: SeriesKey, horizons: Sequence[int] = PLANNED_AHEAD
    ) -> DemandRate | None:
        """Return the highest forecast at some horizons; None if it is negligible."""
        known = self._known.get(key)
        if known is None:
            return None
        work = max(forecast(known.series, horizon) for horizon in horizons)
        if work < NEGLIGIBLE * known.series.mean:
            return None
        return DemandRate(
            deployment_id=key[0],
            pop=key[1],
            requests_per_s=work * known.mix.requests_per_s,
            uncached_tokens_per_s=work * known.mix.uncached_tokens_per_s,
            output_tokens_per_s=work * known.mix.output_tokens_per_s,
        )

    def serialized(self, key: SeriesKey) -> tuple[int, bytes]:
        """Return the last slot of a series and its state as the store keeps it."""
        known = self._known[key]
        state = (known.demand_slot, known.mix, serialize(known.series))
        return known.series.slot, msgspec.msgpack.encode(state)

    def restore(self, key: SeriesKey, state: bytes) -> bool:
        """Add a series from the store; False if it is unreadable or there are too many series."""
        try:
            demand_slot, mix, data = _state.decode(state)
        except (msgspec.DecodeError, ValueError):
            return False
        series = deserialize(data)
        if series is None or len(self._known) >= SERIES_MAX:
            return False
        self._known[key] = KnownSeries(series, mix, demand_slot)
        return True

    def _begin(self, slot: int, key: SeriesKey, demand: SlotDemand) -> None:
        if len(self._known) >= SERIES_MAX:
            smallest = min(self._known, key=lambda key: (self._known[key].series.mean, key))
            if self._known[smallest].series.mean >= demand.work:
                return
            del self._known[smallest]
        series = Series(slot, demand.work, (QUANTILE,))
        borrow_shape(series, list(self._donors(key)))
        mix = SlotDemand(*(part / demand.work for part in demand))
        self._known[key] = KnownSeries(series, mix, slot)

    def _donors(self, key: SeriesKey) -> Iterator[tuple[Series, int]]:
        """Yield series to borrow from, each with its time shift in slots.

        These series are of the same deployment in the nearest time zones, else of the same city.
        """
        deployment_id, pop = key
        donors = [
            (abs(shift), other, shift)
            for other in self._known
            if other[0] == deployment_id
            and abs(shift := self._shift(other[1], pop)) <= DONOR_SHIFT_MAX
            and self._known[other].series.observed >= DAY_SLOTS
        ]
        if not donors:
            donors = [(0, other, 0) for other in self._known if other[1] == pop]
            donors.sort(key=lambda donor: (-self._known[donor[1]].series.observed, donor[1]))
        else:
            donors.sort()
        for _, other, shift in donors[:DONORS_MAX]:
            yield self._known[other].series, shift

    def _shift(self, from_pop: PopId, to_pop: PopId) -> int:
        """Return by how many slots the day is later in `to_pop`, the shorter way round."""
        east = self.longitudes.get(from_pop, 0.0) - self.longitudes.get(to_pop, 0.0)
        return round(((east + 180.0) % 360.0 - 180.0) / 360.0 * DAY_SLOTS)


def slot_of(unix_s: float) -> int:
    """Return the slot of a Unix time."""
    return int(unix_s // SLOT_S)


_state = msgspec.msgpack.Decoder(tuple[int, SlotDemand, bytes])

"""Forecasts of the demand of every city for every deployment, as rates that a planner can add up.

A series is forecast as work: uncached prompt tokens plus weighted output tokens. Its usual mix
turns work back into rates. A new series borrows its shape from the same deployment in the nearest
time zones, else from other deployments in its own city.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
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

REPLACED_PER_SLOT_MAX: Final = 1_000
"""How many series that are kept are dropped for larger new ones after one slot. To begin a series
takes up to 3 ms, and demand that moves all the time must not take longer to learn than a slot."""

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
        self._by_deployment: dict[DeploymentId, set[SeriesKey]] = {}
        self._by_pop: dict[PopId, set[SeriesKey]] = {}

    def __len__(self) -> int:
        """Return the number of series."""
        return len(self._known)

    def sorted_keys(self) -> list[SeriesKey]:
        """Return the keys of all series, sorted."""
        return sorted(self._known)

    def admit_new(self, demand: Mapping[SeriesKey, SlotDemand]) -> list[SeriesKey]:
        """Drop the smallest series for larger new ones; return the new ones, the largest first.

        `demand` is that of the slot that is learned next.
        """
        free = max(0, SERIES_MAX - len(self._known))
        new = nlargest(
            free + REPLACED_PER_SLOT_MAX,
            (key for key, slot in demand.items() if slot.work > 0 and key not in self._known),
            key=lambda key: (demand[key].work, key),
        )
        smallest = nsmallest(
            len(new[free:]), self._known, key=lambda key: (self._known[key].series.mean, key)
        )
        for key, dropped in zip(new[free:], smallest, strict=False):
            if self._known[dropped].series.mean >= demand[key].work:
                break
            self._drop(dropped)
        return new[: SERIES_MAX - len(self._known)]

    def learn(self, slot: int, key: SeriesKey, demand: SlotDemand) -> None:
        """Learn the demand of a slot, which may be zero; new series up to SERIES_MAX."""
        known = self._known.get(key)
        if known is None:
            if demand.work > 0 and len(self._known) < SERIES_MAX:
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
            self._drop(key)

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
        except ValueError:
            return False
        series = deserialize(data)
        if series is None or len(self._known) >= SERIES_MAX:
            return False
        self._keep(key, KnownSeries(series, mix, demand_slot))
        return True

    def _begin(self, slot: int, key: SeriesKey, demand: SlotDemand) -> None:
        series = Series(slot, demand.work, (QUANTILE,))
        borrow_shape(series, list(self._donors(key)))
        mix = SlotDemand(*(part / demand.work for part in demand))
        self._keep(key, KnownSeries(series, mix, slot))

    def _keep(self, key: SeriesKey, known: KnownSeries) -> None:
        self._known[key] = known
        self._by_deployment.setdefault(key[0], set()).add(key)
        self._by_pop.setdefault(key[1], set()).add(key)

    def _drop(self, key: SeriesKey) -> None:
        del self._known[key]
        deployment_id, pop = key
        self._by_deployment[deployment_id].discard(key)
        if not self._by_deployment[deployment_id]:
            del self._by_deployment[deployment_id]
        self._by_pop[pop].discard(key)
        if not self._by_pop[pop]:
            del self._by_pop[pop]

    def _donors(self, key: SeriesKey) -> Iterator[tuple[Series, int]]:
        """Yield series to borrow from, each with its time shift in slots.

        These series are of the same deployment in the nearest time zones, else of the same city. A
        series that was observed for less than a day has no shape to lend.
        """
        deployment_id, pop = key
        donors = [
            (abs(shift), other, shift)
            for other in self._with_shape(self._by_deployment.get(deployment_id, ()))
            if abs(shift := self._shift(other[1], pop)) <= DONOR_SHIFT_MAX
        ]
        if not donors:
            # Those that were observed for longest first.
            donors = [
                (-self._known[other].series.observed, other, 0)
                for other in self._with_shape(self._by_pop.get(pop, ()))
            ]
        for _, other, shift in nsmallest(DONORS_MAX, donors):
            yield self._known[other].series, shift

    def _with_shape(self, keys: Iterable[SeriesKey]) -> Iterator[SeriesKey]:
        return (key for key in keys if self._known[key].series.observed >= DAY_SLOTS)

    def _shift(self, from_pop: PopId, to_pop: PopId) -> int:
        """Return by how many slots the day is later in `to_pop`, the shorter way round."""
        east = self.longitudes.get(from_pop, 0.0) - self.longitudes.get(to_pop, 0.0)
        return round(((east + 180.0) % 360.0 - 180.0) / 360.0 * DAY_SLOTS)


def slot_of(unix_s: float) -> int:
    """Return the slot of a Unix time."""
    return int(unix_s // SLOT_S)


_state = msgspec.msgpack.Decoder(tuple[int, SlotDemand, bytes])

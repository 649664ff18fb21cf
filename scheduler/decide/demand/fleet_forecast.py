"""What every city will ask of every deployment: a forecast each, in rates a planner can add up.

A series is forecast as work (uncached prompt tokens, and output tokens at what they weigh); what
the work is made of follows its usual mix. A newcomer borrows its shape from the same deployment in
the nearest time zones, else from other deployments in its own city.
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
"""What capacity is planned for: demand stays under it nine times in ten."""

PLANNED_AHEAD: Final = tuple(range(len([slots for slots in HORIZONS if slots <= 6])))
"""The horizons planned for: those within the hour that a large model may take to start."""

LATER: Final = (len(HORIZONS) - 1,)
"""The horizon that weights are fetched for beforehand."""

LATER_S: Final = (HORIZONS[-1] - 1) * SLOT_S
"""How soon after the end of the last slot learned the slot foretold for later begins."""

OUTPUT_WEIGHT: Final = 8.0
"""What an output token weighs in prompt tokens: decoding reads the weights for every one."""

MIX_RATE: Final = 0.05
SERIES_MAX: Final = 20_000
"""Series remembered: about 7 KiB each. The smallest go first; they are planned by level alone."""

FORGET_SLOTS: Final = 14 * DAY_SLOTS
DONORS_MAX: Final = 3
DONOR_SHIFT_MAX: Final = DAY_SLOTS // 4
NEGLIGIBLE: Final = 1e-3

SeriesKey = tuple[DeploymentId, PopId]


class SlotDemand(NamedTuple):
    """What one slot asked, per second."""

    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    uncached_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0

    @property
    def work(self) -> float:
        """Prompt tokens and output tokens on one scale."""
        return self.uncached_tokens_per_s + OUTPUT_WEIGHT * self.output_tokens_per_s


class KnownSeries(msgspec.Struct):
    """One series, what a unit of its work is made of, and the last slot that asked anything."""

    series: Series
    mix: SlotDemand
    asked_at: int


class FleetForecast:
    """Every series learned so far. `longitudes` tell who is a neighbour in time zone."""

    def __init__(self, longitudes: Mapping[PopId, float]) -> None:
        """Know nothing yet."""
        self.longitudes = longitudes
        self._known: dict[SeriesKey, KnownSeries] = {}

    def __len__(self) -> int:
        """Return how many series are known."""
        return len(self._known)

    def known(self) -> list[SeriesKey]:
        """Return the series known, sorted."""
        return sorted(self._known)

    def learn(self, slot: int, key: SeriesKey, demand: SlotDemand) -> None:
        """Learn what a slot asked of a deployment in a city; zero is a demand like others."""
        known = self._known.get(key)
        if known is None:
            if demand.work > 0:
                self._begin(slot, key, demand)
            return
        observe(known.series, slot, demand.work)
        if demand.work > 0:
            known.asked_at = slot
            known.mix = SlotDemand(
                *(
                    old + MIX_RATE * (new / demand.work - old)
                    for old, new in zip(known.mix, demand, strict=True)
                )
            )
        elif slot - known.asked_at > FORGET_SLOTS:
            del self._known[key]

    def foretell(
        self, key: SeriesKey, horizons: Sequence[int] = PLANNED_AHEAD
    ) -> DemandRate | None:
        """Return the most that is foretold at some horizons; None where that is nothing."""
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

    def saved(self, key: SeriesKey) -> tuple[int, bytes]:
        """Return a series as the store keeps it, and the slot that it reaches."""
        known = self._known[key]
        state = (known.asked_at, known.mix, serialize(known.series))
        return known.series.slot, msgspec.msgpack.encode(state)

    def restore(self, key: SeriesKey, state: bytes) -> bool:
        """Take a series from the store; False where it is none of this release's."""
        try:
            asked_at, mix, data = _state.decode(state)
        except (msgspec.DecodeError, ValueError):
            return False
        series = deserialize(data)
        if series is None or len(self._known) >= SERIES_MAX:
            return False
        self._known[key] = KnownSeries(series, mix, asked_at)
        return True

    def _begin(self, slot: int, key: SeriesKey, demand: SlotDemand) -> None:
        if len(self._known) >= SERIES_MAX:
            smallest = min(self._known, key=lambda one: (self._known[one].series.mean, one))
            if self._known[smallest].series.mean >= demand.work:
                return
            del self._known[smallest]
        series = Series(slot, demand.work, (QUANTILE,))
        borrow_shape(series, list(self._donors(key)))
        mix = SlotDemand(*(part / demand.work for part in demand))
        self._known[key] = KnownSeries(series, mix, slot)

    def _donors(self, key: SeriesKey) -> Iterator[tuple[Series, int]]:
        """Yield the nearest in time zone of the same deployment, else others of the same city."""
        deployment_id, pop = key
        same = [
            (abs(shift), other, shift)
            for other in self._known
            if other[0] == deployment_id
            and abs(shift := self._shift(other[1], pop)) <= DONOR_SHIFT_MAX
            and self._known[other].series.observed >= DAY_SLOTS
        ]
        if not same:
            same = [(0, other, 0) for other in self._known if other[1] == pop]
            same.sort(key=lambda one: (-self._known[one[1]].series.observed, one[1]))
        else:
            same.sort()
        for _, other, shift in same[:DONORS_MAX]:
            yield self._known[other].series, shift

    def _shift(self, from_pop: PopId, to_pop: PopId) -> int:
        """Return by how many slots the sun comes later to `to_pop`, the shorter way round."""
        east = self.longitudes.get(from_pop, 0.0) - self.longitudes.get(to_pop, 0.0)
        return round(((east + 180.0) % 360.0 - 180.0) / 360.0 * DAY_SLOTS)


def slot_of(unix_s: float) -> int:
    """Return the slot that a time is in."""
    return int(unix_s // SLOT_S)


_state = msgspec.msgpack.Decoder(tuple[int, SlotDemand, bytes])

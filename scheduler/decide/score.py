"""What a set of seats is worth: demand-weighted time to first token, in ms x requests/s.

Each city's load goes to its nearest replicas with room, the busiest city first; what finds no room
is priced as a long wait. A replica is worth adding where the sum falls by more than it costs.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from isochrone.wire import geo
from isochrone.wire.ids import PopId
from isochrone.wire.routes import Pop
from scheduler.decide.cluster import PopDistance
from scheduler.decide.demand import HEADROOM, CityDemand

REPLICA_COST: Final = 20.0
"""What one more replica must save, in ms x requests/s: one request a second, 20 ms sooner."""

UNSERVED_MS: Final = 5_000.0
"""The wait priced for load that finds no room: about what a queue under overload comes to."""

Distances = Mapping[tuple[PopId, PopId], float]


def distances(pops: Sequence[Pop], measured: Sequence[PopDistance]) -> Distances:
    """Return the round trip in ms between every two PoPs: measured, else by great circle."""
    table = {
        (one.pop, other.pop): geo.round_trip_ms(
            one.latitude, one.longitude, other.latitude, other.longitude
        )
        for one in pops
        for other in pops
    }
    table.update({(row.from_pop, row.to_pop): row.rtt_ms for row in measured})
    return table


def cost(cities: Sequence[CityDemand], seats: Sequence[PopId], far: Distances) -> float:
    """Return the demand-weighted TTFT of serving `cities` from one replica at each of `seats`."""
    room: dict[PopId, float] = {}
    for pop in seats:
        room[pop] = room.get(pop, 0.0) + HEADROOM
    total = 0.0
    for city in cities:
        total += _serve(city, room, far)
    return total


def gain(
    cities: Sequence[CityDemand], seats: Sequence[PopId], added: PopId, far: Distances
) -> float:
    """Return what one more replica in `added` would save."""
    return cost(cities, seats, far) - cost(cities, [*seats, added], far)


def loss(
    cities: Sequence[CityDemand], seats: Sequence[PopId], removed: PopId, far: Distances
) -> float:
    """Return what one replica less in `removed` would cost."""
    without = list(seats)
    without.remove(removed)
    return cost(cities, without, far) - cost(cities, seats, far)


def _serve(city: CityDemand, room: dict[PopId, float], far: Distances) -> float:
    """Take room for one city, nearest first, and return its weighted TTFT."""
    if not room:
        return city.requests_per_s * UNSERVED_MS
    nearest = sorted(room, key=lambda pop: (far.get((city.pop, pop), UNSERVED_MS), pop))
    if city.load <= 0:
        return city.requests_per_s * far.get((city.pop, nearest[0]), UNSERVED_MS)
    left = city.load
    weighted = 0.0
    for pop in nearest:
        taken = min(left, room[pop])
        if taken <= 0:
            continue
        room[pop] -= taken
        left -= taken
        weighted += taken * far.get((city.pop, pop), UNSERVED_MS)
        if left <= 1e-12:
            break
    weighted += left * UNSERVED_MS
    return city.requests_per_s * weighted / city.load

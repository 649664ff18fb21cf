"""The demo's three cities: their location, loopback addresses and round trips.

Coordinates: cloudflare-colo-list (MIT). Round trips: medians between the Azure regions of these
cities (West Europe, East US, Southeast Asia) from Microsoft's network latency page (CC-BY-4.0).
"""

from typing import Final, NamedTuple

from isochrone.wire.ids import PopId


class City(NamedTuple):
    """One PoP of the demo, with a /24 of the loopback range, which needs no set-up on Linux."""

    pop: PopId
    name: str
    country: str
    latitude: float
    longitude: float
    prefix: str

    @property
    def router_host(self) -> str:
        """The address of the city's router, and the source of its connections."""
        return f"{self.prefix}.1"

    @property
    def node_host(self) -> str:
        """The address of the city's node behind the emulated WAN, which routers use."""
        return f"{self.prefix}.2"

    @property
    def listen_host(self) -> str:
        """The address on which the node listens."""
        return f"{self.prefix}.3"


CITIES: Final = (
    City(PopId("ams"), "Amsterdam", "NL", 52.308601, 4.76389, "127.20.0"),
    City(PopId("iad"), "Ashburn", "US", 38.9445, -77.455803, "127.21.0"),
    City(PopId("sin"), "Singapore", "SG", 1.35019, 103.994003, "127.22.0"),
)

ROUND_TRIPS_MS: Final[dict[frozenset[str], float]] = {
    frozenset({"ams", "iad"}): 85.0,
    frozenset({"ams", "sin"}): 161.0,
    frozenset({"iad", "sin"}): 224.0,
}

LOCAL_ROUND_TRIP_MS: Final = 0.6


def round_trip_ms(from_pop: str, to_pop: str) -> float:
    """Return the emulated round trip between two PoPs of the demo."""
    return ROUND_TRIPS_MS.get(frozenset({from_pop, to_pop}), LOCAL_ROUND_TRIP_MS)


def city_of_address(host: str) -> City | None:
    """Return the city whose address range contains `host`, or None."""
    return next((city for city in CITIES if host.startswith(f"{city.prefix}.")), None)

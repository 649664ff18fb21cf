"""The demo's three cities: where they are, which loopback addresses stand for them, how far apart.

Coordinates: cloudflare-colo-list (MIT). Round trips: medians between the Azure regions of these
cities (West Europe, East US, Southeast Asia) from Microsoft's network latency page (CC-BY-4.0).
"""

from typing import Final, NamedTuple

from isochrone.wire.ids import PopId


class City(NamedTuple):
    """One PoP of the demo. Each is a /24 of the loopback range, which needs no set-up on Linux."""

    pop: PopId
    name: str
    country: str
    latitude: float
    longitude: float
    prefix: str

    @property
    def router_host(self) -> str:
        """Where the city's users ask, and whence its router dials."""
        return f"{self.prefix}.1"

    @property
    def node_host(self) -> str:
        """Where the city's node is reached from other cities: the far end of the emulated WAN."""
        return f"{self.prefix}.2"

    @property
    def door_host(self) -> str:
        """Where the node really listens, behind the emulated WAN."""
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


def round_trip_ms(one: str, other: str) -> float:
    """Return the round trip between two cities of the demo."""
    return ROUND_TRIPS_MS.get(frozenset({one, other}), LOCAL_ROUND_TRIP_MS)


def city_of_address(host: str) -> City | None:
    """Return the city whose address range holds `host`, if any."""
    return next((city for city in CITIES if host.startswith(f"{city.prefix}.")), None)

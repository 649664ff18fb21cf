"""A table that says no more than it must: rates that drift are not news.

Measured rates move with every report. Routers predict with them, and a tenth more or less changes
no choice worth a new table for every router of the planet.
"""

import msgspec

from isochrone.wire.ids import Generation
from isochrone.wire.routes import Route, RouteTable

RATE_STEP = 0.1


def steady(told: RouteTable | None, new: RouteTable) -> RouteTable:
    """Return `new` under the generation of `told`, each route with the rates told of it before
    unless one moved by more than a tenth of it. Where nothing is news, the answer equals `told`."""
    if told is None or told.epoch != new.epoch:
        return new
    before = {route.replica_id: route for route in told.routes}
    routes = tuple(_as_told(before.get(route.replica_id), route) for route in new.routes)
    return msgspec.structs.replace(
        new, generation=Generation(told.generation), epoch=told.epoch, routes=routes
    )


def _as_told(told: Route | None, route: Route) -> Route:
    if told is None or told == route:
        return told or route
    if _moved(told.prefill_tokens_per_s, route.prefill_tokens_per_s) or _moved(
        told.decode_tokens_per_s, route.decode_tokens_per_s
    ):
        return route
    kept = msgspec.structs.replace(
        route,
        prefill_tokens_per_s=told.prefill_tokens_per_s,
        decode_tokens_per_s=told.decode_tokens_per_s,
    )
    return told if kept == told else kept


def _moved(told: float, now: float) -> bool:
    return abs(now - told) > RATE_STEP * told

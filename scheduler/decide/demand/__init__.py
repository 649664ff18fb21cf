"""Demand of cities for deployments: rows from routers, current rates, and forecasts.

`intake` checks what routers report, `silent_routers` keeps the last demand of PoPs if their routers
are cut off, `demand_columns` reads rows as columns, `demand_rates` turns them into arrays of load,
and `fleet_forecast` forecasts every (deployment, city) with `series_forecast`.
"""

from scheduler.decide.demand.demand_rates import with_forecast
from scheduler.decide.demand.fleet_forecast import (
    FORGET_SLOTS,
    LATER,
    LATER_S,
    FleetForecast,
    SeriesKey,
    SlotDemand,
    slot_of,
)
from scheduler.decide.demand.intake import (
    COUNTS,
    AcceptedDemand,
    AcceptedUsage,
    accept_demand,
    accept_round_trips,
    accept_trials,
    accept_usage,
)
from scheduler.decide.demand.series_forecast import SLOT_S
from scheduler.decide.demand.silent_routers import (
    RouterSilence,
    held_silences,
    raise_to_last_known,
)

__all__ = (
    "COUNTS",
    "FORGET_SLOTS",
    "LATER",
    "LATER_S",
    "SLOT_S",
    "AcceptedDemand",
    "AcceptedUsage",
    "FleetForecast",
    "RouterSilence",
    "SeriesKey",
    "SlotDemand",
    "accept_demand",
    "accept_round_trips",
    "accept_trials",
    "accept_usage",
    "held_silences",
    "raise_to_last_known",
    "slot_of",
    "with_forecast",
)

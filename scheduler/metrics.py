"""Every metric of the scheduler: name, unit, labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

ACTING = Gauge("isochrone_scheduler_acting", "1 while this scheduler acts.", registry=REGISTRY)
EPOCH = Gauge("isochrone_scheduler_epoch", "Epoch of the lease held last.", registry=REGISTRY)
GENERATION = Gauge(
    "isochrone_scheduler_generation", "Generation of the last picture read.", registry=REGISTRY
)
ROUTE_GENERATION = Gauge(
    "isochrone_scheduler_route_generation", "Generation of the route table.", registry=REGISTRY
)
PEERS = Gauge("isochrone_scheduler_peers", "Peers connected, by role.", ["role"], registry=REGISTRY)
FROZEN = Gauge(
    "isochrone_scheduler_frozen", "1 while silence freezes placement.", registry=REGISTRY
)
MOVES = Counter(
    "isochrone_scheduler_moves", "Moves committed, by kind.", ["kind"], registry=REGISTRY
)
UNMET = Gauge("isochrone_scheduler_unmet", "Wishes that no node can meet now.", registry=REGISTRY)
REPORTS = Counter(
    "isochrone_scheduler_reports", "Reports taken, by what they were.", ["kind"], registry=REGISTRY
)
PULSES = Counter("isochrone_scheduler_pulses", "Pulses written.", registry=REGISTRY)
REFUSED = Counter(
    "isochrone_scheduler_refused_peers", "Peers turned away, by code.", ["code"], registry=REGISTRY
)
TURNS = Gauge(
    "isochrone_scheduler_duty_turns", "Turns of each duty, by outcome.", ["duty", "outcome"],
    registry=REGISTRY,
)  # fmt: skip
DUTY_SECONDS = Gauge(
    "isochrone_scheduler_duty_seconds", "Time in turns of each duty: all of it, and the last turn.",
    ["duty", "of"], registry=REGISTRY,
)  # fmt: skip
LAG = Histogram(
    "isochrone_scheduler_lag_seconds", "How late the event loop turns.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0), registry=REGISTRY,
)  # fmt: skip
HELD = Counter(
    "isochrone_scheduler_held_seconds", "Time the event loop was held up, by what it did then.",
    ["by"], registry=REGISTRY,
)  # fmt: skip
DEMAND_BATCHES = Counter(
    "isochrone_scheduler_demand_batches", "Demand batches heard, by what they were.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip
REFUSED_ROWS = Counter(
    "isochrone_scheduler_refused_rows", "Rows of routers refused for good, by kind.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip

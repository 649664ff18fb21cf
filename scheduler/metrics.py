"""Every metric of the scheduler: name, unit, labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge

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
DEMAND_BATCHES = Counter(
    "isochrone_scheduler_demand_batches", "Demand batches heard, by what they were.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip
REFUSED_ROWS = Counter(
    "isochrone_scheduler_refused_rows", "Rows of routers refused for good, by kind.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip

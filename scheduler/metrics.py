"""Every metric of the scheduler: name, unit, labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

ACTING = Gauge("isochrone_scheduler_acting", "1 while this scheduler acts.", registry=REGISTRY)
EPOCH = Gauge(
    "isochrone_scheduler_epoch", "Epoch of the lease this process held last.", registry=REGISTRY
)
GENERATION = Gauge(
    "isochrone_scheduler_generation", "Cluster generation of the last plan.", registry=REGISTRY
)
ROUTE_GENERATION = Gauge(
    "isochrone_scheduler_route_generation", "Generation of the route table.", registry=REGISTRY
)
PEERS = Gauge("isochrone_scheduler_peers", "Connected peers, by role.", ["role"], registry=REGISTRY)
PEERS_WAITING = Gauge(
    "isochrone_scheduler_peers_waiting",
    "Peers that connected and wait for their turn to register.",
    registry=REGISTRY,
)
WRONG_CLOCKS = Gauge(
    "isochrone_scheduler_wrong_clocks",
    "Connected peers whose clocks differ from this scheduler's by more than a minute, by role.",
    ["role"], registry=REGISTRY,
)  # fmt: skip
TLS_CERTIFICATE_EXPIRES_AT_S = Gauge(
    "isochrone_scheduler_tls_certificate_expires_at_seconds",
    "Unix time at which `tls_certificate` expires; 0 without one.",
    registry=REGISTRY,
)
FROZEN = Gauge(
    "isochrone_scheduler_frozen",
    "1 while placement is frozen because many nodes are silent.",
    registry=REGISTRY,
)
MOVES = Counter(
    "isochrone_scheduler_moves", "Replicas started and ended by plans, by kind.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip
PLAN_AGE_S = Gauge(
    "isochrone_scheduler_plan_age_seconds",
    "Time since the acting scheduler's last plan, or since its term began; 0 on a standby.",
    registry=REGISTRY,
)
UNMET = Gauge(
    "isochrone_scheduler_unmet",
    "Replicas or PoPs that deployments require and no node can provide.",
    registry=REGISTRY,
)
REPORTS = Counter(
    "isochrone_scheduler_reports", "Reports received, by outcome.", ["kind"], registry=REGISTRY
)
PULSES = Counter("isochrone_scheduler_pulses", "Pulses stored.", registry=REGISTRY)
REFUSED = Counter(
    "isochrone_scheduler_refused_peers", "Peers refused, by code.", ["code"], registry=REGISTRY
)
JOB_TURNS = Gauge(
    "isochrone_scheduler_job_turns", "Turns of each periodic job, by outcome.", ["loop", "outcome"],
    registry=REGISTRY,
)  # fmt: skip
JOB_SECONDS = Gauge(
    "isochrone_scheduler_job_seconds",
    "Time spent in each periodic job: in all turns, and in the last turn.",
    ["loop", "of"], registry=REGISTRY,
)  # fmt: skip
LAG = Histogram(
    "isochrone_scheduler_lag_seconds", "How late the event loop runs a timer.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0), registry=REGISTRY,
)  # fmt: skip
STALL_SECONDS = Counter(
    "isochrone_scheduler_stall_seconds", "Time the event loop was blocked, by the task it ran.",
    ["task"], registry=REGISTRY,
)  # fmt: skip
DEMAND_BATCHES = Counter(
    "isochrone_scheduler_demand_batches", "Demand batches received, by outcome.", ["kind"],
    registry=REGISTRY,
)  # fmt: skip
FRAMES_REFUSED = Counter(
    "isochrone_scheduler_frames_refused", "Messages that are too large for a peer, by kind.",
    ["kind"], registry=REGISTRY,
)  # fmt: skip
TABLES_SENT = Counter(
    "isochrone_scheduler_tables_sent",
    "Route tables sent to routers: with all keys, or with those that the router was missing.",
    ["keys"], registry=REGISTRY,
)  # fmt: skip
HISTORY_BEHIND_S = Gauge(
    "isochrone_scheduler_history_behind_seconds",
    "How far the time by which history is deleted is behind the wall clocks.", registry=REGISTRY,
)  # fmt: skip
UNREADABLE_ROWS = Gauge(
    "isochrone_scheduler_unreadable_rows",
    "Rows that the last reading left out or took from memory, because they cannot be read.",
    ["reading"],
    registry=REGISTRY,
)
REFUSED_ROWS = Counter(
    "isochrone_scheduler_refused_rows", "Rows of routers that can never be stored, by kind.",
    ["kind"], registry=REGISTRY,
)  # fmt: skip

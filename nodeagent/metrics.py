"""The metrics of the node agent: name, unit, labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

REPLICAS = Gauge("isochrone_node_replicas", "Replicas, by state.", ["state"], registry=REGISTRY)
GENERATION = Gauge(
    "isochrone_node_generation", "Generation of the current assignment.", registry=REGISTRY
)
CONNECTED = Gauge(
    "isochrone_node_connected", "1 while a scheduler is connected.", registry=REGISTRY
)
ASSIGNMENTS_REFUSED = Counter(
    "isochrone_node_assignments_refused", "Assignments refused.", registry=REGISTRY
)
REQUESTS = Counter(
    "isochrone_node_requests", "Requests received, by outcome.", ["outcome"], registry=REGISTRY
)
IN_FLIGHT = Gauge(
    "isochrone_node_in_flight_tokens", "Tokens in flight.", ["replica", "phase"], registry=REGISTRY
)
PEER_FETCHES = Counter(
    "isochrone_node_peer_fetches", "File requests to other nodes, by outcome.", ["outcome"],
    registry=REGISTRY,
)  # fmt: skip
UPLOADED = Counter(
    "isochrone_node_artifact_uploaded_bytes", "Bytes of artifacts sent to other nodes.",
    registry=REGISTRY,
)  # fmt: skip
RESTARTS = Gauge(
    "isochrone_node_replica_restarts", "Failures of a replica's engine.", ["replica"],
    registry=REGISTRY,
)  # fmt: skip
ASLEEP = Gauge("isochrone_node_replicas_asleep", "Replicas that sleep.", registry=REGISTRY)
SWITCHES = Histogram(
    "isochrone_node_sleep_switch_seconds", "Time to put a replica to sleep or to wake it.",
    ["kind"], buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30), registry=REGISTRY,
)  # fmt: skip

"""Every metric of the node agent: name, unit, labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge

REGISTRY = CollectorRegistry()

REPLICAS = Gauge("isochrone_node_replicas", "Replicas, by state.", ["state"], registry=REGISTRY)
GENERATION = Gauge(
    "isochrone_node_generation", "Generation of the assignment held.", registry=REGISTRY
)
CONNECTED = Gauge(
    "isochrone_node_connected", "1 while a scheduler is connected.", registry=REGISTRY
)
ASSIGNMENTS_REFUSED = Counter(
    "isochrone_node_assignments_refused", "Assignments not taken.", registry=REGISTRY
)
REQUESTS = Counter(
    "isochrone_node_requests", "Requests at the door, by outcome.", ["outcome"], registry=REGISTRY
)
IN_FLIGHT = Gauge(
    "isochrone_node_in_flight_tokens", "Tokens in flight.", ["replica", "phase"], registry=REGISTRY
)
PEER_FETCHES = Counter(
    "isochrone_node_peer_fetches", "Files asked of peers, by outcome.", ["outcome"],
    registry=REGISTRY,
)  # fmt: skip
UPLOADED = Counter(
    "isochrone_node_artifact_uploaded_bytes", "Bytes of artifacts sent to peers.", registry=REGISTRY
)
RESTARTS = Gauge(
    "isochrone_node_replica_restarts", "Times a replica broke.", ["replica"], registry=REGISTRY
)

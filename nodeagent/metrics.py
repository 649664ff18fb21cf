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
TTFT_OBJECTIVES = Counter(
    "isochrone_node_ttft_objectives",
    "First tokens of requests that say by when they need it (x-isochrone-ttft-ms), by outcome.",
    ["outcome"],
    registry=REGISTRY,
)
PREEMPTED_ITEMS = Counter(
    "isochrone_node_preempted_items",
    "Items of batches that ended for a client's request, by whether the engine had begun them.",
    ["phase"],
    registry=REGISTRY,
)
PREEMPTED_TOKENS = Counter(
    "isochrone_node_preempted_tokens",
    "Tokens of preempted items that the engine read or generated in vain, estimated by its speed.",
    ["phase"],
    registry=REGISTRY,
)
IN_FLIGHT = Gauge(
    "isochrone_node_in_flight_tokens", "Tokens in flight.", ["replica", "phase"], registry=REGISTRY
)
PEER_FETCHES = Counter(
    "isochrone_node_peer_fetches", "File requests to other nodes, by outcome.", ["outcome"],
    registry=REGISTRY,
)  # fmt: skip
ADAPTER_LOADS = Counter(
    "isochrone_node_adapter_loads", "Adapters that were to be loaded, by outcome.", ["outcome"],
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
LEG_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
PREFILL_LEGS = Counter(
    "isochrone_node_prefill_legs",
    "Requests that a prefill replica could have read, by where and why they were read.",
    ["deployment", "outcome"],
    registry=REGISTRY,
)
PREFILL_ATTEMPTS_FAILED = Counter(
    "isochrone_node_prefill_attempts_failed", "Prefill legs that broke or were refused.",
    registry=REGISTRY,
)  # fmt: skip
PREFILL_LEG_SECONDS = Histogram(
    "isochrone_node_prefill_leg_seconds", "From the start of a prefill leg to its last KV block.",
    buckets=LEG_BUCKETS_S, registry=REGISTRY,
)  # fmt: skip
DECODE_WAIT_SECONDS = Histogram(
    "isochrone_node_decode_wait_seconds",
    "From a prompt's last KV block to its first token, of streams.",
    buckets=LEG_BUCKETS_S, registry=REGISTRY,
)  # fmt: skip
KV_TRANSFER_BYTES = Counter(
    "isochrone_node_kv_transfer_bytes",
    "Bytes of KV received from prefill replicas.",
    registry=REGISTRY,
)
KV_TRANSFER_SECONDS = Histogram(
    "isochrone_node_kv_transfer_seconds",
    "From the end of a prompt's computation by a prefill replica until that has sent its last KV"
    " block. The blocks before it move while the prompt is computed.",
    buckets=LEG_BUCKETS_S,
    registry=REGISTRY,
)
KV_OTHER_FORMAT = Counter(
    "isochrone_node_kv_other_format",
    "Times that a replica's KV was refused before any was sent, because its model, engine version"
    " or KV format is another; by what the KV was for.",
    ["purpose"],
    registry=REGISTRY,
)
KV_FETCHES = Counter(
    "isochrone_node_kv_fetches",
    "Prompts whose prefix another replica of the PoP could have, by what came of it.",
    ["outcome"],
    registry=REGISTRY,
)
KV_FETCH_SECONDS = Histogram(
    "isochrone_node_kv_fetch_seconds", "Time to fetch a prefix from another replica.",
    buckets=LEG_BUCKETS_S, registry=REGISTRY,
)  # fmt: skip
KV_FETCH_BYTES = Counter(
    "isochrone_node_kv_fetch_bytes", "Bytes of KV fetched from other replicas.", registry=REGISTRY
)
KV_WINDOW_TRANSFERS = Counter(
    "isochrone_node_kv_window_transfers",
    "Transfers of KV blocks with another node through memory that the agent shares with its engine,"
    " by direction (sent, received).",
    ["direction"],
    registry=REGISTRY,
)
KV_COPIES = Counter(
    "isochrone_node_kv_copies", "Prefixes that a replica or the store should keep, by outcome.",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
KV_SHARES_REFUSED = Counter(
    "isochrone_node_kv_shares_refused", "KV not sent to or kept for other nodes, by spent limit.",
    ["setting"], registry=REGISTRY,
)  # fmt: skip
KV_FOUND_TOKENS = Counter(
    "isochrone_node_kv_found_tokens", "Prompt tokens that were cached, by where they were found.",
    ["place"], registry=REGISTRY,
)  # fmt: skip
ASLEEP = Gauge("isochrone_node_replicas_asleep", "Replicas that sleep.", registry=REGISTRY)
SWITCHES = Histogram(
    "isochrone_node_sleep_switch_seconds", "Time to put a replica to sleep or to wake it.",
    ["kind"], buckets=(0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30), registry=REGISTRY,
)  # fmt: skip

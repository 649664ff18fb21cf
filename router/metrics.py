"""Every metric of the router, defined once."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
ERROR_BUCKETS_S = (-5.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0)


class Metrics:
    """One registry per process, made by app.py."""

    def __init__(self) -> None:
        """Define them all."""
        self.registry = CollectorRegistry()
        prefix = "isochrone_router_"
        self.requests = Counter(
            f"{prefix}requests",
            "Requests by how they ended.",
            ["deployment", "outcome"],
            registry=self.registry,
        )
        self.errors = Counter(
            f"{prefix}errors", "Errors answered, by code.", ["code"], registry=self.registry
        )
        self.ttft = Histogram(
            f"{prefix}ttft_seconds",
            "From a request's arrival to its first token on the way to the client.",
            ["deployment"],
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.ttft_error = Histogram(
            f"{prefix}ttft_prediction_error_seconds",
            "Measured less predicted time to first token, from the choice on.",
            ["deployment"],
            buckets=ERROR_BUCKETS_S,
            registry=self.registry,
        )
        self.tokens = Counter(
            f"{prefix}tokens", "Tokens by kind.", ["deployment", "kind"], registry=self.registry
        )
        self.retries = Counter(
            f"{prefix}retries",
            "Attempts that came to nothing, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.ejections = Counter(
            f"{prefix}ejections", "Replicas left alone.", registry=self.registry
        )
        self.in_flight = Gauge(
            f"{prefix}in_flight_tokens", "Tokens in flight.", ["phase"], registry=self.registry
        )
        self.open_requests = Gauge(
            f"{prefix}open_requests", "Requests being answered.", registry=self.registry
        )
        self.open_streams = Gauge(
            f"{prefix}open_streams", "Streams being relayed.", registry=self.registry
        )
        self.waiting = Gauge(
            f"{prefix}waiting_requests", "Requests waiting for room.", registry=self.registry
        )
        self.table_generation = Gauge(
            f"{prefix}table_generation", "Table served by.", registry=self.registry
        )
        self.table_age = Gauge(
            f"{prefix}table_age_seconds",
            "Since the scheduler last confirmed the table.",
            registry=self.registry,
        )
        self.table_routes = Gauge(
            f"{prefix}table_routes", "Routes in the table.", registry=self.registry
        )
        self.table_refused = Counter(
            f"{prefix}tables_refused", "Tables not believed.", registry=self.registry
        )
        self.connected = Gauge(
            f"{prefix}scheduler_connected", "1 while conversing.", registry=self.registry
        )
        self.usage_spooled = Gauge(
            f"{prefix}usage_spool_bytes",
            "Usage on disk, not yet acknowledged.",
            registry=self.registry,
        )
        self.usage_dropped = Counter(
            f"{prefix}usage_rows_dropped",
            "Usage lost because the spool was full.",
            registry=self.registry,
        )
        self.probe_failures = Counter(
            f"{prefix}probe_failures", "Pings not answered.", registry=self.registry
        )

"""Every metric of the router."""

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from router.recording.request_counts import OUTCOMES, TOKEN_KINDS, DeploymentCounts

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
WAIT_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ERROR_BUCKETS_S = (-5.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0)

PREFIX: Final = "isochrone_router_"


class Metrics(Collector):
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        """Define all metrics."""
        self.registry = CollectorRegistry()
        self.deployments = _CountsByDeployment(self)
        # Registered first, so that each page begins by flushing the plain counts.
        self.registry.register(self)
        self._define_requests()
        self._define_load()
        self._define_state()

    def collect(self) -> Iterable[Metric]:
        """Flush the plain counts into the other metrics; there are no metrics here."""
        self.flush_counts()
        return ()

    def flush_counts(self) -> None:
        """Add what was counted in plain numbers to the metrics."""
        for counts in self.deployments.values():
            counts.flush()

    def _define_requests(self) -> None:
        count = self._counter
        self.requests = count("requests", "Requests by outcome.", "deployment", "outcome")
        self.stored_responses = count(
            "stored_responses", "Responses that are stored, by how they ended.", "outcome"
        )
        self.errors = count("errors", "Error answers, by code.", "code")
        self.tokens = count("tokens", "Tokens by kind.", "deployment", "kind")
        self.decode_seconds = count(
            "decode_seconds", "From the first token of each stream to its end.", "deployment"
        )
        self.decode_tokens = count(
            "decode_tokens",
            "Tokens of streams after the first. The mean inter-token latency (ITL) is"
            " decode_seconds / decode_tokens.",
            "deployment",
        )
        self.ttft = self._histogram(
            "ttft_seconds",
            "From the arrival of a request to its first token.",
            TTFT_BUCKETS_S,
            "deployment",
        )
        self.ttft_error = self._histogram(
            "ttft_prediction_error_seconds",
            "Measured minus predicted time to first token, from the ranking on.",
            ERROR_BUCKETS_S,
            "deployment",
        )
        self.retries = count("retries", "Failed or refused attempts, by cause.", "cause")
        self.handoffs = count(
            "handoffs", "Requests that a node handed to a peer replica or took back.", "change"
        )
        self.retries_denied = count(
            "retries_denied", "Retries not made because the retry budget was spent."
        )
        self.image_fetches = count(
            "image_fetches",
            "Images that clients link to: fetched, or why not. Those of a request end together:"
            " stopped.",
            "outcome",
        )
        self.continuations = count(
            "continuations",
            "Streams whose replica failed: continued by another one, or impossible to continue.",
            "how",
        )
        self.ejections = count(
            "ejections",
            "Replicas ejected, by cause: consecutive, ratio, half_open or node_lost.",
            "cause",
        )

    def _define_load(self) -> None:
        gauge = self._gauge
        self.ejected = gauge("ejected_replicas", "Unhealthy replicas.")
        self.panics = gauge(
            "panicking_deployments", "Deployments with more than half of their replicas unhealthy."
        )
        self.in_flight = gauge("in_flight_tokens", "Tokens in flight.", "phase")
        self.open_requests = gauge("open_requests", "Requests in flight.")
        self.open_streams = gauge("open_streams", "Streams in flight.")
        self.queue_wait = self._histogram(
            "queue_wait_seconds",
            "Wait of the requests that got capacity in the end.",
            WAIT_BUCKETS_S,
        )
        self.refusals = self._counter(
            "refusals",
            "Requests refused by this router, by cause: a limit of the key, lack of capacity,"
            " no_replica, or suspended: engines failed while they processed it.",
            "cause",
        )
        self.suspicions_received = self._counter(
            "suspicions_received",
            "Engines that other routers or processes lost while they processed a request.",
        )
        self.waiting = gauge("waiting_requests", "Requests waiting for capacity.")
        self.waiting_bytes = gauge(
            "waiting_bytes", "Bytes of the bodies of requests waiting for capacity."
        )

    def _define_state(self) -> None:
        count, highest = self._counter, self._highest
        self.build_info = highest(
            "build_info",
            "Always 1; the labels are the Python version and whether the request path is compiled.",
            "compiled",
            "python",
        )
        self.tls_certificate_expires_at = highest(
            "tls_certificate_expires_at_seconds",
            "Unix time at which `tls_certificate` expires; 0 without one.",
        )
        self.table_generation = highest("table_generation", "Generation of the route table in use.")
        self.table_age = highest(
            "table_age_seconds", "Time since the scheduler last confirmed the route table."
        )
        self.table_routes = highest("table_routes", "Routes in the route table.")
        self.connected = highest("scheduler_connected", "1 while connected to a scheduler.")
        self.table_refused = count("tables_refused", "Route tables refused.")
        self.messages_refused = count(
            "messages_refused", "Reports not sent because they are larger than a scheduler reads."
        )
        self.usage_spooled = self._gauge(
            "usage_spool_bytes", "Usage on disk that is not acknowledged yet."
        )
        self.demand_dropped = count(
            "demand_rows_dropped", "Rows of demand that no scheduler took in time."
        )
        self.rows_refused = count(
            "rows_refused", "Rows of demand and usage that the scheduler refused for good."
        )
        self.usage_dropped = count(
            "usage_rows_dropped", "Rows of usage lost because the spool was full."
        )
        self.pop_loads = count(
            "pop_loads", "Loads of nodes that another node of their PoP answered for."
        )
        self.pop_loads_failures = count(
            "pop_loads_failures", "Nodes that did not answer for their PoP; another was asked."
        )
        self.probe_failures = count("probe_failures", "Pings without an answer.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """Define a gauge that is summed over the processes of a router."""
        return Gauge(
            PREFIX + name, text, labels, registry=self.registry, multiprocess_mode="livesum"
        )

    def _highest(self, name: str, text: str, *labels: str) -> Gauge:
        """Define a gauge of which the highest value over the processes of a router counts."""
        return Gauge(
            PREFIX + name, text, labels, registry=self.registry, multiprocess_mode="livemax"
        )


class _CountsByDeployment(dict[str, DeploymentCounts]):
    """The counts of each deployment by its name, created when first used."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __missing__(self, deployment: str) -> DeploymentCounts:
        metrics = self._metrics
        counts = self[deployment] = DeploymentCounts(
            ttft=metrics.ttft.labels(deployment),
            ttft_error=metrics.ttft_error.labels(deployment),
            requests={word: metrics.requests.labels(deployment, word) for word in OUTCOMES},
            tokens=[metrics.tokens.labels(deployment, kind) for kind in TOKEN_KINDS],
            decode_seconds=metrics.decode_seconds.labels(deployment),
            decode_tokens=metrics.decode_tokens.labels(deployment),
        )
        return counts

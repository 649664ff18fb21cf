"""Every metric of the router, defined once."""

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from router.request_counts import OUTCOMES, TOKEN_KINDS, DeploymentCounts

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
WAIT_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ERROR_BUCKETS_S = (-5.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0)


PREFIX: Final = "isochrone_router_"


class Metrics(Collector):
    """One registry per process, made by app.py."""

    def __init__(self) -> None:
        """Define them all."""
        self.registry = CollectorRegistry()
        self.deployments = _CountsByDeployment(self)
        # First of all, so that who reads them has the counts of this moment.
        self.registry.register(self)
        self._define_requests()
        self._define_load()
        self._define_state()

    def collect(self) -> Iterable[Metric]:
        """Bring the metrics up to date; there are none besides."""
        self.flush_counts()
        return ()

    def flush_counts(self) -> None:
        """Bring up to date what is counted apart."""
        for counted in self.deployments.values():
            counted.flush()

    def _define_requests(self) -> None:
        count = self._counter
        self.requests = count("requests", "Requests by how they ended.", "deployment", "outcome")
        self.errors = count("errors", "Errors answered, by code.", "code")
        self.tokens = count("tokens", "Tokens by kind.", "deployment", "kind")
        self.ttft = self._histogram(
            "ttft_seconds",
            "From a request's arrival to its first token on the way to the client.",
            TTFT_BUCKETS_S,
            "deployment",
        )
        self.ttft_error = self._histogram(
            "ttft_prediction_error_seconds",
            "Measured less predicted time to first token, from the choice on.",
            ERROR_BUCKETS_S,
            "deployment",
        )
        self.retries = count("retries", "Attempts that came to nothing, by cause.", "cause")
        self.retries_denied = count(
            "retries_denied", "Retries not made because the budget was spent."
        )
        self.continuations = count(
            "continuations",
            "Streams whose replica died under them: continued by another, or impossible to.",
            "how",
        )
        self.ejections = count(
            "ejections",
            "Replicas ejected, by cause: failures in a row, more than peers, a failed trial, gone.",
            "cause",
        )

    def _define_load(self) -> None:
        gauge = self._gauge
        self.ejected = gauge("ejected_replicas", "Replicas not well now.")
        self.panics = gauge(
            "panicking_deployments", "Deployments of which more than half look ill."
        )
        self.in_flight = gauge("in_flight_tokens", "Tokens in flight.", "phase")
        self.open_requests = gauge("open_requests", "Requests being answered.")
        self.open_streams = gauge("open_streams", "Streams being relayed.")
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "How long those waited for room that got it.", WAIT_BUCKETS_S
        )
        self.refusals = self._counter(
            "refusals",
            "Requests turned away by this router, by cause: a limit of the key, or want of room.",
            "cause",
        )
        self.waiting = gauge("waiting_requests", "Requests waiting for room.")
        self.waiting_bytes = gauge(
            "waiting_bytes", "Bytes of the bodies of requests waiting for room."
        )

    def _define_state(self) -> None:
        count, highest = self._counter, self._highest
        self.build_info = highest(
            "build_info",
            "1, by what this router runs on, and whether its hot path is compiled.",
            "compiled",
            "python",
        )
        self.table_generation = highest("table_generation", "Table served by.")
        self.table_age = highest(
            "table_age_seconds", "Since the scheduler last confirmed the table."
        )
        self.table_routes = highest("table_routes", "Routes in the table.")
        self.connected = highest("scheduler_connected", "1 while conversing.")
        self.table_refused = count("tables_refused", "Tables not believed.")
        self.usage_spooled = self._gauge(
            "usage_spool_bytes", "Usage on disk, not yet acknowledged."
        )
        self.demand_dropped = count("demand_rows_dropped", "Demand that no scheduler took in time.")
        self.rows_refused = count(
            "rows_refused", "Rows of demand and usage that the scheduler refused for good."
        )
        self.usage_dropped = count("usage_rows_dropped", "Usage lost because the spool was full.")
        self.probe_failures = count("probe_failures", "Pings not answered.")

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, what, labels, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(PREFIX + name, what, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        """Define what the processes of a router have together."""
        return Gauge(
            PREFIX + name, what, labels, registry=self.registry, multiprocess_mode="livesum"
        )

    def _highest(self, name: str, what: str, *labels: str) -> Gauge:
        """Define what each process has for itself, and the highest of which counts."""
        return Gauge(
            PREFIX + name, what, labels, registry=self.registry, multiprocess_mode="livemax"
        )


class _CountsByDeployment(dict[str, DeploymentCounts]):
    """The counts of each deployment by its name, begun when first asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def __missing__(self, deployment: str) -> DeploymentCounts:
        metrics = self._metrics
        counts = self[deployment] = DeploymentCounts(
            ttft=metrics.ttft.labels(deployment),
            ttft_error=metrics.ttft_error.labels(deployment),
            requests={word: metrics.requests.labels(deployment, word) for word in OUTCOMES},
            tokens=[metrics.tokens.labels(deployment, kind) for kind in TOKEN_KINDS],
        )
        return counts

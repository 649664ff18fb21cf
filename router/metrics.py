"""Every metric of the router, defined once."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from router.counts import KINDS, WORDS, Counts

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
WAIT_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ERROR_BUCKETS_S = (-5.0, -1.0, -0.3, -0.1, -0.03, -0.01, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0)


PREFIX: Final = "isochrone_router_"


class Metrics(Collector):
    """One registry per process, made by app.py."""

    def __init__(self) -> None:
        """Define them all."""
        self.registry = CollectorRegistry()
        self._of: dict[str, Counts] = {}
        # First of all, so that who reads them has the counts of this moment.
        self.registry.register(self)
        self._define_requests()
        self._define_load()
        self._define_state()

    def collect(self) -> Iterable[Metric]:
        """Bring the metrics up to date; there are none besides."""
        self.show()
        return ()

    def show(self) -> None:
        """Bring up to date what is counted apart."""
        for counted in self._of.values():
            counted.show()

    def of(self, deployment: str) -> Counts:
        """Return the metrics of one deployment, by its name."""
        found = self._of.get(deployment)
        if found is None:
            found = self._of[deployment] = Counts(
                ttft=self.ttft.labels(deployment),
                ttft_error=self.ttft_error.labels(deployment),
                requests={word: self.requests.labels(deployment, word) for word in WORDS},
                tokens=[self.tokens.labels(deployment, kind) for kind in KINDS],
            )
        return found

    def _define_requests(self) -> None:
        self.requests = Counter(
            f"{PREFIX}requests",
            "Requests by how they ended.",
            ["deployment", "outcome"],
            registry=self.registry,
        )
        self.errors = Counter(
            f"{PREFIX}errors", "Errors answered, by code.", ["code"], registry=self.registry
        )
        self.ttft = Histogram(
            f"{PREFIX}ttft_seconds",
            "From a request's arrival to its first token on the way to the client.",
            ["deployment"],
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.ttft_error = Histogram(
            f"{PREFIX}ttft_prediction_error_seconds",
            "Measured less predicted time to first token, from the choice on.",
            ["deployment"],
            buckets=ERROR_BUCKETS_S,
            registry=self.registry,
        )
        self.tokens = Counter(
            f"{PREFIX}tokens", "Tokens by kind.", ["deployment", "kind"], registry=self.registry
        )
        self._define_trouble()

    def _define_trouble(self) -> None:
        self.retries = Counter(
            f"{PREFIX}retries",
            "Attempts that came to nothing, by cause.",
            ["cause"],
            registry=self.registry,
        )
        self.continuations = Counter(
            f"{PREFIX}continuations",
            "Streams whose replica died under them: continued by another, or impossible to.",
            ["how"],
            registry=self.registry,
        )
        self.ejections = Counter(
            f"{PREFIX}ejections",
            "Replicas ejected, by cause: failures in a row, more than peers, a failed trial, gone.",
            ["cause"],
            registry=self.registry,
        )
        self.ejected = Gauge(
            f"{PREFIX}ejected_replicas",
            "Replicas not well now.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.panics = Gauge(
            f"{PREFIX}panicking_deployments",
            "Deployments of which more than half look ill.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.retries_denied = Counter(
            f"{PREFIX}retries_denied",
            "Retries not made because the budget was spent.",
            registry=self.registry,
        )

    def _define_load(self) -> None:
        self.in_flight = Gauge(
            f"{PREFIX}in_flight_tokens",
            "Tokens in flight.",
            ["phase"],
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.open_requests = Gauge(
            f"{PREFIX}open_requests",
            "Requests being answered.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.open_streams = Gauge(
            f"{PREFIX}open_streams",
            "Streams being relayed.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.queue_wait = Histogram(
            f"{PREFIX}queue_wait_seconds",
            "How long those waited for room that got it.",
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self.refusals = Counter(
            f"{PREFIX}refusals",
            "Requests turned away by this router, by cause: a limit of the key, or want of room.",
            ["cause"],
            registry=self.registry,
        )
        self.waiting = Gauge(
            f"{PREFIX}waiting_requests",
            "Requests waiting for room.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.waiting_bytes = Gauge(
            f"{PREFIX}waiting_bytes",
            "Bytes of the bodies of requests waiting for room.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def _define_state(self) -> None:
        self.build_info = Gauge(
            f"{PREFIX}build_info",
            "1, by what this router runs on, and whether its hot path is compiled.",
            ["compiled", "python"],
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.table_generation = Gauge(
            f"{PREFIX}table_generation",
            "Table served by.",
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.table_age = Gauge(
            f"{PREFIX}table_age_seconds",
            "Since the scheduler last confirmed the table.",
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.table_routes = Gauge(
            f"{PREFIX}table_routes",
            "Routes in the table.",
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.table_refused = Counter(
            f"{PREFIX}tables_refused", "Tables not believed.", registry=self.registry
        )
        self.connected = Gauge(
            f"{PREFIX}scheduler_connected",
            "1 while conversing.",
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.usage_spooled = Gauge(
            f"{PREFIX}usage_spool_bytes",
            "Usage on disk, not yet acknowledged.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.demand_dropped = Counter(
            f"{PREFIX}demand_rows_dropped",
            "Demand that no scheduler took in time.",
            registry=self.registry,
        )
        self.rows_refused = Counter(
            f"{PREFIX}rows_refused",
            "Rows of demand and usage that the scheduler refused for good.",
            registry=self.registry,
        )
        self.usage_dropped = Counter(
            f"{PREFIX}usage_rows_dropped",
            "Usage lost because the spool was full.",
            registry=self.registry,
        )
        self.probe_failures = Counter(
            f"{PREFIX}probe_failures", "Pings not answered.", registry=self.registry
        )

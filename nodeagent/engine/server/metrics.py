"""The engine's counts as Prometheus metrics, read once per scrape."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class EngineStatsCollector(Collector):
    """Collects every number that `stats` returns. Names that end in `_total` are counters."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield one metric for each number."""
        for name, value in self._stats().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            words = name.removesuffix("_total").replace("_", " ")
            yield kind(f"isochrone_engine_{name}", f"Engine: {words}", value=float(value))

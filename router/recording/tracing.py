"""Composes the tracing of a router's requests from its settings."""

import random
import secrets
import time

from isochrone.service.tracing.exporter import (
    ServiceName,
    SpanCounts,
    SpanExporter,
    open_exporter,
)
from isochrone.service.tracing.spans import Sampling
from isochrone.service.trust.identity import Identity
from router.config import RouterConfig
from router.recording.metrics import PREFIX, Metrics
from router.recording.trace_spans import RequestTracer


def router_exporter(
    config: RouterConfig, identity: Identity, metrics: Metrics
) -> SpanExporter | None:
    """Return the exporter of spans; None without an endpoint. Raises ConfigError."""
    return open_exporter(
        config.traces_endpoint,
        config.traces_authorization_file,
        ServiceName("router", identity.name, identity.pop),
        lambda: SpanCounts(metrics.registry, PREFIX),
        time.monotonic,
    )


def request_tracer(
    config: RouterConfig, identity: Identity, exporter: SpanExporter | None
) -> RequestTracer | None:
    """Return the tracer of requests; None without an exporter."""
    if exporter is None:
        return None
    return RequestTracer(
        Sampling(config.trace_sample_ratio, config.trace_follows_clients),
        identity.pop,
        exporter.add,
        time.monotonic,
        time.time,
        random.random,
        secrets.token_hex,
    )

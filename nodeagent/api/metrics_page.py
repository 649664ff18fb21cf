"""`GET /metrics` of a node: its own metrics, and those of each warm engine by replica."""

import asyncio
from collections.abc import Iterable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.supervisor import Supervisor


def add_metrics(app: web.Application, supervisor: Supervisor) -> None:
    """Add the `/metrics` route to an application."""

    async def page(request: web.Request) -> web.Response:
        _update_gauges(supervisor)
        engines = {
            replica_id: replica.engine
            for replica_id, replica in sorted(supervisor.replicas.items())
            if replica.state is ReplicaState.WARM and replica.engine is not None
        }
        pages = await asyncio.gather(*(engine.metrics() for engine in engines.values()))
        merged = merge_pages(zip(engines, pages, strict=True))
        body = generate_latest(metrics.REGISTRY) + merged.encode()
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    app.router.add_get("/metrics", page)


def _update_gauges(supervisor: Supervisor) -> None:
    metrics.REPLICAS.clear()
    metrics.IN_FLIGHT.clear()
    metrics.RESTARTS.clear()
    metrics.ASLEEP.set(supervisor.awake.asleep_count())
    for replica_id, replica in supervisor.replicas.items():
        load = replica.admission.load()
        metrics.REPLICAS.labels(replica.state.value).inc()
        metrics.IN_FLIGHT.labels(replica_id, "prefill").set(load.prefill_tokens)
        metrics.IN_FLIGHT.labels(replica_id, "decode").set(load.decode_tokens)
        metrics.RESTARTS.labels(replica_id).set(len(replica.failure_times))


def merge_pages(pages: Iterable[tuple[str, str]]) -> str:
    """Merge the metrics pages of several replicas, given as (replica id, page), into one.

    Each sample gets a `replica` label. The samples of a family are kept together, under the help
    text and type of the first page that has them.
    """
    comments: dict[tuple[str, str], str] = {}
    samples: dict[str, list[str]] = {}
    for replica_id, page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                comments.setdefault((family, kind), line)
                samples.setdefault(family, [])
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_with_replica(line, replica_id))
    lines = [
        line
        for family, family_samples in samples.items()
        for line in (
            *(comments.get((family, kind), "") for kind in ("HELP", "TYPE")),
            *family_samples,
        )
        if line
    ]
    return "".join(f"{line}\n" for line in lines)


def _with_replica(sample: str, replica_id: str) -> str:
    """Add the `replica` label to a sample line."""
    name, brace, labels = sample.partition("{")
    if brace:
        comma = "" if labels.startswith("}") else ","
        return f'{name}{{replica="{replica_id}"{comma}{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica_id}"}} {value}'

"""`GET /metrics` of a node: its own, and what each warm engine tells, with its replica."""

import asyncio
from collections.abc import Iterable

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from isochrone.wire.report import ReplicaState
from nodeagent import metrics
from nodeagent.supervisor import Supervisor


def add_metrics(app: web.Application, supervisor: Supervisor) -> None:
    """Add the page to an application."""

    async def page(request: web.Request) -> web.Response:
        _count(supervisor)
        engines = {
            replica_id: replica.engine
            for replica_id, replica in sorted(supervisor.replicas.items())
            if replica.state is ReplicaState.WARM and replica.engine is not None
        }
        told = await asyncio.gather(*(engine.metrics() for engine in engines.values()))
        body = generate_latest(metrics.REGISTRY) + joined(zip(engines, told, strict=True)).encode()
        return web.Response(body=body, headers={"content-type": CONTENT_TYPE_LATEST})

    app.router.add_get("/metrics", page)


def _count(supervisor: Supervisor) -> None:
    metrics.REPLICAS.clear()
    metrics.IN_FLIGHT.clear()
    metrics.RESTARTS.clear()
    for replica_id, replica in supervisor.replicas.items():
        load = replica.in_flight.load()
        metrics.REPLICAS.labels(replica.state.value).inc()
        metrics.IN_FLIGHT.labels(replica_id, "prefill").set(load.prefill_tokens)
        metrics.IN_FLIGHT.labels(replica_id, "decode").set(load.decode_tokens)
        metrics.RESTARTS.labels(replica_id).set(len(replica.breaks))


def joined(pages: Iterable[tuple[str, str]]) -> str:
    """Return engines' pages as one: each sample with its replica, each family in one piece.

    What describes a family is told once, in the words of the first that has it.
    """
    heads: dict[tuple[str, str], str] = {}
    samples: dict[str, list[str]] = {}
    for replica_id, page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, family, *_ = line.split(" ", 3)
                heads.setdefault((family, kind), line)
                samples.setdefault(family, [])
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(_labelled(line, replica_id))
    lines = [
        line
        for family, told in samples.items()
        for line in (*(heads.get((family, kind), "") for kind in ("HELP", "TYPE")), *told)
        if line
    ]
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, replica_id: str) -> str:
    name, brace, labels = sample.partition("{")
    if brace:
        comma = "" if labels.startswith("}") else ","
        return f'{name}{{replica="{replica_id}"{comma}{labels}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica_id}"}} {value}'

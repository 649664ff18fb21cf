"""`GET /metrics` of a node: its own metrics, and those of each warm engine by replica.

Rule 1: Prometheus refuses a whole page for one line that it cannot read. A line of an engine that
is not of its text format is left out, so that no engine hides the metrics of the node and of other
engines.
Rule 2: no engine speaks for the node: its lines with the node's own prefix are left out.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import Final

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from isochrone.wire.peers.report import ReplicaState
from nodeagent import metrics
from nodeagent.supervisor import Supervisor

LINES_MAX: Final = 50_000
"""Lines of an engine's page that are read: those of vLLM have a few thousand."""

OWN_PREFIX: Final = "isochrone_node_"

# No pattern has two repetitions that could share a text: a hostile line costs its length.
_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_TEXT: Final = r'"(?:[^"\\\x00-\x1f]|\\[\\"n])*"'
_LABEL_NAME: Final = r"[a-zA-Z_][a-zA-Z0-9_]*"
_LABELS: Final = rf"(?:{_LABEL_NAME}={_TEXT}(?:,[ \t]*|(?=\}})))*"
_NUMBER: Final = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9]+|[Ii]nf|NaN|nan)"
_SAMPLE: Final = re.compile(
    rf"({_NAME})(?:\{{[ \t]*({_LABELS})\}})?[ \t]+({_NUMBER}(?:[ \t]+-?[0-9]+)?)[ \t]*"
)
_ONE_LABEL: Final = re.compile(f"({_LABEL_NAME})=({_TEXT})")
_RENAMED: Final = {"replica": "exported_replica"}
_COMMENT: Final = re.compile(
    rf"# (?:(HELP) ({_NAME}) [^\x00-\x1f]*"
    rf"|(TYPE) ({_NAME}) (?:counter|gauge|histogram|summary|untyped))"
)


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
        # In a thread: an engine's page may be large.
        merged = await asyncio.to_thread(merge_pages, list(zip(engines, pages, strict=True)))
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
        for line in page.split("\n", LINES_MAX)[:LINES_MAX]:
            if line.startswith("# "):
                if (comment := _COMMENT.fullmatch(line)) is None:
                    continue
                kind, family = [part for part in comment.groups() if part]
                if family.startswith(OWN_PREFIX):
                    continue
                comments.setdefault((family, kind), line)
                samples.setdefault(family, [])
            elif sample := _with_replica(line, replica_id):
                samples.setdefault(family, []).append(sample)
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


def _with_replica(line: str, replica_id: str) -> str:
    """Return a sample's line with the `replica` label; "" if it cannot be in the node's page.

    A label of the engine with that name is renamed, as Prometheus does.
    """
    sample = _SAMPLE.fullmatch(line)
    if sample is None or line.startswith(OWN_PREFIX):
        return ""
    name, labels, value = sample.groups("")
    texts = {"replica": f'"{replica_id}"'}
    pairs = _ONE_LABEL.findall(labels)
    texts.update((_RENAMED.get(label, label), text) for label, text in pairs)
    if len(texts) != 1 + len(pairs):
        return ""  # two labels have one name
    joined = ",".join(f"{label}={text}" for label, text in texts.items())
    return f"{name}{{{joined}}} {value}"

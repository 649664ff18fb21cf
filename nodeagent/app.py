"""Builds the agent from its parts and runs it. No other module composes them."""

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from ssl import SSLContext
from time import monotonic, time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from isochrone.service.config import read_secret
from isochrone.service.loop import Loop
from isochrone.service.machine_share import usable_cores
from isochrone.service.network.control_link import ControlLink
from isochrone.service.network.http_server import serve_http
from isochrone.service.systemd import feed_watchdog, notify
from isochrone.service.tracing.exporter import (
    ServiceName,
    SpanCounts,
    SpanExporter,
    open_exporter,
)
from isochrone.service.tracing.recorder import SpanRecorder
from isochrone.service.trust.allowed_hosts import HostAllowList, own_names, refuse_unknown_hosts
from isochrone.service.trust.joining import load_or_join
from isochrone.service.trust.model_signature import ModelSigners, load_signers
from isochrone.service.trust.peer_refusal import refuse_peers
from isochrone.service.trust.tls import client_context, node_server_context
from isochrone.wire.ids import BootId
from isochrone.wire.peers.control import PeerRole, ToAgent
from nodeagent import metrics
from nodeagent.api.artifact_uploads import ArtifactUploads
from nodeagent.api.data_plane import DataPlaneServer
from nodeagent.api.metrics_page import add_metrics
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.api.request.request_spans import trace_requests
from nodeagent.api.store_relay import StoreRelay, dial_through
from nodeagent.config import NodeConfig
from nodeagent.decide.replicas.reconcile import is_same_spec
from nodeagent.decide.requests.kv_quota import KvRateLimits
from nodeagent.drivers import missing_by_driver, version_of
from nodeagent.drivers.driver import StorePorts
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.peers import PeerFetcher
from nodeagent.host.artifacts.sources import ArtifactSources, ClusterOrigin
from nodeagent.host.assignment_file import AssignmentFile
from nodeagent.host.cache_salts import load_cache_salts
from nodeagent.host.confinement import EngineConfinement, engine_confinement
from nodeagent.host.devices import DeviceReader
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.host.memory_peaks import MemoryPeaks
from nodeagent.host.store_master import StoreMaster
from nodeagent.loops.converge import ConvergeJob
from nodeagent.loops.delete_idle_adapters import DeleteIdleAdapters
from nodeagent.loops.prefetch import PrefetchJob
from nodeagent.loops.report import PulseJob, ReportJob
from nodeagent.loops.supervise_store import SuperviseStore
from nodeagent.node import NodeState
from nodeagent.supervisor import Supervisor

log = logging.getLogger(__name__)

CONVERGE_INTERVAL_S = 5.0
PREFETCH_INTERVAL_S = 15.0
REPORT_INTERVAL_S = 10.0
PULSE_INTERVAL_S = 2.0
STORE_INTERVAL_S = 1.0
DELETE_IDLE_INTERVAL_S = 3600.0
DAY_S = 86_400.0


async def serve(
    config: NodeConfig, stopping: asyncio.Event, config_file: Path | None = None
) -> int:
    """Run the agent of one node until `stopping` is set; return its exit code.

    `config_file` is where the configuration was read.
    """
    confinement = _confinement(config, config_file)
    sources = await asyncio.to_thread(_artifact_sources, config)
    signers = await asyncio.to_thread(load_signers, config.model_signers)
    node = await _open_node(config)
    rng = random.Random()  # noqa: S311 - jitter, not secrets
    server_tls = node_server_context(node.identity) if config.listen_tls else None
    client_tls = client_context(node.identity) if config.listen_tls else None
    artifacts = _artifact_store(config, node, sources, rng, client_tls, signers)
    engines = _engine_processes(config, node, confinement)
    supervisor = _supervisor(config, node, artifacts, engines, rng)
    link = ControlLink(
        urls=config.schedulers,
        identity=node.identity,
        boot_id=node.boot_id,
        incoming=ToAgent,
        progress=node.progress,
        on_welcome=node.on_welcome,
        on_message=node.on_message,
        rng=rng,
        folder=config.state,
        contexts=[context for context in (server_tls, client_tls) if context is not None],
    )
    cluster = client_context(node.identity)
    sources.cluster = lambda: ClusterOrigin(
        link.url, node.relay_token, cluster if link.url.startswith("https:") else None
    )
    exporter = _exporter(config, node)
    peer_replicas = PeerReplicaClient(client_tls, monotonic)
    store = _store_parts(config, node, peer_replicas, confinement)
    more = (store.loop, exporter.loop) if exporter is not None else (store.loop,)
    loops = (*_loops(config, node, supervisor, artifacts, link, rng), *more)

    try:
        await _adopt_survivors(node, engines, supervisor, signers)
        server = DataPlaneServer(
            supervisor,
            peer_replicas,
            node.cache_salts,
            kv_limits=KvRateLimits(
                link=config.kv_share_bytes_per_s,
                deployment=config.kv_share_deployment_bytes_per_s,
                tenant=config.kv_share_tenant_bytes_per_s,
            ),
            spans=_span_middleware(node, exporter),
        )
        app = _data_plane_app(server, artifacts, config, node, store.relay)
        async with _listeners(config, app, supervisor, server_tls, store.relay) as port:
            log.info("serving", extra={"fields": {"port": port, "node": node.node_id}})
            async with _running(*(loop.run() for loop in loops), link.run(), feed_watchdog()):
                notify("READY=1")
                await stopping.wait()
                server.is_draining = True
                await supervisor.wait_idle(config.drain_timeout_s)
    finally:
        # An agent that fails leaves its engines running too: their end was not ordered.
        keep_engines = config.keep_engines_on_stop or not stopping.is_set()
        await supervisor.shut_down(keep_engines=keep_engines)
        await engines.close()
        if not keep_engines:
            await store.master.stop()
        if exporter is not None:
            await exporter.close()
    return 0


@asynccontextmanager
async def _running(*runs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines as tasks until the end of the block. If one fails, the block is cancelled."""
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(run) for run in runs]
        yield
        for task in started:
            task.cancel()


def _supervisor(
    config: NodeConfig,
    node: NodeState,
    artifacts: ArtifactStore,
    engines: EngineProcesses,
    rng: random.Random,
) -> Supervisor:
    return Supervisor(
        config=config,
        artifacts=artifacts,
        engines=engines,
        clock=monotonic,
        rng=rng,
        on_change=lambda: node.nudge_report(),
        device_budgets=node.device_budgets,
        memory_used=node.devices.used_by,
        device_memory=node.devices.usable_memory,
        memory_peaks=MemoryPeaks(config.state, version_of),
    )


class _StoreParts(NamedTuple):
    """The node's parts of its PoP's store of KV."""

    master: StoreMaster
    relay: StoreRelay
    loop: Loop


def _store_parts(
    config: NodeConfig,
    node: NodeState,
    peers: PeerReplicaClient,
    confinement: EngineConfinement | None,
) -> _StoreParts:
    master = StoreMaster(config.state / "kv_store", confinement)
    where = (node.node_id, node.store_master)
    relay = StoreRelay(*where, lambda: master.port, dial_through(peers))
    job = SuperviseStore(*where, master, relay.drop_stale, monotonic)
    loop = Loop("supervise_store", job.run_once, STORE_INTERVAL_S)
    node.nudge_store = loop.nudge
    return _StoreParts(master, relay, loop)


@asynccontextmanager
async def _listeners(
    config: NodeConfig,
    app: web.Application,
    supervisor: Supervisor,
    context: SSLContext | None,
    store_relay: StoreRelay,
) -> AsyncIterator[int]:
    """Open the data-plane listener and, if configured, those of metrics and of the store of KV.

    Yields the data-plane port.
    """
    async with AsyncExitStack() as stack:
        data_plane = serve_http(app, config.listen_host, config.listen_port, ssl_context=context)
        port = await stack.enter_async_context(data_plane)
        if config.plaintext_kv_store_ports is not None:
            listening = store_relay.listening(config.plaintext_kv_store_ports[0])
            await stack.enter_async_context(listening)
        if config.private_host:
            metrics_app = web.Application()
            add_metrics(metrics_app, supervisor)
            private = serve_http(metrics_app, config.private_host, config.private_port)
            await stack.enter_async_context(private)
        yield port


def _exporter(config: NodeConfig, node: NodeState) -> SpanExporter | None:
    return open_exporter(
        config.traces_endpoint,
        config.traces_authorization_file,
        ServiceName("node", node.node_id, node.identity.pop),
        lambda: SpanCounts(metrics.REGISTRY, "isochrone_node_"),
        monotonic,
    )


def _span_middleware(node: NodeState, exporter: SpanExporter | None) -> Middleware | None:
    """Return what records the spans of requests; None if they are not exported."""
    if exporter is None:
        return None
    recorder = SpanRecorder(exporter.add, monotonic, time, secrets.token_hex)
    return trace_requests(recorder, node.node_id)


async def _open_node(config: NodeConfig) -> NodeState:
    """Load the node's identity, joining the cluster if it has none, and its last assignment."""
    identity = await load_or_join(
        urls=config.schedulers,
        token_file=config.join_token_file,
        role=PeerRole.AGENT,
        name=config.name,
        folder=config.state,
    )
    devices = await asyncio.to_thread(DeviceReader, config.cpu_memory_bytes)
    cache_salts = await asyncio.to_thread(load_cache_salts, config.state)
    file, boot_id = AssignmentFile(config.state), BootId(secrets.token_hex(8))
    node = NodeState(identity, boot_id, file, devices, cache_salts)
    await node.restore()
    # Known before the first report: a node that seems to have each engine might be given a
    # replica that it refuses.
    node.note_missing(await asyncio.to_thread(missing_by_driver, config.commands))
    return node


def _confinement(config: NodeConfig, config_file: Path | None) -> EngineConfinement | None:
    secrets_of = (config.join_token_file, config.hf_token_file, config.traces_authorization_file)
    files = [path for path in (config_file, *secrets_of) if path is not None]
    closed = [config.state, *files]
    return engine_confinement(config.confine_engines, closed, _artifacts_folder(config))


def _artifacts_folder(config: NodeConfig) -> Path:
    return config.state / "artifacts"


def _engine_processes(
    config: NodeConfig, node: NodeState, confinement: EngineConfinement | None
) -> EngineProcesses:
    return EngineProcesses(
        config.state / "engines",
        config.engine_threads or usable_cores(),
        standby=config.standby,
        device_memory=node.devices.memory,
        host=urlsplit(config.address).hostname or "127.0.0.1",
        commands=config.commands,
        canary_timeout_s=config.canary_timeout_s,
        store_ports=_store_ports(config),
        confinement=confinement,
    )


def _store_ports(config: NodeConfig) -> StorePorts | None:
    if config.plaintext_kv_store_ports is None:
        return None
    first, last = config.plaintext_kv_store_ports
    return StorePorts(master=first, first=first + 1, last=last)


def _loops(
    config: NodeConfig,
    node: NodeState,
    supervisor: Supervisor,
    artifacts: ArtifactStore,
    link: ControlLink,
    rng: random.Random,
) -> tuple[Loop, ...]:
    """Return the periodic jobs, and let the node nudge those that react to its changes."""
    reporting = ReportJob(
        config=config, node=node, supervisor=supervisor, artifacts=artifacts, link=link
    )
    report = Loop("report", reporting.run_once, REPORT_INTERVAL_S, jitter=rng)
    pulse = Loop("pulse", PulseJob(node, link, time).run_once, PULSE_INTERVAL_S, jitter=rng)
    converging = ConvergeJob(
        node,
        supervisor,
        monotonic,
        config.plaintext_rank_ports,
        config.commands,
        has_store_ports=config.plaintext_kv_store_ports is not None,
    )
    converge = Loop("converge", converging.run_once, CONVERGE_INTERVAL_S)
    prefetching = PrefetchJob(node, supervisor, artifacts)
    prefetch = Loop("prefetch", prefetching.run_once, PREFETCH_INTERVAL_S)
    deleting = DeleteIdleAdapters(supervisor, artifacts, config.adapter_idle_days * DAY_S, time)
    delete = Loop("delete_idle_adapters", deleting.run_once, DELETE_IDLE_INTERVAL_S, jitter=rng)
    node.nudge_report = report.nudge
    node.nudge_converge = converge.nudge
    node.nudge_prefetch = prefetch.nudge
    return report, pulse, converge, prefetch, delete


def _artifact_sources(config: NodeConfig) -> ArtifactSources:
    path = config.hf_token_file
    token = read_secret(path, "the hub's token") if path is not None else ""
    return ArtifactSources(private=config.private_sources, hf_url=config.hf_url, hf_token=token)


def _artifact_store(
    config: NodeConfig,
    node: NodeState,
    sources: ArtifactSources,
    rng: random.Random,
    context: SSLContext | None,
    signers: ModelSigners,
) -> ArtifactStore:
    peers = PeerFetcher(
        holders=node.holders_of,
        pop=node.identity.pop,
        context=context,
        clock=monotonic,
        rng=rng,
    )
    return ArtifactStore(
        _artifacts_folder(config),
        sources,
        config.disk_budget_bytes,
        link=TransferLink(config.download_bytes_per_s, monotonic),
        peers=peers,
        signers=signers,
    )


def _data_plane_app(
    server: DataPlaneServer,
    artifacts: ArtifactStore,
    config: NodeConfig,
    node: NodeState,
    store_relay: StoreRelay,
) -> web.Application:
    """Return the data-plane application: inference requests, and artifact uploads to nodes."""
    app = server.app()
    if not config.listen_tls:
        # With mutual TLS a browser cannot connect.
        names = [urlsplit(config.address).hostname or "", *own_names()]
        app.middlewares.append(refuse_unknown_hosts(HostAllowList(names), "address"))
    app.middlewares.append(refuse_peers(node.identity.pop, node.revoked_certificates))
    uplink = TransferLink(config.upload_bytes_per_s, monotonic)
    store_relay.attach(app)
    ArtifactUploads(artifacts, uplink, uploads_max=config.uploads_max).attach(app)
    return app


async def _adopt_survivors(
    node: NodeState, engines: EngineProcesses, supervisor: Supervisor, signers: ModelSigners
) -> None:
    """Adopt the engine processes that survived an earlier agent.

    An engine with a tombstone, or whose spec in the assignment has changed, or whose model lacks a
    signature that this node requires, is killed instead. A field that only one of the two specs has
    was unknown to the release that wrote the other.
    """
    current = node.assignment
    specs = {spec.replica_id: spec for spec in current.replicas} if current else {}
    ending = {tombstone.replica_id for tombstone in current.tombstones} if current else set()
    for survivor in await asyncio.to_thread(engines.survivors):
        spec = survivor.spec
        assigned = specs.get(spec.replica_id, spec)
        is_kept = spec.replica_id not in ending and is_same_spec(spec, assigned)
        is_kept = is_kept and not signers.problem(spec.artifact)
        log.info(
            "engine adopted" if is_kept else "engine killed",
            extra={"fields": {"replica": spec.replica_id}},
        )
        if is_kept:
            await supervisor.adopt(survivor)
        else:
            await engines.adopt(survivor).stop(kill=True)

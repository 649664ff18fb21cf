"""The agent's only place of composition."""

import asyncio
import logging
import os
import random
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from ssl import SSLContext
from time import monotonic

from aiohttp import web

from isochrone.service.config import read_secret
from isochrone.service.control_link import ControlLink
from isochrone.service.http_server import serve_http
from isochrone.service.joining import load_or_join
from isochrone.service.loop import Loop
from isochrone.service.revocation import refuse_revoked
from isochrone.service.systemd import feed_watchdog, notify
from isochrone.service.tls import client_context, node_server_context
from isochrone.wire.control import PeerRole, ToAgent
from isochrone.wire.ids import BootId
from nodeagent.api.door import Door
from nodeagent.api.metrics_page import add_metrics
from nodeagent.api.siblings import Siblings
from nodeagent.api.weights import Weights
from nodeagent.config import NodeConfig
from nodeagent.host.artifacts import Artifacts
from nodeagent.host.devices import Devices
from nodeagent.host.engines import Engines
from nodeagent.host.ledger import Ledger
from nodeagent.host.link import Link
from nodeagent.host.peers import Peers
from nodeagent.host.sources import Sources
from nodeagent.loops.converge import Converge
from nodeagent.loops.prefetch import PrefetchDuty
from nodeagent.loops.report import PulseDuty, ReportDuty
from nodeagent.node import Node
from nodeagent.supervisor import Supervisor

log = logging.getLogger(__name__)


async def serve(config: NodeConfig, stopping: asyncio.Event) -> int:
    """Run one node's agent until `stopping`; return its exit code."""
    sources = await asyncio.to_thread(_sources, config)
    node = await _open_node(config)
    chance = random.Random()  # noqa: S311 - jitter, not secrets
    door_tls = node_server_context(node.identity) if config.door_tls else None
    peer_tls = client_context(node.identity) if config.door_tls else None
    artifacts = _artifacts(config, node, sources, chance, peer_tls)
    engines = Engines(
        config.state / "engines",
        config.engine_threads or (os.cpu_count() or 1),
        standby=config.standby,
    )
    supervisor = Supervisor(
        config=config,
        artifacts=artifacts,
        engines=engines,
        clock=monotonic,
        chance=chance,
        on_change=lambda: node.nudge_report(),
    )
    link = ControlLink(
        urls=config.schedulers,
        identity=node.identity,
        boot_id=node.boot_id,
        incoming=ToAgent,
        progress=node.progress,
        on_welcome=node.welcomed,
        on_message=node.told,
        rng=chance,
        folder=config.state,
        contexts=[context for context in (door_tls, peer_tls) if context is not None],
    )
    reports = ReportDuty(
        config=config, node=node, supervisor=supervisor, artifacts=artifacts, link=link
    )
    report = Loop("report", reports.run_once, 10.0, jitter=chance)
    pulse = Loop("pulse", PulseDuty(node, link).run_once, 2.0, jitter=chance)
    node.nudge_report = report.nudge
    duties = (report, pulse, *_what_makes_it_so(config, node, supervisor, artifacts))

    try:
        await _take_up_survivors(node, engines, supervisor)
        door = Door(supervisor, Siblings(peer_tls, monotonic))
        app = _served(door, artifacts, config, node)
        async with _listening(config, app, supervisor, door_tls) as port:
            log.info("serving", extra={"fields": {"port": port, "node": node.node_id}})
            async with asyncio.TaskGroup() as tasks:
                runs = [duty.run() for duty in duties]
                owned = [tasks.create_task(run) for run in (*runs, link.run(), feed_watchdog())]
                notify("READY=1")
                await stopping.wait()
                door.leaving = True
                await supervisor.wait_idle(config.drain_timeout_s)
                for task in owned:
                    task.cancel()
    finally:
        # An agent that fails leaves its engines too: nobody ordered their end.
        keeps = config.keep_engines_on_stop or not stopping.is_set()
        await supervisor.leave(keep_engines=keeps)
        await engines.close()
    return 0


@asynccontextmanager
async def _listening(
    config: NodeConfig, app: web.Application, supervisor: Supervisor, context: SSLContext | None
) -> AsyncIterator[int]:
    """Open the door, and beside it the private page of metrics, where one is wanted."""
    async with AsyncExitStack() as stack:
        door = serve_http(app, config.door_host, config.door_port, ssl_context=context)
        port = await stack.enter_async_context(door)
        if config.private_host:
            private = web.Application()
            add_metrics(private, supervisor)
            page = serve_http(private, config.private_host, config.private_port)
            await stack.enter_async_context(page)
        yield port


async def _open_node(config: NodeConfig) -> Node:
    """Return this node with its papers, joining the cluster where it has none, as it was left."""
    identity = await load_or_join(
        urls=config.schedulers,
        token_file=config.join_token_file,
        role=PeerRole.AGENT,
        name=config.name,
        folder=config.state,
    )
    devices = await asyncio.to_thread(Devices, config.cpu_memory_bytes)
    node = Node(identity, BootId(secrets.token_hex(8)), Ledger(config.state), devices)
    await node.restore()
    return node


def _what_makes_it_so(
    config: NodeConfig, node: Node, supervisor: Supervisor, artifacts: Artifacts
) -> tuple[Loop, Loop]:
    """Return the duties that make true what is assigned; a new assignment nudges them."""
    converging = Converge(node, supervisor, monotonic, config.plaintext_rank_ports)
    converge = Loop("converge", converging.run_once, 5.0)
    prefetch = Loop("prefetch", PrefetchDuty(node, supervisor, artifacts).run_once, 15.0)
    node.nudge_converge, node.nudge_prefetch = converge.nudge, prefetch.nudge
    return converge, prefetch


def _sources(config: NodeConfig) -> Sources:
    path = config.hf_token_file
    token = read_secret(path, "the hub's token") if path is not None else ""
    return Sources(private=config.private_sources, hf_url=config.hf_url, hf_token=token)


def _artifacts(
    config: NodeConfig,
    node: Node,
    sources: Sources,
    chance: random.Random,
    context: SSLContext | None,
) -> Artifacts:
    peers = Peers(
        holders=node.holders_of,
        pop=node.identity.pop,
        context=context,
        clock=monotonic,
        chance=chance,
    )
    return Artifacts(
        config.state / "artifacts",
        sources,
        config.disk_budget_bytes,
        link=Link(config.download_bytes_per_s, monotonic),
        peers=peers,
    )


def _served(door: Door, artifacts: Artifacts, config: NodeConfig, node: Node) -> web.Application:
    """Return what the node's listener serves: routers' requests, and weights to other nodes."""
    app = door.app()
    app.middlewares.append(refuse_revoked(node.revoked))
    uplink = Link(config.upload_bytes_per_s, monotonic)
    Weights(artifacts, uplink, uploads_max=config.uploads_max).attach(app)
    return app


async def _take_up_survivors(node: Node, engines: Engines, supervisor: Supervisor) -> None:
    """Adopt the engines of an earlier life, but those with a tombstone or another spec by now."""
    held = node.assignment
    specs = {spec.replica_id: spec for spec in held.replicas} if held else {}
    ending = {tombstone.replica_id for tombstone in held.tombstones} if held else set()
    for survivor in await asyncio.to_thread(engines.survivors):
        spec = survivor.spec
        keeps = spec.replica_id not in ending and specs.get(spec.replica_id, spec) == spec
        log.info(
            "engine adopted" if keeps else "engine ended",
            extra={"fields": {"replica": spec.replica_id}},
        )
        if keeps:
            supervisor.begin(spec, survivor)
        else:
            await engines.adopt(survivor).stop(kill=True)

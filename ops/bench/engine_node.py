"""A node with one engine of one thread, as a process of its own: for benchmarks of several nodes.

    python -m ops.bench.engine_node '{"name": "a", "model": "MODEL.gguf", "folder": "/tmp/a"}'

Prints the address of its data plane once the engine is warm, and ends when its input does. An
engine that survived an earlier process with the same folder is adopted.
"""

import asyncio
import hashlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import uvloop

from isochrone.service.logs import setup_logs
from isochrone.service.network.http_server import serve_http
from isochrone.service.network.name_lookup import ServiceLoop
from isochrone.wire.ids import DeploymentId, DeviceId, ModelId, ReplicaId
from isochrone.wire.models.artifact import manifest_digest
from isochrone.wire.models.model import Artifact, ArtifactFile, EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.api import peer_replicas
from nodeagent.api.data_plane import DataPlaneServer
from nodeagent.api.peer_replicas import PeerReplicaClient
from nodeagent.config import NodeConfig
from nodeagent.decide.requests import kv_fetch, prefill_leg
from nodeagent.disaggregation import kv_windows
from nodeagent.host import processes
from nodeagent.host.artifacts.artifact_store import ArtifactStore
from nodeagent.host.artifacts.link import TransferLink
from nodeagent.host.artifacts.sources import ArtifactSources
from nodeagent.host.cache_salts import CacheSalts
from nodeagent.host.engines.engine_process import EngineProcesses
from nodeagent.supervisor import Supervisor
from ops.bench import memory_counts

SECRET: Final = CacheSalts(b"a secret of this benchmark......")
WARM_S: Final = 300.0
END_S: Final = 30.0


class NodeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a node: their model is a file or a folder, their options the driver's."""

    name: str
    model: str
    folder: str
    kv_memory_bytes: int = 600 * 1024**2
    context_tokens: int = 2048
    share_kv: bool = False
    others: tuple[str, ...] = ()
    """Further replicas of the same deployment on this node."""
    pause_s: float | None = None
    """How long a node or a window is not used after a failure, and how long a slow transfer keeps
    others from being tried; None for the product's times."""
    probe_timeout_s: float | None = None
    """How long another node may take to say how busy it is; None for the product's time."""
    options: dict[str, str] = {}
    has_equal_priority: bool = False
    """Whether engines have the priority of what runs beside them. A tenth of it is the product's:
    beside other work an engine then starts in minutes."""
    counts_memory: bool = False
    """Whether the node says at memory_counts.PATH what its agent has in memory."""


class NodeClient(msgspec.Struct, frozen=True, kw_only=True):
    """A running node, as a client sees it."""

    name: str
    address: str
    http: aiohttp.ClientSession
    pid: int

    async def counters(self, prefix: str) -> dict[str, float]:
        """Return the samples of the node's metrics page whose names begin with `prefix`."""
        async with self.http.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        samples = [line.rpartition(" ") for line in lines if line.startswith(prefix)]
        return {name: float(value) for name, _, value in samples}


@asynccontextmanager
async def bench_node(setup: NodeSetup, checkout: str = "") -> AsyncIterator[NodeClient]:
    """Run a node as a process; yield it once its engine is warm.

    With a `checkout`, it runs the code of that folder.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.bench.engine_node", msgspec.json.encode(setup).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=checkout or None,
        env={**os.environ, "PYTHONPATH": checkout} if checkout else None,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WARM_S):
            address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise SystemExit(f"cannot measure: node {setup.name} did not become warm")
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(f"http://{address}", timeout=timeout) as http:
            yield NodeClient(name=setup.name, address=address, http=http, pid=process.pid)
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()


def a_spec(setup: NodeSetup, name: str) -> ReplicaSpec:
    """Return a replica of a node."""
    model = Path(setup.model)
    paths = sorted(model.iterdir()) if model.is_dir() else [model]
    files = [_artifact_file(path) for path in paths]
    artifact = Artifact(
        source=f"file:{paths[0].parent}", files=tuple(files), digest=manifest_digest(files)
    )
    return ReplicaSpec(
        replica_id=ReplicaId(name),
        deployment_id=DeploymentId("bench"),
        version=1,
        name="bench",
        model_id=ModelId("bench"),
        artifact=artifact,
        context_tokens=setup.context_tokens,
        engine=EngineSettings(
            driver="embedded",
            kv_memory_bytes=setup.kv_memory_bytes,
            tokens_in_flight_max=1_000_000,
            options=setup.options,
            share_kv=setup.share_kv,
        ),
        device_ids=(DeviceId("cpu"),),
        memory_bytes=2 * 1024**3,
    )


def _artifact_file(path: Path) -> ArtifactFile:
    content = path.read_bytes()
    return ArtifactFile(
        path=path.name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )


def shorten_pauses(pause_s: float) -> None:
    """Have this process use nodes and windows again so long after a failure, or a slow transfer."""
    for module, constant in (
        (kv_fetch, "BACKOFF_S"),
        (kv_fetch, "BACKOFF_MAX_S"),
        (kv_fetch, "AGING_S"),
        (prefill_leg, "AGING_S"),
        (kv_windows, "PAUSE_S"),
        (peer_replicas, "BACKOFF_S"),
    ):
        setattr(module, constant, pause_s)


async def serve(setup: NodeSetup) -> None:
    """Run the node until the input of this process ends."""
    if setup.pause_s is not None:
        shorten_pauses(setup.pause_s)
    if setup.probe_timeout_s is not None:
        setattr(peer_replicas, "PROBE_TIMEOUT_S", setup.probe_timeout_s)  # noqa: B010
    if setup.has_equal_priority:
        vars(processes)["NICENESS"] = 0
    folder = Path(setup.folder)
    engines = EngineProcesses(folder / "engines", 1)
    supervisor = Supervisor(
        config=NodeConfig(name=setup.name, schedulers=(), state=folder, address=""),
        artifacts=ArtifactStore(
            folder / "artifacts",
            ArtifactSources(private=True, hf_url=""),
            1 << 34,
            link=TransferLink(0, time.monotonic),
        ),
        engines=engines,
        clock=time.monotonic,
        rng=random.Random(1),
        on_change=lambda: None,
    )
    app = DataPlaneServer(supervisor, PeerReplicaClient(None, time.monotonic), SECRET).app()
    if setup.counts_memory:
        app.router.add_get(memory_counts.PATH, memory_counts.answer_counts)
    async with serve_http(app, "127.0.0.1", 0) as port:
        survivors = await asyncio.to_thread(engines.survivors)
        found = {engine.spec.replica_id: engine for engine in survivors}
        for name in (setup.name, *setup.others):
            supervisor.start(a_spec(setup, name), found.get(ReplicaId(name)))
        replicas = list(supervisor.replicas.values())
        input_ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        try:
            while not (all(replica.is_serving for replica in replicas) or input_ended.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            print(f"127.0.0.1:{port}", flush=True)
            await input_ended
        finally:
            await supervisor.shut_down(keep_engines=False)


if __name__ == "__main__":
    # An engine that is killed leaves its reason there.
    setup_logs("bench")
    # The event loop of the product's services.
    uvloop.run(serve(msgspec.json.decode(sys.argv[1], type=NodeSetup)), loop_factory=ServiceLoop)

"""An operator's own server under the agent: started, asked in its own words, limited and ended."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.ids import Generation, ReplicaId
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import Tombstone
from isochrone.wire.peers.report import ReplicaState
from nodeagent.drivers.configured_command import ConfiguredCommand
from tests.builders import a_spec
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.system.harness import until

SERVER: Final = str(Path(__file__).parent / "own_server.py")
WORD: Final = "own-server-of-a-test"
OPTIONS: Final = {"command": "ear", "surfaces": "transcriptions", "concurrency": "1"}
COMMAND: Final = ConfiguredCommand(
    arguments=(sys.executable, SERVER, "--port", "{port}", "--model", "{model}", "--says", WORD),
    ready_path="/up",
    metrics_path="/numbers",
    model_name="ear-of-{name}",
    stall_s=60.0,
)


@pytest.fixture
async def node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node with one warm server, which is watched often."""
    monkeypatch.setattr("nodeagent.supervisor.OBSERVE_INTERVAL_S", 0.1)
    monkeypatch.setattr("nodeagent.host.engines.engine_process.PROBE_TIMEOUT_S", 0.3)
    async with a_node(commands={"ear": COMMAND}) as node:
        engine = EngineSettings(
            driver="command", tokens_in_flight_max=10_000, kv_memory_bytes=0, options=OPTIONS
        )
        spec = a_spec("r1", engine=engine, artifact=node.artifact)
        await node.warm(msgspec.structs.replace(spec, kind="transcription"))
        yield node


def transcribe(node: Node, wait_s: float = 0.0, sound: bytes = b"\r\n--sound\0" * 9) -> Any:
    form = aiohttp.FormData()
    form.add_field("file", sound, filename='a";name="model', content_type="audio/wav")
    form.add_field("model", "what the client calls it")
    form.add_field("prompt", str(wait_s))
    sent = {headers.REPLICA: "r1", headers.TOKENS: "p=10;o=10", headers.CACHE_SALT: "tenant"}
    return node.http.post("/v1/audio/transcriptions", data=form, headers=sent)


def processes() -> set[str]:
    """Return the processes that have the word among their arguments."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if WORD.encode() in path.read_bytes():
                found.add(path.parent.name)
        except OSError:
            continue
    return found


async def test_it_is_asked_by_its_own_name_of_the_model(node: Node) -> None:
    async with transcribe(node) as response:
        assert (response.status, await response.json()) == (
            200,
            {"text": f"ear-of-d {len(b'--sound' * 9) + 27} {WORD}"},
        )
    async with node.http.get("/metrics") as page:
        assert 'own_requests{replica="r1"} 7' in await page.text()


async def test_a_busy_server_is_not_killed_and_gets_no_more_than_it_can_do(node: Node) -> None:
    """While it works it answers no health check. Others wait on the node, up to its limit."""
    replica = node.supervisor.replicas[ReplicaId("r1")]
    pid = replica.engine.pid if replica.engine else 0

    async def ask(wait_s: float) -> int:
        async with transcribe(node, wait_s) as response:
            await response.read()
            return int(response.status)

    first = asyncio.create_task(ask(3.0))

    async def is_busy() -> bool:
        return replica.admission.running == 1

    await until("it is busy", is_busy)
    others = [asyncio.create_task(ask(0.0)) for _ in range(2)]

    async def is_full() -> bool:
        return replica.admission.running == 3

    await until("two wait", is_full)
    assert await ask(0.0) == 429
    assert await asyncio.gather(first, *others) == [200, 200, 200]
    assert replica.engine is not None
    assert replica.engine.pid == pid


async def test_it_ends_with_its_children(node: Node) -> None:
    assert len(processes()) == 2
    tombstone = Tombstone(
        replica_id=ReplicaId("r1"), generation=Generation(2), reason="", drain_timeout_s=5.0
    )
    node.supervisor.end(tombstone)

    async def has_stopped() -> bool:
        return node.supervisor.states()[ReplicaId("r1")] is ReplicaState.STOPPED

    await until("it has stopped", has_stopped)
    assert processes() == set()

"""The real door over a real mock engine: admission, refusals, the load told back, and breaks."""

import asyncio
import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
from aiohttp import web

from isochrone.service.http_server import serve_http
from isochrone.wire import headers
from isochrone.wire.artifact import manifest_digest
from isochrone.wire.assignment import ReplicaSpec, Tombstone
from isochrone.wire.ids import Generation, NodeId, ReplicaId
from isochrone.wire.model import Artifact, ArtifactFile, EngineSettings
from isochrone.wire.report import ReplicaState
from nodeagent.api.door import Door
from nodeagent.api.metrics_page import add_metrics
from nodeagent.api.siblings import FRESH_S, Siblings
from nodeagent.config import NodeConfig
from nodeagent.decide.admission import Held
from nodeagent.drivers import DRIVERS
from nodeagent.drivers.driver import Command
from nodeagent.host.artifacts import Artifacts
from nodeagent.host.engines import Engines, Started
from nodeagent.host.link import Link
from nodeagent.host.sources import Sources
from nodeagent.supervisor import Supervisor
from tests.builders import a_spec
from tests.postgres import a_folder
from tests.system.harness import until


class Node(NamedTuple):
    """A supervisor and its door, without a scheduler."""

    supervisor: Supervisor
    http: aiohttp.ClientSession
    address: str
    artifact: Artifact

    def spec(self, name: str = "r1", in_flight: int = 10_000, **options: str) -> ReplicaSpec:
        engine = EngineSettings(
            driver="mock",
            kv_memory_bytes=1,
            tokens_in_flight_max=in_flight,
            options={"itl_ms": "20", **options},
        )
        return a_spec(name, engine=engine, artifact=self.artifact)

    async def warm(self, spec: ReplicaSpec) -> None:
        self.supervisor.begin(spec)

        async def is_warm() -> bool:
            return self.supervisor.states()[spec.replica_id] is ReplicaState.WARM

        await until("warm", is_warm, 15.0)

    async def idle(self, name: str = "r1") -> bool:
        load = self.supervisor.replicas[ReplicaId(name)].in_flight.load()
        return load == headers.Load(0, 0, 0, 0, 0)

    def sibling(self, name: str) -> headers.Sibling:
        """As a router names it: ten tokens to read, a millisecond for each of those before it."""
        return headers.Sibling(ReplicaId(name), NodeId(self.address), self.address, 10, 10, 1000)

    def ask(
        self,
        name: str = "r1",
        tokens: int = 3,
        queue_tokens_max: int | None = None,
        siblings: Sequence[headers.Sibling] = (),
        sent: Mapping[str, str] | None = None,
        **extra: Any,
    ) -> Any:
        told = {headers.REPLICA: name, headers.TOKENS: f"p=10;o={tokens}"}
        sent = {**told, **(sent or {})}
        if queue_tokens_max is not None:
            sent[headers.QUEUE_TOKENS_MAX] = str(queue_tokens_max)
        if siblings:
            sent[headers.SIBLINGS] = headers.format_siblings(siblings)
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": tokens,
            "stream": True,
            **extra,
        }
        return self.http.post("/v1/chat/completions", json=body, headers=sent)


@asynccontextmanager
async def a_node() -> AsyncIterator[Node]:
    folder = a_folder("iso-")
    (folder / "model").mkdir()
    (folder / "model" / "m.gguf").write_bytes(b"GGUF")
    file = ArtifactFile(path="m.gguf", size_bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    source = f"file:{folder / 'model'}"
    artifact = Artifact(source=source, files=(file,), digest=manifest_digest([file]))
    config = NodeConfig(name="n1", schedulers=(), state=folder, address="", stall_s=3.0)
    supervisor = Supervisor(
        config=config,
        artifacts=Artifacts(
            folder / "artifacts",
            Sources(private=True, hf_url=""),
            1 << 30,
            link=Link(0, time.monotonic),
        ),
        engines=Engines(folder / "engines", 1),
        clock=time.monotonic,
        chance=random.Random(1),
        on_change=lambda: None,
    )
    async with (
        serve_http(Door(supervisor, Siblings(None, time.monotonic)).app(), "127.0.0.1", 0) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):
        yield Node(supervisor, http, f"127.0.0.1:{port}", artifact)
    await supervisor.leave(keep_engines=False)
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a sibling given the time that a busy machine takes to answer."""
    monkeypatch.setattr("nodeagent.api.siblings.ASK_TIMEOUT_S", 10.0)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with a_node() as node:
        yield node


async def test_a_longer_queue_than_was_chosen_by_turns_away_and_tells_the_load(node: Node) -> None:
    await node.warm(node.spec())
    held = node.supervisor.replicas[ReplicaId("r1")].in_flight.take(100, 1, 60)
    assert held is not None
    async with node.ask(queue_tokens_max=59) as response:
        assert (response.status, response.headers[headers.REFUSED]) == (429, "queued")
        told = headers.parse_load(response.headers[headers.LOAD])
        assert told == headers.Load(100, 1, 1, 0, 60)
    for most in (60, None):
        async with node.ask(queue_tokens_max=most) as response:
            assert response.status == 200
            await response.read()
    held.release()
    await until("given back", node.idle, 5.0)


async def test_each_router_is_told_what_there_is_of_others(node: Node) -> None:
    await node.warm(node.spec())
    in_flight = node.supervisor.replicas[ReplicaId("r1")].in_flight
    held = in_flight.take(100, 7, 60, router="a", prefill_ms=1e9, now_s=time.monotonic())
    assert held is not None

    async def others(router: str) -> tuple[int, int]:
        async with node.http.get("/ping", headers={headers.ROUTER: router}) as ping:
            told = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
        return told.others_unread, told.others_decode

    assert await others("a") == (0, 0)
    assert await others("b") == (60, 7)
    assert await others("") == (-1, -1)
    held.release()
    assert await others("b") == (0, 0)


async def test_a_request_goes_on_to_a_sibling_where_it_begins_sooner(node: Node) -> None:
    """On the same node, through another node's door, and nowhere where none is any better."""
    async with a_node() as other:
        await asyncio.gather(
            node.warm(node.spec()), node.warm(node.spec("r2")), other.warm(other.spec("r3"))
        )
        named = [node.sibling("r1"), node.sibling("r2"), other.sibling("r3")]

        async def passed(most: int | None = None) -> str:
            async with node.ask(queue_tokens_max=most, siblings=named) as response:
                assert response.status == 200
                assert headers.parse_load(response.headers[headers.LOAD]) is not None
                assert (await response.text()).endswith("data: [DONE]\n\n")
                return str(response.headers.get(headers.PASSED, ""))

        def waiting(on: Node, name: str, tokens: int) -> Held:
            held = on.supervisor.replicas[ReplicaId(name)].in_flight.take(tokens, 1, tokens)
            assert held is not None
            return held

        assert await passed() == ""
        at = [waiting(node, "r1", 300)]
        assert await passed() == "r2"
        at.append(waiting(node, "r2", 200))
        assert await passed() == "r3"
        assert await passed(most=50) == "r3"
        at.append(waiting(other, "r3", 298))
        await asyncio.sleep(2 * FRESH_S)
        assert await passed() == "r2"
        at.append(waiting(node, "r2", 98))
        assert await passed() == ""
        async with node.ask(queue_tokens_max=50, siblings=named) as response:
            assert response.headers[headers.REFUSED] == headers.QUEUED
        for held in at:
            held.release()
        for on, name in ((node, "r1"), (node, "r2"), (other, "r3")):
            await until("given back", partial(on.idle, name), 5.0)
        assert node.supervisor.relaying == 0


async def test_what_is_passed_on_ends_with_its_caller_and_breaks_with_its_engine(
    node: Node,
) -> None:
    async with a_node() as other:
        await asyncio.gather(node.warm(node.spec()), other.warm(other.spec("r3")))
        named = [node.sibling("r1"), other.sibling("r3")]
        held = node.supervisor.replicas[ReplicaId("r1")].in_flight.take(300, 1, 300)
        assert held is not None
        async with node.ask(tokens=3000, siblings=named) as response:
            await response.content.readany()
            assert response.headers[headers.PASSED] == "r3"
            assert node.supervisor.relaying == 1
            assert not await other.idle("r3")
        await until("the caller's leaving went on", partial(other.idle, "r3"), 5.0)
        engine = other.supervisor.replicas[ReplicaId("r3")].engine
        assert engine is not None
        async with node.ask(tokens=3000, siblings=named) as response:
            await response.content.readany()
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await response.read()
        # Its engine is gone: whom it was sent to takes it.
        async with node.ask(siblings=named) as response:
            assert (response.status, headers.PASSED in response.headers) == (200, False)
            await response.read()
        held.release()
    # Its node is gone: asking costs no more than its timeout.
    held = node.supervisor.replicas[ReplicaId("r1")].in_flight.take(300, 1, 300)
    assert held is not None
    async with node.ask(siblings=named) as response:
        assert (response.status, headers.PASSED in response.headers) == (200, False)
        await response.read()
    held.release()
    await until("given back", node.idle, 5.0)


async def test_every_answer_tells_the_load_and_gives_it_back_once(node: Node) -> None:
    await node.warm(node.spec())
    async with node.ask(tokens=3) as response:
        assert response.status == 200
        assert headers.parse_load(response.headers[headers.LOAD]) == headers.Load(0, 3, 1, 0, 0)
        text = await response.text()
    assert text.endswith("data: [DONE]\n\n")
    await until("given back", node.idle, 5.0)


async def test_each_refusal_has_its_word(node: Node) -> None:
    async with node.ask("nobody") as response:
        assert (response.status, response.headers[headers.REFUSED]) == (404, "unknown_replica")
    node.supervisor.begin(node.spec("slow", fail_load="1"))
    async with node.ask("slow") as response:
        assert (response.status, response.headers[headers.REFUSED]) == (503, "loading")
    await node.warm(node.spec(in_flight=100))
    async with node.ask(tokens=80) as first:
        await first.content.readany()
        # The head's word is of when the prompt was read, as is a ping's.
        async with node.http.get("/ping") as ping:
            pinged = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
        assert headers.parse_load(first.headers[headers.LOAD]) == pinged
        assert (pinged.running, pinged.unread, pinged.prefill_tokens) == (1, 0, 0)
        async with node.ask(tokens=80) as second:
            assert (second.status, second.headers[headers.REFUSED]) == (429, "busy")
            assert second.headers["retry-after"] == "1"
        tombstone = Tombstone(replica_id=ReplicaId("r1"), generation=Generation(9), reason="test")
        node.supervisor.end(tombstone)
        async with node.ask() as third:
            assert third.headers[headers.REFUSED] == "draining"
        asked = {headers.REPLICA: "r1"}
        async with node.http.get("/ping", headers=asked) as ping:
            assert ping.headers[headers.REFUSED] == "draining"
        # What was running when the end was ordered is finished, not cut.
        assert (await first.text()).endswith("data: [DONE]\n\n")
    async with node.http.get("/ping") as ping:
        assert ping.status == 204
        # One that drains is nobody's choice: of its load nothing is told.
        assert ping.headers[headers.LOADS] == ""

    async def is_stopped() -> bool:
        return node.supervisor.states()[ReplicaId("r1")] is ReplicaState.STOPPED

    await until("stopped", is_stopped, 15.0)


async def test_an_engine_without_memory_is_told_as_full_before_anybody_asks(node: Node) -> None:
    await node.warm(node.spec(in_flight=500, memory_full="1"))

    async def is_told() -> bool:
        asked = {headers.ROUTER: "a"}
        async with node.http.get("/ping", headers=asked) as ping:
            load = headers.parse_loads(ping.headers[headers.LOADS])[ReplicaId("r1")]
        return load.others_decode >= 500

    await until("told", is_told, 5.0)
    async with node.ask() as response:
        assert (response.status, response.headers[headers.REFUSED]) == (429, "busy")
        told = headers.parse_load(response.headers[headers.LOAD])
        assert told is not None and told.decode_tokens >= 500


async def test_a_caller_that_leaves_frees_the_engine_and_the_count(node: Node) -> None:
    await node.warm(node.spec())
    async with node.ask(tokens=3000) as response:
        await response.content.readany()
        assert not await node.idle()
    await until("given back", node.idle, 5.0)
    engine = node.supervisor.replicas[ReplicaId("r1")].engine
    assert engine is not None

    async def engine_is_idle() -> bool:
        stats = await engine.stats()
        return stats is not None and stats.running == 0

    await until("the engine stopped", engine_is_idle, 5.0)


async def test_an_engine_that_dies_in_mid_answer_breaks_the_connection(node: Node) -> None:
    """An abort, not an end: the router must not take a cut answer for a whole one."""
    await node.warm(node.spec())
    engine = node.supervisor.replicas[ReplicaId("r1")].engine
    assert engine is not None
    async with node.ask(tokens=3000) as response:
        await response.content.readany()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await response.read()
    await until("given back", node.idle, 5.0)

    async def is_warm_again() -> bool:
        replica = node.supervisor.replicas[ReplicaId("r1")]
        return replica.state is ReplicaState.WARM and len(replica.breaks) == 1

    await until("started again", is_warm_again, 15.0)


async def test_an_error_of_the_engine_is_passed_on_as_it_is(node: Node) -> None:
    await node.warm(node.spec())
    async with node.ask(tokens=10_000_000) as response:
        assert response.status == 400
        assert (await response.json())["error"]["code"] == "context_length_exceeded"
    async with node.http.post(
        "/v1/chat/completions", data=b"{", headers={headers.REPLICA: "r1"}
    ) as response:
        assert response.status == 400
    await until("given back", node.idle, 5.0)


async def test_the_metrics_page_tells_of_each_warm_engine_too(node: Node) -> None:
    await node.warm(node.spec("r1"))
    await node.warm(node.spec("r2"))
    async with node.ask("r2", tokens=2) as response:
        await response.read()
    alone = web.Application()
    add_metrics(alone, node.supervisor)
    async with (
        serve_http(alone, "127.0.0.1", 0) as port,
        node.http.get(f"http://127.0.0.1:{port}/metrics") as private,
        node.http.get("/metrics") as page,
    ):
        assert private.status == 200
        text = await page.text()
    assert 'isochrone_node_replicas{state="warm"} 2.0' in text
    # One more each: their first, before they are warm.
    assert 'isochrone_engine_tokens_out_total{replica="r2"} 3' in text
    assert 'isochrone_engine_tokens_out_total{replica="r1"} 1' in text


async def test_an_engine_that_reads_no_header_has_the_salt_in_the_body(node: Node) -> None:
    await node.warm(node.spec())
    engine = node.supervisor.replicas[ReplicaId("r1")].engine
    assert engine is not None
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with serve_http(app, "127.0.0.1", 0) as port:
        await engine.http.close()
        engine.http = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        engine._driver = DRIVERS["vllm"]
        salted = {headers.CACHE_SALT: "acme"}
        async with node.ask(cache_salt="other", sent=salted) as response:
            assert response.status == 200
    assert seen[0]["cache_salt"] == "acme"
    assert seen[0]["max_tokens"] == 3


async def test_a_pid_used_again_is_left_alone_and_orphans_of_an_engine_are_not(
    tmp_path: Path,
) -> None:
    """After a crash of the agent: the leader's pid may be another's, or its children alone live."""
    engines = Engines(tmp_path / "engines", 1)

    def left_behind(name: str, pid: int, started: int) -> None:
        folder = tmp_path / "engines" / name
        folder.mkdir()
        command = Command(arguments=("x",), base_url="http://localhost")
        kept = Started(pid=pid, started=started, command=command, spec=a_spec(name))
        (folder / "process.json").write_bytes(msgspec.json.encode(kept))

    other = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    left_behind("reused", other.pid, started=1)
    parent = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        "sleep 60 >/dev/null 2>&1 & echo $!",
        start_new_session=True,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    orphan = int(await parent.stdout.readline())
    await parent.wait()
    left_behind("orphaned", parent.pid, started=1)
    assert engines.survivors() == []
    assert other.returncode is None

    async def orphan_is_gone() -> bool:
        stat = Path(f"/proc/{orphan}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    await until("the orphan is killed", orphan_is_gone, 5.0)
    other.kill()
    await other.wait()

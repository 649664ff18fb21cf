"""Two engines of one node: KV goes from one to the other through memory, whatever fails."""

import asyncio
import os
import shutil
import signal
import socket as socket_module
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from isochrone.service.windows.window_pool import WINDOWS_MAX
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing
from isochrone.wire.kv.kv_transfer import WINDOW_SOCKET_NAME
from nodeagent import metrics
from ops.golden import tiny
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.integration.nodeagent.test_two_legs import (
    a_prompt,
    artifact_of,
    is_warm,
    prefilled,
    spec_of,
)
from tests.system.harness import until

TOKENS = 12


class TwoEngines(NamedTuple):
    """A node with the replicas `d`, which answers, and `p` of the same deployment."""

    node: Node

    def engine(self, name: str) -> Any:
        engine = self.node.supervisor.replicas[ReplicaId(name)].engine
        assert engine is not None
        return engine

    def folder(self, name: str) -> Path:
        return Path(self.engine(name).record.command.socket).parent

    async def stats(self, name: str) -> dict[str, float]:
        async with self.engine(name).http.get("/stats") as answer:
            return dict(await answer.json())

    def peers(self, *names: str, fast: str = "p") -> str:
        """Return the header that names these replicas, all but one slow at reading prompts."""
        address = self.node.address
        return format_peer_replicas(
            [
                PeerReplica(
                    ReplicaId(name),
                    NodeId(address),
                    address,
                    200,
                    20 if name == fast else 4000,
                    100 if name == fast else 20_000,
                )
                for name in names
            ]
        )

    async def ask(
        self, prompt: list[int], name: str = "d", tenant: str = "t", **sent: str
    ) -> tuple[str, str]:
        """Return the text of an answer, and where its prompt's KV was found."""
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        head = {
            headers.REPLICA: name,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={len(prompt)};o={TOKENS}",
            headers.PENDING_PREFILL_TOKENS: str(len(prompt)),
            headers.PREFILL_MS: "4000",
            **sent,
        }
        async with self.node.http.post("/v1/completions", json=body, headers=head) as answer:
            content = await answer.json()
            assert answer.status == 200, content
            text = content["choices"][0]["text"]
            return text, answer.headers.get(kv_sharing.KV_FOUND, "")

    async def prefilled(self, tenant: str = "t") -> None:
        """Have `p` read a new prompt, and compare the answer with that of `d` alone."""
        prompt, before = a_prompt(), prefilled()
        alone, _ = await self.ask(prompt, tenant="alone")
        text, _ = await self.ask(
            prompt, tenant=tenant, **{headers.PREFILL_REPLICAS: self.peers("d", "p")}
        )
        assert text == alone != ""
        assert prefilled() == before + 1

    async def is_clean(self) -> bool:
        found = [await self.stats(name) for name in ("d", "p")]
        return not any(
            one["kv_windows_leased"] or one["kv_transfer_held_blocks"] or one["kv_blocks_used"]
            for one in found
        )


@pytest.fixture(autouse=True)
def long_probe_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the nodes enough time to answer on a busy machine."""
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.prefill_leg.TIMEOUT_MIN_S", 20.0)
    monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MIN_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MAX_S", 10.0)


@pytest.fixture
async def two() -> AsyncIterator[TwoEngines]:
    folder = Path(tempfile.mkdtemp(prefix="iso-"))
    tiny.write_folder(folder, "qwen3")
    tiny.write_tokenizer(folder)
    try:
        async with a_node() as node:
            artifact = artifact_of(folder)
            for name in ("d", "p"):
                spec = spec_of(name, artifact)
                engine = msgspec.structs.replace(spec.engine, share_kv=True)
                node.supervisor.start(msgspec.structs.replace(spec, engine=engine))
            await until("warm", partial(is_warm, node), 120.0)
            yield TwoEngines(node)
    finally:
        shutil.rmtree(folder)


async def test_blocks_go_through_memory_whatever_fails(two: TwoEngines) -> None:
    """One test, because starting engines takes most of its time."""
    await two.prefilled()
    assert (await two.stats("p"))["kv_window_leases_total"] == 1
    await check_fetch(two)
    await check_strangers(two)
    await check_handoff(two)
    await check_no_free_window(two)
    await check_without_socket(two)
    await check_deaths(two)


async def check_fetch(two: TwoEngines) -> None:
    """A prefix that `p` has is fetched by `d`."""
    prompt, before = a_prompt(), (await two.stats("p"))["kv_window_leases_total"]
    bytes_before = metrics.KV_FETCH_BYTES._value.get()
    expected, _ = await two.ask(prompt, name="p")
    text, found = await two.ask(prompt, **{kv_sharing.KV_HOLDERS: two.peers("d", "p")})
    assert (text, found) == (expected, "peer=192")
    assert (await two.stats("p"))["kv_window_leases_total"] == before + 1
    block_bytes = (metrics.KV_FETCH_BYTES._value.get() - bytes_before) / 12
    assert block_bytes > 1000, "the bytes of the blocks, not of their places"
    await until("nothing is held", two.is_clean, 10.0)


async def check_strangers(two: TwoEngines) -> None:
    """A request with a lease that the node has not issued gets the blocks in the stream: the agent
    takes them from a window of its own."""
    before = (await two.stats("p"))["kv_window_leases_total"]
    sent = {"x-isochrone-kv-window": "0" * 32, "x-isochrone-kv-transfer": "1" * 32}
    sent |= {"x-isochrone-leg": "prefill", headers.REPLICA: "p", headers.TOKENS: "p=200;o=0"}
    async with two.node.http.post(
        "/v1/completions", json={"prompt": a_prompt(), "max_tokens": 1}, headers=sent
    ) as answer:
        assert answer.status == 200
        assert len(await answer.read()) == answer.content_length
        assert (answer.content_length or 0) > 12 * 1000
        assert "x-isochrone-kv-window" not in answer.headers
    assert (await two.stats("p"))["kv_window_leases_total"] == before + 1


async def check_handoff(two: TwoEngines) -> None:
    """A replica that takes over a request of another one on its node fetches the prefix from it."""
    prompt = a_prompt()
    expected, _ = await two.ask(prompt, name="p")
    queued = two.node.supervisor.replicas[ReplicaId("p")].admission.admit(10_000, 1, 10_000)
    assert queued is not None
    replicas = two.peers("p", "d", fast="")
    sent = {headers.PEER_REPLICAS: replicas, kv_sharing.KV_HOLDERS: replicas}
    handed_off = await two.ask(prompt, name="p", **sent)
    queued.release()
    assert handed_off == (expected, "peer=192")


async def check_no_free_window(two: TwoEngines) -> None:
    """While all windows of the sender are in use, blocks come through the agent, and only then."""
    before = await two.stats("p")
    async with AsyncExitStack() as held:
        for number in range(WINDOWS_MAX):
            await held.enter_async_context(a_held_window(two, f"{number:032x}"))
        await two.prefilled("crowded")
        prompt = a_prompt()
        expected, _ = await two.ask(prompt, name="p")
        text, found = await two.ask(prompt, **{kv_sharing.KV_HOLDERS: two.peers("d", "p")})
        assert (text, found) == (expected, "peer=192")
        crowded = await two.stats("p")
    assert crowded["kv_window_leases_total"] == before["kv_window_leases_total"] + WINDOWS_MAX
    assert crowded["kv_windows_lacking_total"] == before["kv_windows_lacking_total"] + 2
    await until("nothing is held", two.is_clean, 10.0)
    await two.prefilled("roomy")
    after = await two.stats("p")
    assert after["kv_window_leases_total"] == crowded["kv_window_leases_total"] + 1
    await until("nothing is held", two.is_clean, 10.0)


@asynccontextmanager
async def a_held_window(two: TwoEngines, lease: str) -> AsyncIterator[None]:
    """Take a window of `p` as a receiver does, and keep it."""
    sent = {"x-isochrone-kv-window": lease, "x-isochrone-kv-transfer": lease}
    sent |= {"x-isochrone-leg": "prefill"}
    body = {"prompt": a_prompt(), "max_tokens": 1}
    leases = (await two.stats("p"))["kv_windows_leased"]
    leg = asyncio.create_task(two.engine("p").http.post("/v1/completions", json=body, headers=sent))
    with socket_module.socket(socket_module.AF_UNIX) as link:
        link.settimeout(10.0)

        async def is_leased() -> bool:
            return (await two.stats("p"))["kv_windows_leased"] > leases

        await until("the window is leased", is_leased, 10.0)
        link.connect(str(two.folder("p") / WINDOW_SOCKET_NAME))
        link.sendall(lease.encode())
        await asyncio.to_thread(link.recv, 1)
        yield
    leg.cancel()
    await asyncio.wait({leg})
    if not leg.cancelled():
        leg.result().close()


async def check_without_socket(two: TwoEngines) -> None:
    """Without the socket for windows, blocks come through the agent."""
    before = (await two.stats("p"))["kv_window_leases_total"]
    socket = two.folder("p") / WINDOW_SOCKET_NAME
    socket.rename(socket.with_name("moved.sock"))
    await two.prefilled("other")
    # One that nobody listens at costs one recomputation; then blocks come through the agent.
    with socket_module.socket(socket_module.AF_UNIX) as dead:
        dead.bind(str(socket))
    prompt = a_prompt()
    alone, _ = await two.ask(prompt, tenant="alone")
    sent = {headers.PREFILL_REPLICAS: two.peers("d", "p")}
    assert (await two.ask(prompt, **sent))[0] == alone
    # The node remembers that the window failed.
    await two.prefilled("third")
    socket.unlink()
    socket.with_name("moved.sock").rename(socket)
    after = (await two.stats("p"))["kv_window_leases_total"]
    assert after == before + 1, "that of the transfer that failed"
    await until("nothing is held", two.is_clean, 10.0)


async def check_deaths(two: TwoEngines) -> None:
    """An engine that is killed leaves nothing, and its successor gives windows away."""
    for name in ("p", "d"):
        os.killpg(two.engine(name).pid, signal.SIGKILL)
        await two.engine(name).exited.wait()
        await until("warm", partial(is_warm, two.node), 120.0)
        assert (two.folder(name) / WINDOW_SOCKET_NAME).is_socket()
    await two.prefilled("after")
    await until("nothing is held", two.is_clean, 10.0)

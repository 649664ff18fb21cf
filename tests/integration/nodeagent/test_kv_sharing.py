"""A prefix computed on one node is used on another, from the holder or from a copy; wrong blocks
cost a recomputation and nothing else."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from aiohttp import web

from isochrone.service.network.http_server import serve_http
from isochrone.wire.http import headers
from isochrone.wire.http.headers import PeerReplica
from isochrone.wire.http.replica_list import format_peer_replicas
from isochrone.wire.ids import NodeId, ReplicaId
from isochrone.wire.kv import kv_sharing, kv_transfer
from isochrone.wire.kv.kv_sharing import FoundTokens, parse_found
from isochrone.wire.kv.transfer_frames import TransferHead, encode_block, encode_head
from isochrone.wire.models.model import EngineSettings
from isochrone.wire.peers.assignment import ReplicaSpec
from ops.golden import tiny
from tests.builders import a_spec
from tests.chaos.cable import a_cable
from tests.integration.nodeagent.test_data_plane import Node, a_node
from tests.integration.nodeagent.test_two_legs import (
    SLOW_LINK_BYTES_PER_S,
    a_prompt,
    artifact_of,
    is_warm,
    prefilled,
    refused_formats,
)
from tests.system.harness import until

NAMES = ("a", "b", "c")
PROMPT_BLOCKS = 12
"""Whole blocks of a prompt of 200 tokens before its last token."""

FAULTS = (
    "wrong digest",
    "wrong content",
    "truncated",
    "endless",
    "other format",
    "says other format",
    "silent",
)


class SharedAnswer(NamedTuple):
    """The text of an answer, and where its prompt's KV was found."""

    text: str
    found: FoundTokens


class SharingNodes(NamedTuple):
    """Three nodes of a PoP: `c` has tiers below the device."""

    nodes: dict[str, Node]

    def peer(self, name: str) -> PeerReplica:
        address = self.nodes[name].address
        # Slow at computing, so that fetching pays.
        return PeerReplica(ReplicaId(name), NodeId(address), address, 200, 4000, 20_000)

    async def ask(
        self,
        name: str,
        prompt: list[int],
        *others: PeerReplica,
        keeper: str = "",
        tenant: str = "t",
        peers: str = "",
        readers: Sequence[str] = (),
        token_us: int = 20_000,
    ) -> SharedAnswer:
        """Send a request as a router does, with the replicas that may have its prefix.

        `readers` may read the prompt. The replica itself is said to take `token_us` for a token.
        """
        sent = {
            headers.REPLICA: name,
            headers.CACHE_SALT: tenant,
            headers.TOKENS: f"p={len(prompt)};o=8",
            headers.PENDING_PREFILL_TOKENS: str(len(prompt)),
            headers.PREFILL_MS: "4000",
        }
        if others:
            here = msgspec.structs.replace(self.peer(name), token_us=token_us)
            holders = [here, *others]
            sent[kv_sharing.KV_HOLDERS] = format_peer_replicas(holders)
            sent[kv_sharing.KV_KEEPER] = keeper
        if peers:
            sent[headers.PEER_REPLICAS] = peers
        if readers:
            fast = [
                msgspec.structs.replace(self.peer(reader), prefill_ms=20, token_us=100)
                for reader in readers
            ]
            sent[headers.PREFILL_REPLICAS] = format_peer_replicas([self.peer(name), *fast])
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        node = self.nodes[name]
        async with node.http.post("/v1/completions", json=body, headers=sent) as response:
            answer = await response.json()
            assert response.status == 200, answer
            found = parse_found(response.headers.get(kv_sharing.KV_FOUND, ""))
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == sum(msgspec.structs.astuple(found))
        return SharedAnswer(answer["choices"][0]["text"], found)

    async def stat(self, name: str, field: str) -> float:
        engine = self.nodes[name].supervisor.replicas[ReplicaId(name)].engine
        assert engine is not None
        async with engine.http.get("/stats") as response:
            return float((await response.json())[field])

    async def holds_nothing(self, name: str) -> bool:
        fields = ("kv_transfer_held_blocks", "kv_transfers_waiting", "kv_blocks_used")
        return not sum([await self.stat(name, field) for field in fields])


def spec_of(name: str, folder: Path) -> ReplicaSpec:
    options = {"batch_tokens_max": "64"}
    if name == "c":
        tiers = {"kv_host_bytes": 1 << 20, "kv_file_bytes": 1 << 22, "kv_folder": folder / "kv"}
        options |= {option: str(value) for option, value in tiers.items()}
    engine = EngineSettings(
        driver="embedded",
        kv_memory_bytes=4 * 1024 * 1024,
        tokens_in_flight_max=100_000,
        options=options,
        share_kv=True,
    )
    artifact = artifact_of(folder / "model")
    return a_spec(name, engine=engine, artifact=artifact, context_tokens=512)


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nodes enough time to answer, and to send, on a busy machine."""
    monkeypatch.setattr("nodeagent.api.peer_replicas.PROBE_TIMEOUT_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MIN_S", 10.0)
    monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.LOCATE_TIMEOUT_MAX_S", 10.0)
    # Each liar is another node, and so are the good ones after it.
    monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.BACKOFF_S", 0.0)
    monkeypatch.setattr("nodeagent.decide.requests.kv_fetch.AGING_S", 0.0)


@pytest.fixture
async def pop() -> AsyncIterator[SharingNodes]:
    folder = Path(tempfile.mkdtemp(prefix="iso-"))
    (folder / "model").mkdir()
    tiny.write_folder(folder / "model", "qwen3")
    tiny.write_tokenizer(folder / "model")
    try:
        async with AsyncExitStack() as stack:
            nodes = {name: await stack.enter_async_context(a_node()) for name in NAMES}
            for name, node in nodes.items():
                node.supervisor.start(spec_of(name, folder))
            for node in nodes.values():
                await until("warm", partial(is_warm, node), 120.0)
            yield SharingNodes(nodes)
    finally:
        shutil.rmtree(folder)


async def test_a_prefix_is_computed_once_in_a_pop_whatever_fails(pop: SharingNodes) -> None:
    """One test, because starting engines takes most of its time."""
    await check_fetch_from_holder(pop)
    await check_slow_link(pop)
    await check_handoff(pop)
    await check_faults(pop)
    await check_legs_after_broken_fetches(pop)
    await check_copy_outlives_its_source(pop)


async def check_fetch_from_holder(pop: SharingNodes) -> None:
    prompt, tokens = a_prompt(), PROMPT_BLOCKS * 16
    first = await pop.ask("a", prompt)
    assert first.found == FoundTokens()
    second = await pop.ask("b", prompt, pop.peer("a"))
    assert second == SharedAnswer(first.text, FoundTokens(peer=tokens))
    again = await pop.ask("b", prompt, pop.peer("a"))
    assert again == SharedAnswer(first.text, FoundTokens(device=tokens))
    # With tiers below the device, they are stored there, and restored if that is faster here.
    tiered = await pop.ask("c", prompt, pop.peer("a"))
    assert tiered.text == first.text
    assert tiered.found in (FoundTokens(peer=tokens), FoundTokens())
    assert await pop.stat("c", "kv_host_blocks") >= PROMPT_BLOCKS
    # The beginning is here, the rest is fetched.
    longer = prompt[:100] + a_prompt()[:100]
    await pop.ask("a", longer)
    part = await pop.ask("b", longer, pop.peer("a"))
    assert (part.found.device, part.found.peer) == (96, (len(longer) - 1) // 16 * 16 - 96)
    # Another tenant finds none of it.
    other = await pop.ask("b", prompt, pop.peer("a"), tenant="other")
    assert other == SharedAnswer(first.text, FoundTokens())


async def check_slow_link(pop: SharingNodes) -> None:
    """Over 1 Mbit/s a prefix takes 1.2 s. It is fetched where it would be computed in 4 s. Where it
    would be computed in 0.4 s, the fetch is given up, and the rest is computed."""
    port = int(pop.nodes["a"].address.rpartition(":")[2])
    for token_us in (20_000, 2_000):
        prompt = a_prompt()
        first = await pop.ask("a", prompt)
        async with a_cable(port) as cable:
            cable.down.bytes_per_s = SLOW_LINK_BYTES_PER_S
            address = f"127.0.0.1:{cable.port}"
            slow = msgspec.structs.replace(pop.peer("a"), node_id=NodeId(address), address=address)
            answer = await pop.ask("b", prompt, slow, token_us=token_us)
        assert answer.text == first.text
        is_whole = answer.found == FoundTokens(peer=PROMPT_BLOCKS * 16)
        assert is_whole == (token_us == 20_000), answer
    for name in ("a", "b"):
        await until("nothing is held", partial(pop.holds_nothing, name), 20.0)


async def check_handoff(pop: SharingNodes) -> None:
    """A replica that takes over a request fetches its prefix from the one that handed it off."""
    prompt, tokens = a_prompt(), PROMPT_BLOCKS * 16
    first = await pop.ask("a", prompt)
    queued = pop.nodes["a"].supervisor.replicas[ReplicaId("a")].admission.admit(10_000, 1, 10_000)
    assert queued is not None
    peers = format_peer_replicas([pop.peer("a"), pop.peer("b")])
    handed_off = await pop.ask("a", prompt, pop.peer("b"), keeper="b", peers=peers)
    queued.release()
    assert handed_off == SharedAnswer(first.text, FoundTokens(peer=tokens))


async def check_faults(pop: SharingNodes) -> None:
    for fault in FAULTS:
        prompt, refused = a_prompt(), refused_formats("fetch")
        alone = await pop.ask("a", prompt, tenant="alone")
        async with a_liar(pop, fault) as liar:
            for name in ("b", "c"):
                answer = await pop.ask(name, prompt, liar, tenant=fault)
                assert answer.text == alone.text != "", fault
        assert refused_formats("fetch") - refused == 2 * (fault == "says other format")
    for name in ("b", "c"):
        await until("nothing is held", partial(pop.holds_nothing, name), 20.0)


async def check_legs_after_broken_fetches(pop: SharingNodes) -> None:
    """A prefill replica sends what a broken fetch did not bring; after wrong blocks, nothing."""
    for fault in ("truncated", "silent", "wrong content"):
        prompt, before = a_prompt(), prefilled()
        first = await pop.ask("a", prompt, tenant="alone")
        await pop.ask("a", prompt, tenant=fault)
        computed = await pop.stat("c", "prompt_tokens_total")
        received = await pop.stat("b", "kv_transfer_received_blocks_total")
        async with a_cut_holder(pop, fault) as holder:
            answer = await pop.ask("b", prompt, holder, tenant=fault, readers=("c",))
        assert answer.text == first.text, fault
        received = await pop.stat("b", "kv_transfer_received_blocks_total") - received
        computed = await pop.stat("c", "prompt_tokens_total") - computed
        if fault == "wrong content":
            assert (prefilled() - before, received, computed) == (0, 0, 0)
        else:
            assert (prefilled() - before, received) == (1, PROMPT_BLOCKS), fault
    for name in NAMES:
        await until("nothing is held", partial(pop.holds_nothing, name), 20.0)


@asynccontextmanager
async def a_cut_holder(pop: SharingNodes, fault: str) -> AsyncIterator[PeerReplica]:
    """Run a node that sends half of the blocks of `a`, and then what is wrong."""
    source = pop.nodes["a"].http

    async def relay(request: web.Request) -> web.StreamResponse:
        sent = {**request.headers, headers.REPLICA: "a"}
        async with source.post(request.path, data=await request.read(), headers=sent) as answer:
            whole = await answer.read()
            head = {"content-type": answer.headers["content-type"]}
        if request.path == kv_sharing.LOCATE_PATH:
            return web.Response(body=whole, headers=head)
        response = web.StreamResponse(headers=head)
        await response.prepare(request)
        half = len(whole) // 2
        await response.write(whole[:half])
        if fault == "silent":
            await asyncio.sleep(60)
        if fault == "wrong content":
            await response.write(bytes(len(whole) - half))
        return response

    app = web.Application()
    app.router.add_post(kv_sharing.LOCATE_PATH, relay)
    app.router.add_post(kv_sharing.BLOCKS_PATH, relay)
    async with serve_http(app, "127.0.0.1", 0) as port:
        address = f"127.0.0.1:{port}"
        yield PeerReplica(ReplicaId("cut"), NodeId(address), address, 200, 2000, 10_000)


@asynccontextmanager
async def a_liar(pop: SharingNodes, fault: str) -> AsyncIterator[PeerReplica]:
    """Run a node that says it has everything, and sends something else."""
    head = await read_head(pop)
    block_bytes = head.block_bytes
    fingerprint = b"f" * 16 if fault == "other format" else head.fingerprint

    async def locate(request: web.Request) -> web.Response:
        kv_format = "0" * 32 if fault == "says other format" else fingerprint.hex()
        if fault == "other format":
            # An engine of a release that does not say.
            kv_format = ""
        located = kv_sharing.LocatedBlocks(
            blocks=PROMPT_BLOCKS, block_bytes=block_bytes, kv_format=kv_format
        )
        return web.Response(body=msgspec.json.encode(located))

    async def pong(request: web.Request) -> web.Response:
        return web.Response(status=204)

    async def send(request: web.Request) -> web.StreamResponse:
        assert fault != "says other format", "it is not asked for any block"
        digests = msgspec.msgpack.decode(await request.read(), type=kv_sharing.BlockQuery).digests
        sent_head = TransferHead(
            fingerprint=fingerprint,
            block_bytes=block_bytes,
            first_block=int(request.headers[kv_transfer.FIRST_BLOCK]),
            blocks=len(digests),
        )
        response = web.StreamResponse(headers={"content-type": kv_transfer.CONTENT_TYPE})
        await response.prepare(request)
        await response.write(encode_head(sent_head))
        if fault == "silent":
            await asyncio.sleep(60)
        if fault == "truncated":
            return response
        for digest in digests:
            name = b"w" * 32 if fault == "wrong digest" else digest
            frame_head, content = encode_block(name, bytes(block_bytes))
            if fault == "wrong content":
                content = b"x" + bytes(content)[1:]
            await response.write(bytes(frame_head) + bytes(content))
        while fault == "endless":
            await response.write(bytes(65536))
        return response

    app = web.Application()
    app.router.add_post(kv_sharing.LOCATE_PATH, locate)
    app.router.add_post(kv_sharing.BLOCKS_PATH, send)
    app.router.add_get("/ping", pong)
    async with serve_http(app, "127.0.0.1", 0) as port:
        address = f"127.0.0.1:{port}"
        # Computing is said to take two seconds, so that a silent holder does not hold up the test.
        yield PeerReplica(ReplicaId("liar"), NodeId(address), address, 200, 2000, 10_000)


async def read_head(pop: SharingNodes) -> TransferHead:
    """Return the head of a transfer from an engine: its form of blocks."""
    engine = pop.nodes["a"].supervisor.replicas[ReplicaId("a")].engine
    assert engine is not None
    sent = {
        kv_transfer.LEG: kv_transfer.PREFILL_LEG,
        kv_transfer.TRANSFER: "0" * 32,
    }
    body = {"prompt": a_prompt(), "max_tokens": 1}
    async with engine.http.post("/v1/completions", json=body, headers=sent) as leg:
        length = int.from_bytes((await leg.content.readexactly(5))[1:], "little")
        return msgspec.msgpack.decode(await leg.content.readexactly(length), type=TransferHead)


async def check_copy_outlives_its_source(pop: SharingNodes) -> None:
    prompt, tokens = a_prompt(), PROMPT_BLOCKS * 16
    kept = await pop.stat("c", "kv_kept_blocks_total")
    first = await pop.ask("a", prompt, pop.peer("c"), keeper="c")

    async def is_kept() -> bool:
        return await pop.stat("c", "kv_kept_blocks_total") == kept + PROMPT_BLOCKS

    await until("a copy is kept", is_kept, 20.0)
    holder = pop.peer("a")
    replica = pop.nodes["a"].supervisor.replicas[ReplicaId("a")]
    assert replica.engine is not None
    os.kill(replica.engine.record.pid, signal.SIGKILL)
    second = await pop.ask("b", prompt, holder, pop.peer("c"), keeper="c")
    assert second == SharedAnswer(first.text, FoundTokens(store=tokens))

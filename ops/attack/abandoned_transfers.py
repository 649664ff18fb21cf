"""Abandon a hundred thousand transfers of KV between two engines: is any memory left over?

    python -m ops.attack.abandoned_transfers [--count 100000] [--seed 1]

Two embedded engines of a tiny model are processes, and this program is the agent of both. Each
transfer is abandoned at a stage drawn from the seed: while the receiver waits for the prompt's KV,
while the sender reads the prompt, after some bytes of its answer, or after the receiver has got
some or all of the blocks. All connections are then closed. The table shows at each tenth how much
memory, descriptors and threads both engines have. The run fails if blocks or prompts are still held
then, or if an engine has more than GROWTH_BYTES_MAX beyond its memory after the first tenth. The
table that one run printed is in two_leg_kills.md.
"""

import asyncio
import json
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import msgspec
import psutil

from isochrone.wire.http import headers
from isochrone.wire.kv import kv_transfer
from ops.attack.kills import AttackFailed
from ops.attack.often import (
    FREE_S,
    PAUSE_S_MAX,
    do_often,
    in_mib,
    print_head,
    print_row,
    run_attack,
)
from ops.golden import tiny

BLOCKS: Final = 3
PROMPT: Final = list(range(16 * BLOCKS + 1))
"""Whole blocks and a token."""

TENANTS: Final = 100
"""More than fit into the memory for KV, so that some prompts are cached and others computed."""

KV_MEMORY_BYTES: Final = 1024**2
GROWTH_BYTES_MAX: Final = 8 * 1024**2
SHARE_MAX: Final = 1.3
"""A part of the streams, drawn up to this one, is passed on. So some transfers are whole, and their
requests are abandoned while they are answered."""

STORED_SHARE: Final = 0.7
"""Of so many of the whole transfers the receiver has stored all blocks when they are abandoned."""


class Stage(StrEnum):
    """The work in progress when a transfer is abandoned."""

    WAITING = "waiting"
    READING = "reading"
    SENDING = "sending"
    RECEIVING = "receiving"


class EngineState(NamedTuple):
    """What an engine has."""

    held: float
    """Blocks, and prompts that wait."""
    rss_bytes: int
    descriptors: int
    threads: int


class TransferringEngine:
    """One engine: its process and its socket."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self.socket = socket
        self._process = psutil.Process(process.pid)
        self._http = aiohttp.ClientSession(
            "http://engine", connector=aiohttp.UnixConnector(str(socket))
        )

    async def close(self) -> None:
        """Close the connections for statistics."""
        await self._http.close()

    async def state(self) -> EngineState:
        """Return what the engine has now."""
        async with self._http.get("/stats") as answer:
            stats = await answer.json()
        fields = ("kv_transfer_held_blocks", "kv_blocks_used", "kv_transfers_waiting")
        process = self._process
        return EngineState(
            sum(float(stats[field]) for field in fields),
            process.memory_info().rss,
            process.num_fds(),
            process.num_threads(),
        )

    async def stats(self, field: str) -> float:
        """Return one of the engine's own counts."""
        async with self._http.get("/stats") as answer:
            return float((await answer.json())[field])

    async def cached_blocks(self, transfer: str) -> int:
        """Wait for a prompt that waits for a transfer; return how many of its blocks are here."""
        async with self._http.get(kv_transfer.TRANSFERS_PATH + transfer) as answer:
            expected = msgspec.json.decode(await answer.read(), type=kv_transfer.ExpectedPrompt)
        return expected.cached_blocks

    @asynccontextmanager
    async def asked(
        self, path: str, sent: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Send a request, and abort its connection at the end; without a body, one in chunks."""
        length = "transfer-encoding: chunked" if body is None else f"content-length: {len(body)}"
        fields = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        head = f"POST {path} HTTP/1.1\r\nhost: engine\r\n{fields}{length}\r\n\r\n"
        reader, writer = await asyncio.open_unix_connection(str(self.socket))
        try:
            writer.write(head.encode() + (body or b""))
            await writer.drain()
            yield reader, writer
        finally:
            writer.transport.abort()


@asynccontextmanager
async def an_engine(folder: Path, name: str) -> AsyncIterator[TransferringEngine]:
    """Run an engine of the model in `folder` until the context ends."""
    own = folder / name
    own.mkdir()
    socket, config = own / "engine.sock", own / "engine.json"
    fields = {
        "model_path": str(folder / "model"),
        "served_name": "tiny",
        "socket": str(socket),
        "threads": 1,
        "kv_memory_bytes": KV_MEMORY_BYTES,
        "context_tokens_max": 256,
        "batch_tokens_max": 64,
        "client_stall_s": 2.0,
    }
    config.write_text(json.dumps(fields))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nodeagent.engine", "--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise AttackFailed("an engine did not start")
        engine = TransferringEngine(process, socket)
        try:
            yield engine
        finally:
            await engine.close()
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def abandon(
    sender: TransferringEngine, receiver: TransferringEngine, stage: Stage, chance: random.Random
) -> None:
    """Begin a transfer, and abandon it at a stage."""
    transfer = f"{chance.getrandbits(128):032x}"
    tenant = {headers.CACHE_SALT: str(chance.randrange(TENANTS))}
    body = msgspec.json.encode({"prompt": PROMPT, "max_tokens": 2, "temperature": 0})
    json_body = {"content-type": "application/json", **tenant, kv_transfer.TRANSFER: transfer}
    leg = {**json_body, kv_transfer.LEG: kv_transfer.PREFILL_LEG, kv_transfer.FIRST_BLOCK: "0"}
    share, pause_s = min(1.0, chance.uniform(0, SHARE_MAX)), chance.uniform(0, PAUSE_S_MAX)
    async with AsyncExitStack() as stack:
        if stage in (Stage.WAITING, Stage.RECEIVING):
            await stack.enter_async_context(receiver.asked("/v1/completions", json_body, body))
        if stage is Stage.WAITING:
            await asyncio.sleep(pause_s)
            return
        if stage is Stage.RECEIVING:
            cached = await receiver.cached_blocks(transfer)
            if cached == BLOCKS:
                return
            leg[kv_transfer.FIRST_BLOCK] = str(cached)
        reader, _ = await stack.enter_async_context(sender.asked("/v1/completions", leg, body))
        if stage is Stage.READING:
            await asyncio.sleep(pause_s)
            return
        # The answer's head comes before the first block.
        left = round(share * _content_length(await reader.readuntil(b"\r\n\r\n")))
        if stage is Stage.SENDING:
            await reader.readexactly(left)
            return
        path = kv_transfer.TRANSFERS_PATH + transfer
        taken, taking = await stack.enter_async_context(receiver.asked(path, tenant, None))
        while left > 0 and (piece := await reader.read(left)):
            taking.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await taking.drain()
            left -= len(piece)
        if share == 1.0 and chance.random() < STORED_SHARE:
            taking.write(b"0\r\n\r\n")
            await taken.readuntil(b"\r\n\r\n")
        await asyncio.sleep(pause_s)


def _content_length(head: bytes) -> int:
    """Return how many bytes of blocks follow the head of an answer. Raises AttackFailed."""
    found = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if b" 200 " not in head or found is None:
        raise AttackFailed(f"the sender answered {head!r}")
    return int(found[1])


async def settled(engine: TransferringEngine) -> EngineState:
    """Return what an engine has once it holds nothing. Raises AttackFailed if it does not."""
    async with asyncio.timeout(FREE_S):
        while True:
            state = await engine.state()
            if not state.held:
                return state
            await asyncio.sleep(0.05)


async def attack(count: int, seed: int) -> None:
    """Abandon `count` transfers, and print the table. Raises AttackFailed."""
    chance, first = random.Random(seed), dict[str, EngineState]()
    with tempfile.TemporaryDirectory(prefix="abandon") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        tiny.write_folder(folder / "model", "qwen3")
        tiny.write_tokenizer(folder / "model")
        async with an_engine(folder, "p") as sender, an_engine(folder, "d") as receiver:
            engines = {"sender": sender, "receiver": receiver}
            print_head("abandoned", "engine", "MiB", "descriptors", "threads")
            for tenth in range(1, 11):
                await do_often(
                    count // 10,
                    list(Stage),
                    chance,
                    lambda stage: abandon(sender, receiver, stage, chance),
                )
                for role, engine in engines.items():
                    state = await settled(engine)
                    rss = in_mib(state.rss_bytes)
                    print_row(tenth * (count // 10), role, rss, state.descriptors, state.threads)
                    grown = state.rss_bytes - first.setdefault(role, state).rss_bytes
                    if grown > GROWTH_BYTES_MAX:
                        raise AttackFailed(f"the {role} has {grown} bytes more")
            sent = await sender.stats("kv_transfer_sent_blocks_total")
            received = await receiver.stats("kv_transfer_received_blocks_total")
            print(f"\n{sent:.0f} blocks were sent, {received:.0f} received")


if __name__ == "__main__":
    raise SystemExit(run_attack("ops.attack.abandoned_transfers", 100_000, attack))

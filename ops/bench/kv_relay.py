"""Measures a transfer of KV between two engines: two copies, and four relays by two agents.

    python -m ops.bench.kv_relay [--rounds N]

The engines and agents are separate processes. These are stand-ins with the product's frames, checks
and sizes of copies, and blocks as large as the demo's model has in bf16; nothing is computed.
Transfers whose copies wait for the relays alternate with overlapped ones, which is what the product
makes where no window is free. Then as many bytes are copied between two processes over loopback.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch
import uvloop
from aiohttp import web
from torch import Tensor

from isochrone.service.windows.window_pool import PART_BYTES
from isochrone.wire.kv.transfer_frames import (
    TransferEnd,
    TransferHead,
    encode_block,
    encode_end,
    encode_head,
)
from nodeagent.engine.kvcache.transfer_reader import ReceivedBlock, TransferReader
from nodeagent.engine.server.kv.kv_reading import STORE_BYTES_MAX, read_blocks
from nodeagent.engine.server.kv.kv_writing import content_bytes
from ops.bench.disaggregation import raw_copy_s
from ops.sim.measure import percentile

BLOCKS: Final = 98
LAYERS: Final = 30
SHAPE: Final = (16, 6, 64)
"""Tokens; keys and values of three heads; their width."""

BLOCK_BYTES: Final = 2 * LAYERS * SHAPE[0] * SHAPE[1] * SHAPE[2]
SERIAL_READ_BYTES: Final = 16 * 1024 * 1024
"""One copy off the device, where nothing overlaps it."""

FORM: Final = b"f" * 16
DIGESTS: Final = [hashlib.sha256(bytes([number])).digest() for number in range(BLOCKS)]
HEAD: Final = TransferHead(fingerprint=FORM, block_bytes=BLOCK_BYTES, first_block=0, blocks=BLOCKS)
SETTINGS: Final = ("copies wait", "overlapped")


def device_blocks() -> list[Tensor]:
    """Return the memory of an engine: each layer's blocks."""
    torch.set_num_threads(1)
    return [torch.randn(2 * BLOCKS, *SHAPE).to(torch.bfloat16) for _ in range(LAYERS)]


async def serve(app: web.Application, socket: Path) -> None:
    """Serve until this process is ended."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    await asyncio.Event().wait()


async def prefill_engine(folder: Path) -> None:
    """Answer with the blocks of a prompt."""
    layers = device_blocks()

    def read(first: int, count: int) -> Tensor:
        return torch.stack([blocks[torch.arange(first, first + count)] for blocks in layers], 1)

    async def answer(request: web.Request) -> web.StreamResponse:
        overlaps = request.query["setting"] == SETTINGS[1]
        most = (PART_BYTES if overlaps else SERIAL_READ_BYTES) // BLOCK_BYTES
        parts = [(first, min(most, BLOCKS - first)) for first in range(0, BLOCKS, most)]
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(encode_head(HEAD))
        reading = asyncio.create_task(asyncio.to_thread(read, *parts[0]))
        for number, (first, count) in enumerate(parts):
            contents = await reading
            following = parts[number + 1 : number + 2]
            if following and overlaps:
                reading = asyncio.create_task(asyncio.to_thread(read, *following[0]))
            for digest, content in zip(DIGESTS[first : first + count], contents, strict=True):
                for piece in encode_block(digest, content_bytes(content)):
                    await response.write(piece)
            if following and not overlaps:
                reading = asyncio.create_task(asyncio.to_thread(read, *following[0]))
        await response.write(encode_end(TransferEnd(cached_tokens=0)))
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post("/blocks", answer)
    await serve(app, folder / "prefill")


async def prefill_agent(folder: Path) -> None:
    """Relay the engine's answer."""
    http = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / "prefill")))

    async def relay(request: web.Request) -> web.StreamResponse:
        async with http.post("http://localhost/blocks", params=dict(request.query)) as answer:
            response = web.StreamResponse()
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_post("/blocks", relay)
    await serve(app, folder / "agent")


async def decode_engine(folder: Path) -> None:
    """Take the blocks, and say how long the copies to the device took."""
    layers = device_blocks()
    copies_s: list[float] = []

    def copy(blocks: Sequence[ReceivedBlock]) -> None:
        data = bytearray().join(block.content for block in blocks)
        contents = torch.frombuffer(data, dtype=torch.bfloat16).view(-1, LAYERS, *SHAPE)
        index = torch.tensor([block.number for block in blocks])
        began_s = time.monotonic()
        for layer, held in enumerate(layers):
            held[index] = contents[:, layer]
        copies_s.append(time.monotonic() - began_s)

    async def store(blocks: Sequence[ReceivedBlock]) -> None:
        await asyncio.to_thread(copy, blocks)

    async def take(request: web.Request) -> web.Response:
        reader = TransferReader(FORM, BLOCK_BYTES, DIGESTS, 0)
        copies_s.clear()
        most = STORE_BYTES_MAX // BLOCK_BYTES
        if request.query["setting"] == SETTINGS[1]:
            await read_blocks(request.content, reader, most, copy)
        else:
            arrived: list[ReceivedBlock] = []
            async for data in request.content.iter_any():
                arrived += reader.feed(data)
                while len(arrived) >= most:
                    await store(arrived[:most])
                    del arrived[:most]
            await store(arrived)
        return web.json_response({"copies": len(copies_s), "copy_s": min(copies_s)})

    app = web.Application(client_max_size=1 << 40)
    app.router.add_post("/blocks", take)
    await serve(app, folder / "decode")


async def transfer(agent: aiohttp.ClientSession, engine: aiohttp.ClientSession, name: str) -> Any:
    """Pass the blocks of one engine to the other, as the decode node's agent does."""
    parameters = {"setting": name}
    async with (
        agent.post("http://localhost/blocks", params=parameters) as blocks,
        engine.post(
            "http://localhost/blocks", params=parameters, data=blocks.content.iter_any()
        ) as taken,
    ):
        return await taken.json()


async def measure(folder: Path, rounds: int) -> None:
    """Transfer in turns, and print a row of each setting."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / "agent"))) as agent,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / "decode"))) as engine,
    ):
        took_ms: dict[str, list[float]] = {name: [] for name in SETTINGS}
        copied: dict[str, Any] = {}
        for _ in range(rounds):
            for name in SETTINGS:
                began_s = time.monotonic()
                copied = await transfer(agent, engine, name)
                took_ms[name].append(1000 * (time.monotonic() - began_s))
    raw_s = [await asyncio.to_thread(raw_copy_s, BLOCKS * BLOCK_BYTES) for _ in range(6)]
    raw_ms = 1000 * min(raw_s)
    print("| transfer | best ms | p50 ms | best / raw copy |\n|---|---|---|---|")
    for name, taken in took_ms.items():
        best_ms = min(taken)
        print(f"| {name} | {best_ms:.0f} | {percentile(taken, 0.5):.0f} | {best_ms / raw_ms:.1f} |")
    print(
        f"\n{BLOCKS * BLOCK_BYTES / 1e6:.0f} MB, raw copy {raw_ms:.0f} ms;"
        f" {copied['copies']} copies to the device of at most {STORE_BYTES_MAX >> 20} MiB,"
        f" {1000 * copied['copy_s']:.2f} ms each"
    )


def run_part(name: str, folder: str) -> None:
    """Run one of the other processes."""
    parts = {part.__name__: part for part in (prefill_engine, prefill_agent, decode_engine)}
    uvloop.run(parts[name](Path(folder)))


def main() -> None:
    """Start the processes and measure."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.kv_relay")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        names = {"prefill_engine": "prefill", "prefill_agent": "agent", "decode_engine": "decode"}
        children = [
            context.Process(target=run_part, args=(name, folder), daemon=True) for name in names
        ]
        for child in children:
            child.start()
        while not all((Path(folder) / socket).exists() for socket in names.values()):
            time.sleep(0.1)
        uvloop.run(measure(Path(folder), rounds))
        for child in children:
            child.terminate()


if __name__ == "__main__":
    main()

"""A prompt's KV moves from a prefill engine to a decode engine, whatever goes wrong on the way."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest

from isochrone.wire.http import headers
from isochrone.wire.kv.kv_transfer import (
    FIRST_BLOCK,
    KV_FORMAT,
    LEG,
    OTHER_FORMAT_STATUS,
    PREFILL_LEG,
    TRANSFER,
    TRANSFERS_PATH,
    ExpectedPrompt,
    ReceivedBlocks,
)
from ops.golden import tiny
from tests.integration.engine.conftest import EngineProcess, end, launch, wait_ready
from tests.nursery import Engine
from tests.system.harness import until

PROMPT = [token for start in range(5) for token in range(start, start + 40)]
BLOCKS = (len(PROMPT) - 1) // 16
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Pair(NamedTuple):
    """Two equal engines, and a third one with another KV format."""

    prefill: aiohttp.ClientSession
    decode: aiohttp.ClientSession
    other: aiohttp.ClientSession


def start(folder: Path, name: str, **more: Any) -> Engine:
    (folder / name).mkdir()
    fields = {
        "model_path": str(folder / "model"),
        "served_name": "tiny",
        "threads": 1,
        "kv_memory_bytes": 4 * 1024 * 1024,
        "context_tokens_max": 512,
        "batch_tokens_max": 32,
        "client_stall_s": 2.0,
        **more,
    }
    return launch(folder / name, **fields)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineProcess]]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        tiny.write_folder(folder / "model", "qwen3")
        tiny.write_tokenizer(folder / "model")
        processes = [start(folder, "p"), start(folder, "d"), start(folder, "o", kv_dtype="fp8")]
        try:
            yield [
                wait_ready(process, folder / name)
                for process, name in zip(processes, "pdo", strict=True)
            ]
        finally:
            for process in processes:
                end(process)


@pytest.fixture
async def pair(engines: list[EngineProcess]) -> AsyncIterator[Pair]:
    prefill, decode, other = engines
    async with prefill.session() as first, decode.session() as second, other.session() as third:
        yield Pair(first, second, third)


def a_salt() -> dict[str, str]:
    """Return the header of a tenant that has nothing cached."""
    return {headers.CACHE_SALT: secrets.token_hex(8)}


async def complete(http: aiohttp.ClientSession, sent: dict[str, str]) -> tuple[str, int]:
    """Return the text and how many tokens of the prompt were cached."""
    async with http.post("/v1/completions", json=BODY, headers=sent) as response:
        answer = await response.json()
        assert response.status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached


async def describe(http: aiohttp.ClientSession, transfer: str) -> ExpectedPrompt:
    async with http.get(TRANSFERS_PATH + transfer) as response:
        assert response.status == 200
        return msgspec.json.decode(await response.read(), type=ExpectedPrompt)


def prefill_leg(http: aiohttp.ClientSession, transfer: str, first: int = 0) -> Any:
    sent = {LEG: PREFILL_LEG, TRANSFER: transfer, FIRST_BLOCK: str(first), **a_salt()}
    return http.post("/v1/completions", json=BODY, headers=sent)


async def held(http: aiohttp.ClientSession) -> float:
    async with http.get("/stats") as response:
        stats = await response.json()
        return float(stats["kv_transfer_held_blocks"] + stats["kv_blocks_used"])


async def is_idle(http: aiohttp.ClientSession) -> bool:
    return await held(http) == 0


async def transferred(pair: Pair, salt: dict[str, str]) -> tuple[Any, Any]:
    """Run both legs; return the decode leg's answer and the result of the transfer."""
    transfer = secrets.token_hex(16)
    sent = {TRANSFER: transfer, **salt}
    answer = asyncio.create_task(complete(pair.decode, sent))
    expected = await describe(pair.decode, transfer)
    assert (expected.prompt_tokens, expected.blocks) == (len(PROMPT), BLOCKS)
    async with prefill_leg(pair.prefill, transfer, expected.cached_blocks) as leg:
        path = TRANSFERS_PATH + transfer
        async with pair.decode.post(path, data=leg.content.iter_any()) as response:
            result = await response.json()
    return await answer, result


async def test_the_decode_engine_computes_only_the_end_of_the_prompt(pair: Pair) -> None:
    """The answer is the same, though each engine separates tenants by salts of its own."""
    alone = await complete(pair.prefill, a_salt())
    answer, result = await transferred(pair, a_salt())
    assert answer == (alone[0], BLOCKS * 16)
    received = msgspec.convert(result, ReceivedBlocks)
    assert (received.blocks, received.cached_tokens) == (BLOCKS, 0)
    # Another tenant finds none of it.
    assert await complete(pair.decode, a_salt()) == alone
    for engine in (pair.prefill, pair.decode):
        await until("all blocks are free", partial(is_idle, engine), 10.0)


@pytest.mark.parametrize("split", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
async def test_kv_moves_between_engines_of_other_widths(
    pair: Pair, tmp_path: Path, short_folder: Path, split: dict[str, int]
) -> None:
    """A whole engine reads for one that is split over ranks, and the other way round."""
    tiny.write_folder(tmp_path, "qwen3")
    tiny.write_tokenizer(tmp_path)
    process = start(short_folder, "s", model_path=str(tmp_path), **split)
    try:
        engine = await asyncio.to_thread(wait_ready, process, short_folder / "s")
        async with engine.session() as http:
            expected, _ = await complete(pair.decode, a_salt())
            for other in (pair._replace(prefill=http), pair._replace(decode=http)):
                (text, cached), result = await transferred(other, a_salt())
                assert (text, cached) == (expected, BLOCKS * 16)
                assert result["blocks"] == BLOCKS
                for one in (other.prefill, other.decode):
                    await until("all blocks are free", partial(is_idle, one), 10.0)
    finally:
        end(process)


async def test_fp8_kv_stays_fp8_on_the_wire(pair: Pair, tmp_path: Path, short_folder: Path) -> None:
    """A byte for each number, and a scale for each head; the same answer as without a transfer."""
    tiny.write_folder(tmp_path, "qwen3")
    tiny.write_tokenizer(tmp_path)
    process = start(short_folder, "f", model_path=str(tmp_path), kv_dtype="fp8")
    try:
        engine = await asyncio.to_thread(wait_ready, process, short_folder / "f")
        async with engine.session() as http:
            expected, _ = await complete(pair.other, a_salt())
            both = pair._replace(prefill=pair.other, decode=http)
            answer, result = await transferred(both, a_salt())
            assert answer == (expected, BLOCKS * 16)
            token_bytes = 2 * tiny.LAYERS * tiny.KV_HEADS * (tiny.HEAD_DIM + 4)
            assert result["transfer_bytes"] == BLOCKS * 16 * token_bytes
            sent = await stream_of(pair.other, secrets.token_hex(16))
            assert len(sent) < 1.2 * BLOCKS * 16 * token_bytes
    finally:
        end(process)


async def test_what_the_decode_engine_has_is_not_sent_again(pair: Pair) -> None:
    salt = a_salt()
    first, _ = await transferred(pair, salt)
    transfer = secrets.token_hex(16)
    sent = {TRANSFER: transfer, **salt}
    answer = asyncio.create_task(complete(pair.decode, sent))
    expected = await describe(pair.decode, transfer)
    assert expected.cached_blocks == expected.held_blocks == BLOCKS
    async with pair.decode.delete(TRANSFERS_PATH + transfer) as response:
        assert response.status == 204
    assert (await answer)[0] == first[0]


async def stream_of(http: aiohttp.ClientSession, transfer: str) -> bytes:
    async with prefill_leg(http, transfer) as leg:
        assert leg.status == 200
        return bytes(await leg.read())


@pytest.mark.parametrize("fault", ["cut", "flipped", "foreign", "endless", "other format"])
async def test_after_a_bad_transfer_the_decode_engine_computes_the_prompt(
    pair: Pair, fault: str
) -> None:
    alone = await complete(pair.prefill, a_salt())
    transfer = secrets.token_hex(16)
    sent = {TRANSFER: transfer, **a_salt()}
    answer = asyncio.create_task(complete(pair.decode, sent))
    await describe(pair.decode, transfer)
    if fault == "foreign":
        stream = await stream_of(pair.prefill, secrets.token_hex(16))
    else:
        source = pair.other if fault == "other format" else pair.prefill
        stream = await stream_of(source, transfer)
    if fault == "cut":
        stream = stream[: len(stream) // 2]
    elif fault == "flipped":
        middle = len(stream) // 2
        stream = stream[:middle] + bytes((stream[middle] ^ 1,)) + stream[middle + 1 :]
    elif fault == "endless":
        stream += stream[-1000:]
    async with pair.decode.post(TRANSFERS_PATH + transfer, data=stream) as response:
        error = await response.json()
        assert response.status == 400
        assert error["error"]["message"].startswith("cannot use these KV blocks: "), error
    if fault == "cut":
        # Another prefill replica may be asked; here there is none.
        async with pair.decode.delete(TRANSFERS_PATH + transfer) as response:
            assert response.status == 204
    text, cached = await answer
    assert text == alone[0]
    assert (cached > 0) == (fault == "cut")
    await until("all blocks are free", partial(is_idle, pair.decode), 10.0)


async def computed_tokens(http: aiohttp.ClientSession) -> float:
    async with http.get("/stats") as response:
        return float((await response.json())["prompt_tokens_total"])


async def test_an_engine_of_another_kv_format_refuses_before_it_computes(pair: Pair) -> None:
    alone = await complete(pair.prefill, a_salt())
    transfer = secrets.token_hex(16)
    answer = asyncio.create_task(complete(pair.decode, {TRANSFER: transfer, **a_salt()}))
    expected = await describe(pair.decode, transfer)
    before = await computed_tokens(pair.other)
    sent = {LEG: PREFILL_LEG, TRANSFER: transfer, KV_FORMAT: expected.kv_format, **a_salt()}
    async with pair.other.post("/v1/completions", json=BODY, headers=sent) as leg:
        error = await leg.json()
        assert leg.status == OTHER_FORMAT_STATUS, error
        assert expected.kv_format in error["error"]["message"]
    assert await computed_tokens(pair.other) == before
    # The same engine sends to its own kind.
    async with pair.prefill.post("/v1/completions", json=BODY, headers=sent) as leg:
        assert leg.status == 200
        assert leg.content_length is not None
        path = TRANSFERS_PATH + transfer
        async with pair.decode.post(path, data=leg.content.iter_any()) as response:
            assert response.status == 200
    assert (await answer)[0] == alone[0]


async def test_abandoned_transfers_leave_nothing_at_either_engine(pair: Pair) -> None:
    for _ in range(20):
        transfer = secrets.token_hex(16)
        sent = {TRANSFER: transfer, **a_salt()}
        answer = asyncio.create_task(complete(pair.decode, sent))
        await describe(pair.decode, transfer)
        async with prefill_leg(pair.prefill, transfer) as leg:
            await leg.content.read(100)
        answer.cancel()
        await asyncio.wait({answer})
    # One receiver stays connected and reads nothing: its blocks are free after `client_stall_s`.
    async with prefill_leg(pair.prefill, secrets.token_hex(16)) as leg:
        await leg.content.read(10)
        for engine in (pair.prefill, pair.decode):
            await until("all blocks are free", partial(is_idle, engine), 20.0)
    async with pair.decode.get("/stats") as response:
        assert (await response.json())["kv_transfers_waiting"] == 0


async def test_a_request_begins_at_once_if_no_block_is_free_for_its_kv(
    pair: Pair, tmp_path: Path, short_folder: Path
) -> None:
    """Another prefill replica would read its prompt for nothing."""
    alone = await complete(pair.prefill, a_salt())
    tiny.write_folder(tmp_path, "qwen3")
    tiny.write_tokenizer(tmp_path)
    transfers = [secrets.token_hex(16) for _ in range(6)]
    streams = [await stream_of(pair.prefill, transfer) for transfer in transfers]
    block_bytes = len(streams[0]) // BLOCKS
    process = start(short_folder, "n", model_path=str(tmp_path), kv_memory_bytes=33 * block_bytes)
    try:
        engine = await asyncio.to_thread(wait_ready, process, short_folder / "n")
        async with engine.session() as http:
            refused: list[bool] = []
            answers = [
                asyncio.create_task(complete(http, {TRANSFER: transfer, **a_salt()}))
                for transfer in transfers
            ]
            for transfer, stream, answer in zip(transfers, streams, answers, strict=True):
                await describe(http, transfer)
                # Those that get half of their blocks hold them while they wait for the rest.
                is_last = transfer == transfers[-1]
                part = stream if is_last else stream[: len(stream) // 2]
                async with http.post(TRANSFERS_PATH + transfer, data=part) as response:
                    assert response.status == 429 if is_last else response.status in (400, 429)
                    has_room = response.status == 400
                if not has_room:
                    assert (await answer)[0] == alone[0]
                refused.append(not has_room)
            assert refused == sorted(refused)
            assert not refused[0]
            for transfer, answer in zip(transfers, answers, strict=True):
                if not answer.done():
                    async with http.delete(TRANSFERS_PATH + transfer) as response:
                        assert response.status == 204
                    assert (await answer)[0] == alone[0]
            await until("all blocks are free", partial(is_idle, http), 10.0)
    finally:
        end(process)


async def test_a_leg_without_a_transfer_is_refused(pair: Pair) -> None:
    async with prefill_leg(pair.prefill, "x" * 32) as leg:
        assert leg.status == 400
        assert "cannot use transfer id" in (await leg.json())["error"]["message"]
    async with prefill_leg(pair.prefill, secrets.token_hex(16), first=BLOCKS) as leg:
        assert "cannot send block" in (await leg.json())["error"]["message"]
    async with pair.decode.delete(TRANSFERS_PATH + secrets.token_hex(16)) as response:
        assert response.status == 404

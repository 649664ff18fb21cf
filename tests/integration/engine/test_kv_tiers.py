"""The KV tiers in a whole engine: sessions evicted from the device, or left by another process."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.generation import Generation
from nodeagent.engine.core.step import EngineCore
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.tier_setup import model_fingerprint
from nodeagent.engine.loading import LoadedEngine, load_engine
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from nodeagent.engine.tokenizer.detokenizer import StopStrings, StreamDetokenizer
from ops.golden import tiny
from tests.chaos.disk import a_disk
from tests.integration.engine.conftest import EngineProcess, end, launch, wait_ready
from tests.system.harness import until

BLOCK_BYTES = BLOCK_TOKENS * 2 * tiny.LAYERS * tiny.KV_HEADS * tiny.HEAD_DIM * 4
SESSIONS = [[start] * 5 + list(range(start, start + 40)) + [start] * 60 for start in range(6)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        tiny.write_folder(folder / "model", "qwen3")
        tiny.write_tokenizer(folder / "model")
        yield folder


def fields(folder: Path, host_blocks: int, **more: Any) -> dict[str, Any]:
    """Return the config fields of an engine whose device fits one session of six."""
    return {
        "model_path": str(folder / "model"),
        "served_name": "tiny",
        "threads": 1,
        "kv_memory_bytes": 9 * BLOCK_BYTES,
        "kv_host_bytes": host_blocks * BLOCK_BYTES,
        **more,
    }


def answers(loaded: LoadedEngine) -> list[tuple[list[int], int]]:
    """Run the sessions one after another, twice; return outputs and cached tokens."""
    results = []
    for number, prompt in enumerate(SESSIONS * 2):
        sequence = Sequence(number, list(prompt), StopConditions(6, frozenset()))
        loaded.engine.submit(
            Generation(
                sequence,
                Sampler(SamplingParams(temperature=0), []),
                StreamDetokenizer(loaded.vocabulary),
                StopStrings(()),
            )
        )
        while loaded.engine.has_work:
            loaded.engine.step()
        results.append((sequence.tokens[sequence.prompt_tokens :], sequence.cached_tokens))
    return results


def test_outputs_are_the_same_with_blocks_restored_from_memory(folder: Path) -> None:
    without_tiers = answers(load_engine(EngineConfig(socket="unused", **fields(folder, 0))))
    tiers = load_engine(EngineConfig(socket="unused", **fields(folder, 64)))
    with_tiers = answers(tiers)
    assert [tokens for tokens, _ in with_tiers] == [tokens for tokens, _ in without_tiers]
    assert [cached for _, cached in without_tiers] == [0] * 12
    whole = (len(SESSIONS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [cached for _, cached in with_tiers[6:]] == [whole] * 6
    assert tiers.engine.block_mover is not None
    assert tiers.engine.block_mover.counts()["kv_restored_total"] >= 5 * whole // BLOCK_TOKENS


def test_blocks_are_exported_from_one_engine_to_another(folder: Path) -> None:
    first, second = (load_engine(EngineConfig(socket="u", **fields(folder, 64))) for _ in range(2))
    answers(first)
    sequence = Sequence(99, list(SESSIONS[2]), StopConditions(6, frozenset()))
    digests = sequence.block_digests((len(sequence.tokens) - 1) // BLOCK_TOKENS)
    second.engine.import_blocks(digests, blocks_of(first.engine, digests))
    again = answers(second)
    assert again[2][1] == len(digests) * BLOCK_TOKENS
    assert again[2][0] == again[8][0]


def blocks_of(engine: EngineCore, digests: list[bytes]) -> torch.Tensor:
    """Return the blocks of `digests`, from the device or from host memory."""
    mover, cached = engine.block_mover, engine.scheduler.pool.cached_blocks()
    assert mover is not None
    on_device = {digest: block for block, digest in cached}
    rows = [
        mover._device.read_blocks([on_device[digest]])
        if digest in on_device
        else mover.host.get([digest])
        for digest in digests
    ]
    return torch.cat(rows)


async def serve(folder: Path, sessions: list[list[int]], **more: Any) -> list[tuple[str, int]]:
    """Send `sessions` to a new engine process, end it; return texts and cached tokens."""
    config = fields(folder, 64, kv_file_bytes=10**7, kv_folder=str(folder / "kept"), **more)
    process = launch(folder, **config)
    try:
        engine = await asyncio.to_thread(wait_ready, process, folder)
        return [await complete(engine, session) for session in sessions]
    finally:
        await asyncio.to_thread(end, process)


async def complete(engine: EngineProcess, prompt: list[int]) -> tuple[str, int]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    async with engine.session() as http, http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached


async def test_sessions_outlive_their_process_and_corrupt_files_are_recomputed(
    folder: Path,
) -> None:
    first = await serve(folder, SESSIONS)
    assert [cached for _, cached in first] == [0] * 6
    second = await serve(folder, SESSIONS)
    assert [text for text, _ in second] == [text for text, _ in first]
    whole = (len(SESSIONS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [cached for _, cached in second] == [whole] * 6
    for number, path in enumerate(sorted((folder / "kept").glob("*/*/*"))):
        if number % 3 == 0:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    third = await serve(folder, SESSIONS)
    assert [text for text, _ in third] == [text for text, _ in first]
    assert min(cached for _, cached in third) < whole
    # The files of another model are not used.
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5000.0}))
    fourth = await serve(folder, SESSIONS[:1])
    assert fourth[0][1] == 0


async def test_a_full_disk_costs_the_file_tier_and_nothing_else(folder: Path) -> None:
    """The engine starts on a full disk, answers, counts what was refused, and goes on later."""
    with a_disk(folder / "disk", 4 << 20) as disk:
        disk.fill()
        # Host memory for a few blocks only, so that sessions go to files.
        config = fields(folder, 16, kv_file_bytes=10**6, kv_folder=str(disk.folder / "kept"))
        process = launch(folder, **config)
        try:
            engine = await asyncio.to_thread(wait_ready, process, folder)
            first = [await complete(engine, session) for session in SESSIONS]
            again = [await complete(engine, session) for session in SESSIONS]
            assert [text for text, _ in again] == [text for text, _ in first]

            async def stat(name: str) -> float:
                async with engine.session() as http, http.get("/stats") as response:
                    return float((await response.json())[name])

            async def is_refused() -> bool:
                return await stat("kv_file_refused_total") > 0

            async def is_written() -> bool:
                await complete(engine, [*SESSIONS[0][:20], *SESSIONS[1]])
                return await stat("kv_file_blocks") > 0

            await until("writes are refused", is_refused, 30.0)
            assert await stat("kv_file_blocks") == 0
            disk.free()
            for session in SESSIONS:
                await complete(engine, [7, *session])
            await until("the disk takes blocks again", is_written, 30.0)
            assert (await complete(engine, SESSIONS[0]))[0] == first[0][0]
        finally:
            await asyncio.to_thread(end, process)


def test_a_file_tier_without_folder_or_host_memory_is_refused(folder: Path) -> None:
    for more in ({"kv_folder": ""}, {"kv_host_bytes": 0}, {"kv_folder": "/dev/null/x"}):
        invalid = {
            **fields(folder, 4, kv_file_bytes=10**6, kv_folder=str(folder)),
            **more,
        }
        with pytest.raises(CheckpointError, match="cannot keep KV in"):
            load_engine(EngineConfig(socket="unused", **invalid))


def test_fingerprints_differ_for_different_weights_and_settings(folder: Path) -> None:
    before = model_fingerprint(folder / "model", "")
    assert model_fingerprint(folder / "model", "") == before
    assert model_fingerprint(folder / "model", "bf16") != before
    path = folder / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100:] = bytes(100)
    path.write_bytes(content)
    assert model_fingerprint(folder / "model", "") != before

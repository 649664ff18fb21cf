"""KV below the device's in a whole engine: a session pushed out, or left by another process."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.core.step import Generation
from nodeagent.engine.kvcache.tier_setup import identity
from nodeagent.engine.loading import Loaded, load
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.sampling.sampler import Sampler, SamplingParams
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS, Ending, Sequence
from nodeagent.engine.tokenizer.detokenizer import StopStrings, TokenText
from ops.golden import tiny
from tests.integration.engine.conftest import EngineProcess, end, launch, wait_ready

BLOCK_BYTES = BLOCK_TOKENS * 2 * tiny.LAYERS * tiny.KV_HEADS * tiny.HEAD_DIM * 4
SESSIONS = [[start] * 5 + list(range(start, start + 40)) + [start] * 60 for start in range(6)]


@pytest.fixture
def room() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        tiny.write_folder(folder / "model", "qwen3")
        tiny.write_tokenizer(folder / "model")
        yield folder


def fields(room: Path, host_blocks: int, **more: Any) -> dict[str, Any]:
    """An engine whose device holds one session of six at a time."""
    return {
        "model_path": str(room / "model"),
        "served_name": "tiny",
        "threads": 1,
        "kv_memory_bytes": 9 * BLOCK_BYTES,
        "kv_host_bytes": host_blocks * BLOCK_BYTES,
        **more,
    }


def answers(loaded: Loaded) -> list[tuple[list[int], int]]:
    """Run the sessions one after another, twice; return outputs and how much was cached."""
    told = []
    for number, prompt in enumerate(SESSIONS * 2):
        sequence = Sequence(number, list(prompt), Ending(6, frozenset()))
        loaded.engine.submit(
            Generation(
                sequence,
                Sampler(SamplingParams(temperature=0), []),
                TokenText(loaded.vocabulary),
                StopStrings(()),
            )
        )
        while loaded.engine.busy:
            loaded.engine.step()
        told.append((sequence.tokens[sequence.prompt_tokens :], sequence.cached_tokens))
    return told


def test_what_comes_back_from_memory_answers_alike(room: Path) -> None:
    bare = answers(load(EngineConfig(socket="unused", **fields(room, 0))))
    tiers = load(EngineConfig(socket="unused", **fields(room, 64)))
    kept = answers(tiers)
    assert [tokens for tokens, _ in kept] == [tokens for tokens, _ in bare]
    assert [cached for _, cached in bare] == [0] * 12
    whole = (len(SESSIONS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [cached for _, cached in kept[6:]] == [whole] * 6
    assert tiers.engine.mover is not None
    assert tiers.engine.mover.counts()["kv_restored_total"] >= 5 * whole // BLOCK_TOKENS


def test_blocks_go_from_one_engine_to_another(room: Path) -> None:
    first, second = (load(EngineConfig(socket="u", **fields(room, 64))) for _ in range(2))
    answers(first)
    sequence = Sequence(99, list(SESSIONS[2]), Ending(6, frozenset()))
    chain = sequence.chain((len(sequence.tokens) - 1) // BLOCK_TOKENS)
    blocks = first.engine.export_blocks(chain)
    assert blocks is not None
    assert first.engine.export_blocks([bytes(32)]) is None
    second.engine.import_blocks(chain, blocks)
    again = answers(second)
    assert again[2][1] == len(chain) * BLOCK_TOKENS
    assert again[2][0] == again[8][0]


async def serve(room: Path, sessions: list[list[int]], **more: Any) -> list[tuple[str, int]]:
    """Ask a new engine process, end it, and return texts and cached tokens."""
    config = fields(room, 64, kv_file_bytes=10**7, kv_folder=str(room / "kept"), **more)
    process = launch(room, **config)
    try:
        engine = await asyncio.to_thread(wait_ready, process, room)
        return [await ask(engine, session) for session in sessions]
    finally:
        await asyncio.to_thread(end, process)


async def ask(engine: EngineProcess, prompt: list[int]) -> tuple[str, int]:
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    async with engine.session() as http, http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["text"], cached


async def test_sessions_outlive_their_process_and_spoilt_files_cost_nothing_else(
    room: Path,
) -> None:
    first = await serve(room, SESSIONS)
    assert [cached for _, cached in first] == [0] * 6
    second = await serve(room, SESSIONS)
    assert [text for text, _ in second] == [text for text, _ in first]
    whole = (len(SESSIONS[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [cached for _, cached in second] == [whole] * 6
    for number, path in enumerate(sorted((room / "kept").glob("*/*/*"))):
        if number % 3 == 0:
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
    third = await serve(room, SESSIONS)
    assert [text for text, _ in third] == [text for text, _ in first]
    assert min(cached for _, cached in third) < whole
    # Another model's files are never taken for its own.
    config = room / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5000.0}))
    fourth = await serve(room, SESSIONS[:1])
    assert fourth[0][1] == 0


def test_a_file_tier_without_what_it_needs_is_refused(room: Path) -> None:
    for more in ({"kv_folder": ""}, {"kv_host_bytes": 0}, {"kv_folder": "/dev/null/x"}):
        asked = {**fields(room, 4, kv_file_bytes=10**6, kv_folder=str(room)), **more}
        with pytest.raises(CheckpointError, match="cannot keep KV in"):
            load(EngineConfig(socket="unused", **asked))


def test_models_are_told_apart_by_their_weights(room: Path) -> None:
    before = identity(room / "model", "")
    assert identity(room / "model", "") == before
    assert identity(room / "model", "bf16") != before
    path = room / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-100:] = bytes(100)
    path.write_bytes(content)
    assert identity(room / "model", "") != before

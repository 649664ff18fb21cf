"""A model split over real processes computes what one process does, and ends as a whole."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.golden import tiny
from tests.integration.engine.conftest import ROOT, EngineProcess, end, launch, wait_ready

GOLDEN = json.loads((Path(__file__).parent / "golden_families.json").read_text())
CASES = [
    *(f"{family}:folder:2:1:1" for family in tiny.CONFIGS),
    *(f"{family}:gguf:1:2:1" for family in ("llama", "qwen2", "mixtral")),
    "llama:gguf:2:1:1",
    "mixtral:gguf:2:1:2",
    "qwen3_moe:folder:2:1:2",
    # More ranks than KV heads; stages and heads at once.
    "qwen2:folder:4:1:1",
    "qwen3_moe:folder:2:2:2",
    "mistral:folder:1:3:1",
]


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("split")
    subprocess.run(
        [sys.executable, "-m", "tests.integration.engine.split_run", str(out), *CASES],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=100,
    )
    return out


@pytest.mark.parametrize("case", CASES)
def test_ranks_together_compute_what_one_does(logits: Path, case: str) -> None:
    found = json.loads((logits / f"{case}.json").read_text())
    for rows, golden in zip(found, GOLDEN[case.partition(":")[0]], strict=True):
        assert torch.allclose(torch.tensor(rows), torch.tensor(golden), atol=1e-4, rtol=0)


PROMPT = {"prompt": [3, 5, 8, 13, 21, 34, 55, 2, 1], "temperature": 0, "max_tokens": 24}


def launched(folder: Path, model: Path, **fields: Any) -> subprocess.Popen[str]:
    return launch(folder, model_path=str(model), served_name="m", threads=1, **fields)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The pids of the other ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.fixture(scope="module")
def folder_of_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    tiny.write_folder(folder, "qwen3_moe")
    tiny.write_tokenizer(folder)
    return folder


async def completed(engine: EngineProcess, **fields: Any) -> Any:
    async with (
        engine.session() as http,
        http.post("/v1/completions", json={**PROMPT, **fields}) as response,
    ):
        assert response.status == 200, await response.text()
        return await response.json()


async def test_a_split_engine_says_what_a_whole_one_says(
    short_folder: Path, folder_of_mixture: Path
) -> None:
    texts = []
    for name, fields in (
        ("whole", {}),
        ("split", {"tensor_parallel": 2, "expert_parallel": 2, "kv_host_bytes": 1 << 20}),
    ):
        (short_folder / name).mkdir()
        process = launched(short_folder / name, folder_of_mixture, **fields)
        try:
            engine = wait_ready(process, short_folder / name)
            answers = await asyncio.gather(
                completed(engine), completed(engine, prompt=[9] * 40, n=1)
            )
            texts.append([answer["choices"][0]["text"] for answer in answers])
            others = ranks_of(process)
        finally:
            end(process)
        assert process.returncode == 0
        assert not any(Path(f"/proc/{pid}").exists() for pid in others)
    assert texts[0] == texts[1]


async def test_where_a_rank_dies_the_engine_ends_with_words(
    short_folder: Path, folder_of_mixture: Path
) -> None:
    process = launched(short_folder, folder_of_mixture, pipeline_parallel=3)
    try:
        engine = wait_ready(process, short_folder)
        first, second = ranks_of(process)
        asked = [completed(engine, max_tokens=240, logit_bias={"0": -100}) for _ in range(8)]
        answers = asyncio.gather(*asked, return_exceptions=True)
        async with engine.session() as http, asyncio.timeout(20):
            while (await (await http.get("/stats")).json())["running"] == 0:
                await asyncio.sleep(0.02)
            os.kill(second, signal.SIGKILL)
            failed = [one for one in await answers if isinstance(one, Exception)]
            assert len(failed) == 8
        assert await asyncio.to_thread(process.wait, 20) == 1
        said = (short_folder / "log").read_text()
        assert f"rank 2 (process {second}) has ended" in said
        assert not Path(f"/proc/{first}").exists()
    finally:
        end(process)


async def test_a_split_that_cannot_be_is_refused_in_words(
    short_folder: Path, folder_of_mixture: Path
) -> None:
    process = launched(short_folder, folder_of_mixture, tensor_parallel=3)
    try:
        assert await asyncio.to_thread(process.wait, 30) == 2
        said = (short_folder / "log").read_text()
        assert "tensor_parallel 3: 4 heads do not divide by it" in said
    finally:
        end(process)

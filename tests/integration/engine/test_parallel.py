"""A model split over several processes computes what one process does, and ends as a whole."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.loading import load_engine
from ops.golden import tiny
from tests.integration.engine.conftest import ROOT, EngineProcess, end, launch, wait_ready
from tests.nursery import Engine

GOLDEN = json.loads((Path(__file__).parent / "golden_families.json").read_text())
CASES = [
    *(f"{family}:folder:2:1:1" for family in tiny.CONFIGS),
    *(f"{family}:gguf:1:2:1" for family in ("llama", "qwen2", "mixtral")),
    "llama:gguf:2:1:1",
    "mixtral:gguf:2:1:2",
    "qwen3_moe:folder:2:1:2",
    # More ranks than KV heads; pipeline and tensor parallel together.
    "qwen2:folder:4:1:1",
    "qwen3_moe:folder:2:2:2",
    "mistral:folder:1:3:1",
]
DRAFTS = ["drafts:head:1:2", "drafts:head:2:1", "drafts:model:1:2"]


def run_cases(out: Path, cases: list[str]) -> Path:
    subprocess.run(
        [sys.executable, "-m", "tests.integration.engine.split_run", str(out), *cases],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=100,
    )
    return out


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("split"), CASES)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(tmp_path_factory.mktemp("drafted"), DRAFTS)


@pytest.mark.parametrize("case", CASES)
def test_a_split_model_computes_the_logits_of_a_whole_one(logits: Path, case: str) -> None:
    found = json.loads((logits / f"{case}.json").read_text())
    for rows, golden in zip(found, GOLDEN[case.partition(":")[0]], strict=True):
        assert torch.allclose(torch.tensor(rows), torch.tensor(golden), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", DRAFTS)
def test_a_split_model_drafts_as_a_whole_one(drafted: Path, case: str) -> None:
    split, whole = json.loads((drafted / f"{case}.json").read_text())
    assert split == whole
    assert split[1][f"drafted_by_{case.split(':')[1]}_tokens_total"] > 10


WAIT_S = 40.0


def launched(folder: Path, model: Path, **fields: Any) -> Engine:
    return launch(folder, model_path=str(model), served_name="m", threads=1, **fields)


def worker_pids(process: Engine) -> list[int]:
    """Return the pids of the workers."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


@pytest.fixture(scope="module")
def folder_of_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    tiny.write_folder(folder, "qwen3_moe")
    tiny.write_tokenizer(folder)
    return folder


async def completed(engine: EngineProcess, body: dict[str, Any]) -> str:
    async with engine.session() as http, http.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["text"]
        return text


async def test_a_split_engine_answers_as_a_whole_one(
    engine: EngineProcess, short_folder: Path, model_path: Path
) -> None:
    # SmolLM2 has nine heads: three ranks.
    process = launch(
        short_folder,
        model_path=str(model_path),
        served_name="smollm2",
        threads=1,
        tensor_parallel=3,
        kv_memory_bytes=16 << 20,
        kv_host_bytes=16 << 20,
    )
    texts = ["The capital of France is", "1, 2, 3, 4, 5, 6," * 5]
    bodies = [{"prompt": text, "temperature": 0, "max_tokens": 20} for text in texts]
    try:
        split = wait_ready(process, short_folder)
        worker_processes = worker_pids(process)
        assert len(worker_processes) == 2
        expected = [await completed(engine, body) for body in bodies]
        assert await asyncio.gather(*(completed(split, body) for body in bodies)) == expected
        async with (
            split.session() as http,
            http.post("/v1/completions", json={**bodies[1], "n": 2}) as response,
        ):
            choices = (await response.json())["choices"]
        assert [choice["text"] for choice in choices] == [expected[1]] * 2
        # A closed request is dropped after one step, and a drain finishes the running ones.
        async with split.session() as http, asyncio.timeout(WAIT_S):
            long = {**bodies[0], "max_tokens": 400, "stream": True}
            async with http.post("/v1/completions", json=long) as response:
                await response.content.readline()
            while (await (await http.get("/stats")).json())["running"]:
                await asyncio.sleep(0.02)
            last = asyncio.create_task(completed(split, bodies[0]))
            while not (await (await http.get("/stats")).json())["running"]:
                await asyncio.sleep(0.01)
            # The agent signals the whole group.
            for pid in (*worker_processes, process.pid):
                os.kill(pid, signal.SIGTERM)
            assert await last == expected[0]
        assert await asyncio.to_thread(process.wait, WAIT_S) == 0
    finally:
        end(process)
    assert not any(Path(f"/proc/{pid}").exists() for pid in worker_processes)


@pytest.mark.parametrize("death_signal", [signal.SIGKILL, signal.SIGSTOP])
async def test_losing_a_rank_ends_the_engine_and_is_logged(
    short_folder: Path, folder_of_mixture: Path, death_signal: signal.Signals
) -> None:
    process = launched(short_folder, folder_of_mixture, pipeline_parallel=3, stall_s=2.0)
    body = {"prompt": [3, 5, 8], "max_tokens": 240, "logit_bias": {"63": -100}}
    try:
        engine = wait_ready(process, short_folder)
        first, second = worker_pids(process)
        requests = [completed(engine, body) for _ in range(8)]
        answers = asyncio.gather(*requests, return_exceptions=True)
        async with engine.session() as http, asyncio.timeout(WAIT_S):
            while (await (await http.get("/stats")).json())["running"] == 0:
                await asyncio.sleep(0.01)
            os.kill(second, death_signal)
            assert all(isinstance(answer, AssertionError) for answer in await answers)
        assert await asyncio.to_thread(process.wait, WAIT_S) == 1
        log = (short_folder / "log").read_text()
        reason = "has ended" if death_signal is signal.SIGKILL else "did not end: killed"
        assert f"rank 2 (process {second}) {reason}" in log
        assert not Path(f"/proc/{first}").exists()
    finally:
        end(process)


async def test_an_impossible_split_is_refused_with_a_reason(
    short_folder: Path, folder_of_mixture: Path
) -> None:
    process = launched(short_folder, folder_of_mixture, tensor_parallel=3)
    try:
        assert await asyncio.to_thread(process.wait, 30) == 2
        log = (short_folder / "log").read_text()
        assert "tensor_parallel 3: 4 heads do not divide by it" in log
    finally:
        end(process)


def test_more_stages_than_layers_are_refused_before_memory_is_taken(
    folder_of_mixture: Path,
) -> None:
    config = EngineConfig(
        model_path=str(folder_of_mixture), served_name="m", socket="unused", pipeline_parallel=60
    )
    with pytest.raises(CheckpointError, match="pipeline_parallel 60: it has 3 layers"):
        load_engine(config)


GROUP: dict[str, Any] = {
    "leader_id": "r",
    "nodes": 2,
    "host": "127.0.0.1",
    "secret": "known to both",
}


def in_group(folder: Path, model: Path, group: dict[str, Any]) -> Engine:
    folder.mkdir(exist_ok=True)
    # Two ranks on each of two nodes.
    split = {"pipeline_parallel": 2, "tensor_parallel": 2}
    return launched(folder, model, **split, stall_s=5.0, group=group)


async def test_a_node_without_the_secret_is_rejected_and_losing_one_rank_ends_all(
    short_folder: Path, folder_of_mixture: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        group = {**GROUP, "port": probe.getsockname()[1]}
    places: dict[str, dict[str, Any]] = {
        "leader": {"place": 0},
        "impostor": {"place": 1, "secret": "a guess"},
    }
    parts = {
        name: in_group(short_folder / name, folder_of_mixture, {**group, **fields})
        for name, fields in places.items()
    }
    try:
        log = short_folder / "leader" / "log"
        async with asyncio.timeout(WAIT_S):
            while "it does not know the group's secret" not in log.read_text():
                await asyncio.sleep(0.05)
        impostor = parts.pop("impostor")
        (orphan,) = worker_pids(impostor)
        end(impostor)
        member = in_group(short_folder / "member", folder_of_mixture, {**group, "place": 1})
        parts["member"] = member
        engine = wait_ready(parts["leader"], short_folder / "leader")
        async with asyncio.timeout(WAIT_S):
            while not (short_folder / "member" / "engine.sock").exists():
                await asyncio.sleep(0.02)
        assert await completed(engine, {"prompt": [3, 5, 8], "max_tokens": 4})
        os.kill(worker_pids(member)[0], signal.SIGKILL)
        assert await asyncio.to_thread(member.wait, WAIT_S) == 1
        assert await asyncio.to_thread(parts["leader"].wait, WAIT_S) == 1
        assert "rank 3 (on another node) has ended" in log.read_text()
        # No process of the rejected node keeps dialling after its first one has ended.
        async with asyncio.timeout(WAIT_S):
            while Path(f"/proc/{orphan}").exists():
                await asyncio.sleep(0.05)
    finally:
        for part in parts.values():
            end(part)

"""Runs tiny models over several processes: `python -m ...split_run OUT CASE...`

A case FAMILY:KIND:TENSOR:PIPELINE:EXPERT writes the logits of a split model to OUT as JSON. A case
drafts:KIND:TENSOR:PIPELINE writes the output of a split model with a draft model of this kind, and
that of a single process. Each case has its own processes, forked before anything is computed.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.distributed.shards import ModelShard, ParallelConfig
from nodeagent.engine.loading import load_engine
from nodeagent.engine.model.families import adapters_of, build_model, check_weights
from nodeagent.engine.scheduler.batch import BlockCopy
from nodeagent.engine.weights.adapter_folder import read_adapter
from nodeagent.engine.weights.checkpoint import open_checkpoint
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.workers.commands import CommandDone
from nodeagent.engine.workers.rank0 import Rank0Executor
from nodeagent.engine.workers.worker import execute, run_worker
from nodeagent.engine.workers.worker_group import CommandChannel, fork_workers
from ops.golden import tiny
from ops.golden.tiny_gguf import write_gguf
from tests.integration.engine.forced import BLOCKS, logits_by, logits_of
from tests.integration.engine.test_drafting import answer, config_of, folder, write_head
from tests.integration.engine.test_lora import ATTENTION, MLP, write_adapter

TIMEOUT_S = 30.0
ADAPTED = ("llama", "qwen3_moe")


def prepare(folder: Path, family: str, kind: str) -> Path:
    if kind == "gguf":
        write_gguf(folder / "m.gguf", family)
    else:
        tiny.write_folder(folder, family)
    return folder


def runner_of(
    path: Path, split: ParallelConfig, rank: int
) -> tuple[ModelRunner, ModelShard, Communicator]:
    torch.set_num_threads(1)
    source, ranks = open_checkpoint(path), Communicator(split, rank)
    check_weights(source.shape, source, split)
    model = build_model(source.shape, source, "cpu", torch.float32, 128, communicator=ranks)
    source.close()
    runner = ModelRunner(model, BLOCKS, "cpu", torch.float32)
    return runner, ModelShard(source.shape, split, rank), ranks


def run(path: Path, split: ParallelConfig) -> list[list[list[list[float]]]]:
    """Return the logits of a case, and check that KV blocks are read back as they were written."""

    def run_rank(rank: int, channel: CommandChannel) -> int:
        runner, shard, ranks = runner_of(path, split, rank)
        channel.reply(CommandDone())
        channel.receive_command()
        ranks.connect(path / "meeting", "cpu", TIMEOUT_S)
        while (command := channel.receive_command()) is not None:
            execute(command, runner, shard, channel)
        return 0

    workers = fork_workers(split.ranks, run_rank)
    try:
        runner, shard, ranks = runner_of(path, split, 0)
        workers.wait_loaded()
        workers.join(TIMEOUT_S)
        ranks.connect(path / "meeting", "cpu", TIMEOUT_S)
        executor = Rank0Executor(runner, workers, shard.whole, ranks)
        prompts = tiny.prompts()
        # A budget of 9 tokens mixes chunks of prompts with decodes of earlier ones.
        logits = [[[row.tolist() for row in rows] for rows in logits_by(executor, prompts, 9)]]
        contents = executor.read_blocks([1, 3])
        assert contents.abs().sum() > 0
        executor.write_blocks([5, 2], contents)
        assert torch.equal(executor.read_blocks([5, 2]), contents)
        executor.copy([BlockCopy(5, 6), BlockCopy(2, 7)])
        assert torch.equal(executor.read_blocks([6, 7]), contents)
        executor.clear([5])
        assert torch.equal(executor.read_blocks([2, 5])[0], contents[1])
        assert not executor.read_blocks([5]).any()
        if shard.whole.family in ADAPTED and (path / "config.json").exists():
            check_adapters(path, executor)
        return logits
    finally:
        workers.shut_down()


def check_adapters(path: Path, executor: Rank0Executor) -> None:
    """Check that the adapters of a batch have the effect that they have in a single process."""
    source = open_checkpoint(path)
    family = source.shape.family
    parts = ATTENTION + (() if source.shape.experts else MLP)
    modules = adapters_of(source.shape, source).modules
    adapters: list[LoraAdapter | None] = [None]
    for seed in (1, 2):
        folder = path / f"adapter{seed}"
        write_adapter(folder, family, seed, parts)
        adapters.append(read_adapter(str(seed), folder, modules, "cpu", torch.float32, 1 << 30))
    prompts = [tiny.prompts()[1]] * 3
    found = logits_by(executor, prompts, 17, adapters)
    expected_logits = logits_of(source.shape, source, prompts, 17, adapters)
    for rows, expected in zip(found, expected_logits, strict=True):
        assert torch.allclose(torch.stack(rows), torch.stack(expected), atol=1e-4, rtol=0)
    assert not torch.allclose(torch.stack(found[0]), torch.stack(found[1]), atol=0.1)
    # One adapter is read again under another name, and the other is dropped.
    adapters[1:] = [read_adapter("3", path / "adapter1", modules, "cpu", torch.float32, 1 << 30)]
    again = logits_by(executor, prompts[:2], 17, adapters)
    assert torch.allclose(torch.stack(again[1]), torch.stack(found[1]), atol=1e-4, rtol=0)
    assert len(executor._runner.adapters) == 1
    source.close()


def drafts(path: Path, kind: str, tensor: int, pipeline: int) -> list[Any]:
    """Return the outputs and draft counts of a model with a draft model, split and whole."""
    served = folder(path / "served")
    draft = served if kind == "model" else write_head(path / "head")
    whole = config_of(served, draft)
    config = msgspec.structs.replace(
        whole, socket=f"{path}/s", tensor_parallel=tensor, pipeline_parallel=pipeline, threads=1
    )
    workers = fork_workers(tensor * pipeline, partial(run_worker, config))
    try:
        outputs: list[Any] = []
        features: list[Any] = []
        for loaded in (load_engine(config, workers), load_engine(whole)):
            assert loaded.engine.speculation is not None
            # A single answer, because two would be drafted for in separate steps with stages.
            tokens = answer(loaded, drafts=True, answers=1)
            outputs.append([tokens, loaded.engine.speculation.counts()])
            runner: Any = loaded.engine._executor
            features.append(getattr(runner, "_runner", runner).token_states)
        if kind == "head":
            first, second = (recorded._slots for recorded in features)
            assert first.abs().sum() > 1
            slots = min(len(first), len(second))
            assert torch.allclose(first[:slots], second[:slots], atol=1e-4, rtol=0)
        return outputs
    finally:
        workers.shut_down()


def main() -> None:
    out = Path(sys.argv[1])
    for case in sys.argv[2:]:
        family, kind, *numbers = case.split(":")
        pid = os.fork()
        if pid == 0:
            with tempfile.TemporaryDirectory() as name:
                found: Any
                if family == "drafts":
                    found = drafts(Path(name), kind, *map(int, numbers))
                else:
                    found = run(
                        prepare(Path(name), family, kind), ParallelConfig(*map(int, numbers))
                    )[0]
            (out / f"{case}.json").write_text(json.dumps(found))
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

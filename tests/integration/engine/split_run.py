"""Runs tiny models over several real processes: `python -m ... OUT CASE...`.

A case is FAMILY:KIND:TENSOR:PIPELINE:EXPERT, whose logits are left in OUT as JSON. Or it is
drafts:KIND:TENSOR:PIPELINE, with the kind of model that drafts: what the split says is left, and
what one process says. Each has processes of its own, forked before anything was computed.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.distributed.collectives import Ranks
from nodeagent.engine.distributed.commands import Done
from nodeagent.engine.distributed.rank0 import Front
from nodeagent.engine.distributed.shards import Share, Split
from nodeagent.engine.distributed.worker import follow, obey
from nodeagent.engine.distributed.worker_group import Channel, muster
from nodeagent.engine.loading import load
from nodeagent.engine.model.families import adding_of, build, survey
from nodeagent.engine.model.layers.lora import Adapter
from nodeagent.engine.weights.adapter import read_adapter
from nodeagent.engine.weights.checkpoint import open_checkpoint
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


def runner_of(path: Path, split: Split, rank: int) -> tuple[Runner, Share, Ranks]:
    torch.set_num_threads(1)
    source, ranks = open_checkpoint(path), Ranks(split, rank)
    survey(source.shape, source, split)
    model = build(source.shape, source, "cpu", torch.float32, 128, ranks=ranks)
    source.close()
    runner = Runner(model, BLOCKS, "cpu", torch.float32)
    return runner, Share(source.shape, split, rank), ranks


def run(path: Path, split: Split) -> list[list[list[list[float]]]]:
    """Return the logits of a case; and hold what KV blocks hold to be what was written."""

    def follow(rank: int, channel: Channel) -> int:
        runner, share, ranks = runner_of(path, split, rank)
        channel.say(Done())
        channel.order()
        ranks.join(path / "meeting", "cpu", TIMEOUT_S)
        while (order := channel.order()) is not None:
            obey(order, runner, share, channel)
        return 0

    crew = muster(split.ranks, follow)
    try:
        runner, share, ranks = runner_of(path, split, 0)
        crew.wait_loaded()
        crew.join(TIMEOUT_S)
        ranks.join(path / "meeting", "cpu", TIMEOUT_S)
        front = Front(runner, crew, share.whole, ranks)
        prompts = tiny.prompts()
        # Budget 9: prompts come in chunks, mixed with the decodes of those that came before.
        logits = [[[row.tolist() for row in rows] for rows in logits_by(front, prompts, 9)]]
        held = front.read_blocks([1, 3])
        assert held.abs().sum() > 0
        front.write_blocks([5, 2], held)
        assert torch.equal(front.read_blocks([5, 2]), held)
        front.copy([(5, 6), (2, 7)])
        assert torch.equal(front.read_blocks([6, 7]), held)
        front.clear([5])
        assert torch.equal(front.read_blocks([2, 5])[0], held[1])
        assert not front.read_blocks([5]).any()
        if share.whole.family in ADAPTED and (path / "config.json").exists():
            hold_to_one(path, front)
        return logits
    finally:
        crew.end()


def hold_to_one(path: Path, front: Front) -> None:
    """Hold adapters in one batch to add what they add where one process has the whole model."""
    source = open_checkpoint(path)
    family = source.shape.family
    parts = ATTENTION + (() if source.shape.experts else MLP)
    modules = adding_of(source.shape, source).modules
    held: list[Adapter | None] = [None]
    for seed in (1, 2):
        folder = path / f"adapter{seed}"
        write_adapter(folder, family, seed, parts)
        held.append(read_adapter(str(seed), folder, modules, "cpu", torch.float32, 1 << 30))
    prompts = [tiny.prompts()[1]] * 3
    found = logits_by(front, prompts, 17, held)
    wanted = logits_of(source.shape, source, prompts, 17, held)
    for rows, expected in zip(found, wanted, strict=True):
        assert torch.allclose(torch.stack(rows), torch.stack(expected), atol=1e-4, rtol=0)
    assert not torch.allclose(torch.stack(found[0]), torch.stack(found[1]), atol=0.1)
    # Read again under another name, and let go of.
    held[1:] = [read_adapter("3", path / "adapter1", modules, "cpu", torch.float32, 1 << 30)]
    again = logits_by(front, prompts[:2], 17, held)
    assert torch.allclose(torch.stack(again[1]), torch.stack(found[1]), atol=1e-4, rtol=0)
    assert len(front._runner.adapters) == 1
    source.close()


def drafts(path: Path, kind: str, tensor: int, pipeline: int) -> list[Any]:
    """Return the answer of a model with one that drafts, and how its drafts fared."""
    served = folder(path / "served")
    draft = served if kind == "model" else write_head(path / "head")
    whole = config_of(served, draft)
    config = msgspec.structs.replace(
        whole, socket=f"{path}/s", tensor_parallel=tensor, pipeline_parallel=pipeline, threads=1
    )
    crew = muster(tensor * pipeline, lambda rank, channel: follow(config, rank, channel))
    try:
        told: list[Any] = []
        heard: list[Any] = []
        for loaded in (load(config, crew), load(whole)):
            assert loaded.engine.speculation is not None
            # One alone: two would be drafted for in steps of their own where stages are split.
            tokens = answer(loaded, drafts=True, answers=1)
            told.append([tokens, loaded.engine.speculation.counts()])
            runner: Any = loaded.engine._runner
            heard.append(getattr(runner, "_runner", runner).beside)
        if kind == "head":
            first, second = (features._slots for features in heard)
            assert first.abs().sum() > 1
            slots = min(len(first), len(second))
            assert torch.allclose(first[:slots], second[:slots], atol=1e-4, rtol=0)
        return told
    finally:
        crew.end()


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
                    found = run(prepare(Path(name), family, kind), Split(*map(int, numbers)))[0]
            (out / f"{case}.json").write_text(json.dumps(found))
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

"""Weights brought through bounded buffers are the file's own; what cannot be read is said."""

from pathlib import Path

import pytest
import torch

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.distributed.shards import Cut
from nodeagent.engine.kernels.cuda.weight_staging import Staging
from nodeagent.engine.model.families import build
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights import weight_loading as weights
from nodeagent.engine.weights.safetensors import SafetensorsFolder
from ops.golden import tiny
from tests.unit.engine.test_graphs import prompts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_folder(tmp_path, "qwen2")
    return tmp_path


def test_pieces_make_the_weight_whole(folder: Path) -> None:
    source, staging = SafetensorsFolder(folder), Staging("cpu", piece_bytes=100, readers=3)
    name, shape = "model.layers.1.mlp.down_proj.weight", (tiny.HIDDEN, tiny.WIDE)
    wanted = source.tensor(name, shape)
    stored = source.stored(name, shape)
    cut = source.stored(name, shape, Cut(shape, 0, 5, 9))
    assert stored is not None and cut is not None
    assert source.stored(name, shape, Cut(shape, 1, 5, 9)) is None
    # One as it is stored, one in another kind of numbers, one a part.
    same, other, few = torch.empty(shape), torch.empty(shape).bfloat16(), torch.empty(4, tiny.WIDE)
    for piece in staging.bring(same, stored):
        piece.result()
    staging.bring(other, stored)
    staging.bring(few, cut)
    staging.finish()
    assert torch.equal(same, wanted)
    assert torch.equal(other, wanted.bfloat16())
    assert torch.equal(few, wanted[5:9])
    source.close()


def test_each_reader_has_one_buffer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = torch.empty

    def counted(*shape: int, **more: object) -> torch.Tensor:
        taken.append(shape[0])
        return empty(*shape, **more)  # type: ignore[call-overload,no-any-return]

    source, staging = SafetensorsFolder(folder), Staging("cpu", piece_bytes=64, readers=2)
    name, shape = "model.embed_tokens.weight", (tiny.VOCABULARY, tiny.HIDDEN)
    stored, target = source.stored(name, shape), torch.empty(shape)
    assert stored is not None
    monkeypatch.setattr(torch, "empty", counted)
    staging.bring(target, stored)
    staging.finish()
    staging.bring(target.bfloat16(), stored)
    staging.finish()
    # Other kinds of numbers have no second copy of the weight either.
    assert 2 <= len(taken) <= 4 and set(taken) == {64}


def test_a_file_that_ends_early_is_named(folder: Path) -> None:
    source = SafetensorsFolder(folder)
    name, shape = "model.embed_tokens.weight", (tiny.VOCABULARY, tiny.HIDDEN)
    stored = source.stored(name, shape)
    assert stored is not None
    staging = Staging("cpu", piece_bytes=1000)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(stored.start + 10)
    staging.bring(torch.empty(shape), stored)
    with pytest.raises(CheckpointError, match="it ends at byte"):
        staging.finish()
    # What failed leaves nothing open, and the next attempt begins anew.
    staging.finish()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_model_that_was_brought_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tiny.write_folder(tmp_path, family)
    source, logits = SafetensorsFolder(tmp_path), []
    for staged in (False, True):
        if staged:
            monkeypatch.setattr(weights, "staging_for", lambda device: Staging(device, 512, 2))
            monkeypatch.setattr(weights, "_STAGED_NUMBERS_MIN", 1)
        model = build(source.shape, source, "cpu", torch.float32, 64)
        model.arrived()
        runner = Runner(model, 24, "cpu", torch.float32)
        step = prompts(2, 9)
        for chunk in step.segments:
            chunk.ids[:] = [token % tiny.VOCABULARY for token in chunk.ids]
        logits.append(runner.run(step))
    source.close()
    assert torch.equal(*logits)

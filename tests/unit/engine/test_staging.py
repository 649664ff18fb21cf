"""Weights staged through bounded buffers equal the file's; a file that cannot be read is named."""

from pathlib import Path

import pytest
import torch

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.model import weight_loader as weights
from nodeagent.engine.model.families import build_model
from nodeagent.engine.weights.device_staging import WeightStaging
from nodeagent.engine.weights.safetensors_folder import SafetensorsFolder
from ops.golden import tiny
from tests.unit.engine.test_graphs import prompts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_folder(tmp_path, "qwen2")
    return tmp_path


def test_the_pieces_make_up_the_weight(folder: Path) -> None:
    source, staging = SafetensorsFolder(folder), WeightStaging("cpu", piece_bytes=100, readers=3)
    name, shape = "model.layers.1.mlp.down_proj.weight", (tiny.HIDDEN, tiny.WIDE)
    wanted = source.tensor(name, shape)
    stored = source.stored(name, shape)
    cut = source.stored(name, shape, WeightSlice(shape, 0, 5, 9))
    assert stored is not None and cut is not None
    assert source.stored(name, shape, WeightSlice(shape, 1, 5, 9)) is None
    # One as stored, one converted to another dtype, one slice.
    same, other, few = torch.empty(shape), torch.empty(shape).bfloat16(), torch.empty(4, tiny.WIDE)
    for piece in staging.start(same, stored):
        piece.result()
    staging.start(other, stored)
    staging.start(few, cut)
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

    source, staging = SafetensorsFolder(folder), WeightStaging("cpu", piece_bytes=64, readers=2)
    name, shape = "model.embed_tokens.weight", (tiny.VOCABULARY, tiny.HIDDEN)
    stored, target = source.stored(name, shape), torch.empty(shape)
    assert stored is not None
    monkeypatch.setattr(torch, "empty", counted)
    staging.start(target, stored)
    staging.finish()
    staging.start(target.bfloat16(), stored)
    staging.finish()
    # A conversion to another dtype needs no second copy of the weight either.
    assert 2 <= len(taken) <= 4 and set(taken) == {64}


def test_a_file_that_ends_early_is_named(folder: Path) -> None:
    source = SafetensorsFolder(folder)
    name, shape = "model.embed_tokens.weight", (tiny.VOCABULARY, tiny.HIDDEN)
    stored = source.stored(name, shape)
    assert stored is not None
    staging = WeightStaging("cpu", piece_bytes=1000)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(stored.start + 10)
    staging.start(torch.empty(shape), stored)
    with pytest.raises(CheckpointError, match="it ends at byte"):
        staging.finish()
    # A failure leaves nothing open, and the next attempt starts afresh.
    staging.finish()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_a_staged_model_gives_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tiny.write_folder(tmp_path, family)
    source, logits = SafetensorsFolder(tmp_path), []
    for staged in (False, True):
        if staged:
            monkeypatch.setattr(
                weights, "staging_for", lambda device: WeightStaging(device, 512, 2)
            )
            monkeypatch.setattr(weights, "_STAGED_NUMBERS_MIN", 1)
        model = build_model(source.shape, source, "cpu", torch.float32, 64)
        model.wait_for_weights()
        runner = ModelRunner(model, 24, "cpu", torch.float32)
        step = prompts(2, 9)
        for chunk in step.segments:
            chunk.ids[:] = [token % tiny.VOCABULARY for token in chunk.ids]
        logits.append(runner.run(step))
    source.close()
    assert torch.equal(*logits)

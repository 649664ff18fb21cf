"""Matrices of floats come from their files as those have them, whatever they are kept as."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from nodeagent.engine.kernels.cpu import file_reads as fetching
from nodeagent.engine.kernels.cpu.kernels import kernels
from nodeagent.engine.kernels.cpu.matrix_layouts import Native
from nodeagent.engine.model.layers.linear import Keeping
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.gguf import GgufFile
from nodeagent.engine.weights.safetensors import SafetensorsFiles
from nodeagent.engine.weights.weight_loading import Weights, WeightSource

pytestmark = pytest.mark.skipif(
    kernels() is None, reason="our own kernels need a compiler and AVX-512 VNNI"
)

LONG = 1040
"""Rows of more bytes than are read at a time."""
SHAPES = {"a": (48, 96), "b": (LONG, 96), "c": (16, 96)}


def weight(name: str, dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(len(name) + ord(name[0]))
    wide = 2048 if name == "wide" else 96
    return torch.randn(SHAPES.get(name, (LONG, wide)), generator=chance).to(dtype)


def write_folder(folder: Path, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Two shards, in one of which weights begin at any byte."""
    weights = {name: weight(name, dtype) for name, dtype in dtypes.items()}
    shards = ("model-1.safetensors", "model-2.safetensors")
    placed = {name: shards[number % 2] for number, name in enumerate(weights)}
    for shard in shards:
        save_file(
            {name: weights[name] for name in weights if placed[name] == shard}, folder / shard
        )
    path = folder / shards[0]
    (length,) = struct.unpack_from("<Q", whole := path.read_bytes())
    header = whole[8 : 8 + length].rstrip() + b" "
    while len(header) % 2 == 0:
        header += b" "
    path.write_bytes(struct.pack("<Q", len(header)) + header + whole[8 + length :])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return weights


def drop(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fetched(source: WeightSource, keeping: Keeping, *names: str, columns: int = 96) -> Tensor:
    """Return the matrix of these weights, as it is once all is there."""
    weights = Weights(source, "cpu", torch.float32, keeping)
    weights.adding = None
    rows = {name: SHAPES.get(name, (LONG,))[0] for name in names}
    matrix = weights.linear_stack("", rows, columns)
    assert isinstance(matrix, Native)
    assert not matrix.packed.any()
    weights.begin()()
    return matrix[torch.arange(sum(rows.values()))]


def hold(found: Tensor, wanted: Tensor, keeping: Keeping) -> None:
    """Floats are exact, or rounded by a part of their group's largest."""
    if keeping is Keeping.TILED:
        assert torch.equal(found, wanted)
    else:
        error = (found - wanted).abs().view(len(found), -1, 32)
        largest = wanted.abs().view(len(found), -1, 32).amax(-1, keepdim=True)
        assert (error <= largest * 2**-13.9).all()


@pytest.mark.parametrize("disk", ["cached", "cold", "cannot be read so"])
@pytest.mark.parametrize("keeping", [Keeping.TILED, Keeping.NATIVE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_folders_floats_are_its_own(
    tmp_path: Path,
    dtype: torch.dtype,
    keeping: Keeping,
    disk: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = write_folder(tmp_path, dict.fromkeys(("a", "b", "c", "wide"), dtype))
    source = SafetensorsFiles(tmp_path)
    try:
        if disk == "cold":
            drop(tmp_path)
        elif disk != "cached":
            monkeypatch.setattr(fetching, "_open", lambda path, opened: -1)
        joined = torch.cat([weights[name].float() for name in ("c", "a", "b")])
        hold(fetched(source, keeping, "c", "a", "b"), joined, keeping)
        wide = fetched(source, keeping, "wide", columns=2048)
        hold(wide, weights["wide"].float(), keeping)
    finally:
        source.close()


@pytest.mark.parametrize("keeping", [Keeping.TILED, Keeping.NATIVE])
def test_floats_of_several_kinds_are_one_matrix(tmp_path: Path, keeping: Keeping) -> None:
    weights = write_folder(tmp_path, {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16})
    source = SafetensorsFiles(tmp_path)
    joined = torch.cat([weights[name].float() for name in ("a", "b", "c")])
    hold(fetched(source, keeping, "a", "b", "c"), joined, keeping)
    source.close()


def test_columns_need_not_be_whole_groups_where_floats_stay_exact(tmp_path: Path) -> None:
    for columns in (1, 15, 17, 61):
        weights = {"x": torch.randn(LONG, columns).half()}
        save_file(weights, tmp_path / "model.safetensors")
        source = SafetensorsFiles(tmp_path)
        found = fetched(source, Keeping.TILED, "x", columns=columns)
        assert torch.equal(found, weights["x"].float())
        source.close()


@pytest.mark.parametrize("keeping", [Keeping.TILED, Keeping.NATIVE])
def test_a_file_that_was_cut_short_since_it_was_opened_is_named(
    tmp_path: Path, keeping: Keeping
) -> None:
    write_folder(tmp_path, {"a": torch.bfloat16, "b": torch.bfloat16})
    source = SafetensorsFiles(tmp_path)
    os.truncate(tmp_path / "model-2.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: it ends at byte"):
        fetched(source, keeping, "a", "b")
    with pytest.raises(CheckpointError, match="it ends at byte"):
        source.tensor("b", SHAPES["b"])
    source.close()


@pytest.mark.parametrize("head_dim", [8, 32])
def test_a_gguf_files_floats_have_their_heads_put_back(tmp_path: Path, head_dim: int) -> None:
    hidden, heads, path = 128, 128 // head_dim, tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, hidden),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, heads),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    filed = np.random.default_rng(5).standard_normal((hidden, hidden)).astype(np.float16)
    writer.add_tensor("blk.0.attn_q.weight", filed)
    writer.add_tensor("blk.0.ffn_up.weight", filed, raw_dtype=GGMLQuantizationType.F16)
    writer.add_tensor("token_embd.weight", np.ones((32, hidden), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GgufFile(path)
    for keeping in (Keeping.TILED, Keeping.NATIVE):
        weights = Weights(source, "cpu", torch.float32, keeping)
        weights.adding = None
        at = "model.layers.0."
        queries, up = (
            weights.linear_stack(at, {f"{part}_proj.weight": hidden}, hidden)
            for part in ("self_attn.q", "mlp.up")
        )
        weights.begin()()
        assert isinstance(queries, Native) and isinstance(up, Native)
        rows = torch.arange(hidden)
        wanted = torch.from_numpy(filed).float()
        hold(up[rows], wanted, keeping)
        turned = wanted.view(heads, head_dim // 2, 2, hidden).swapaxes(1, 2).reshape(hidden, hidden)
        hold(queries[rows], turned, keeping)
    source.close()

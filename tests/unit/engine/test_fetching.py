"""Float matrices are read from their files unchanged, by either backend of the C kernels."""

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

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.kernels.cpu import file_reads as fetching
from nodeagent.engine.kernels.cpu.library import CpuKernels, cpu_kernels
from nodeagent.engine.kernels.cpu.linear import NativeFloatBackend, NativeQuantisedBackend
from nodeagent.engine.kernels.cpu.native_matrix import NativeMatrix
from nodeagent.engine.model.weight_loader import WeightLoader
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.safetensors_folder import SafetensorsFiles
from nodeagent.engine.weights.weight_source import WeightSource

pytestmark = pytest.mark.skipif(
    cpu_kernels() is None, reason="the C kernels need a compiler and AVX-512 VNNI"
)

Backend = type[NativeFloatBackend] | type[NativeQuantisedBackend]

LONG = 1040
"""Rows with more bytes than one read takes."""
SHAPES = {"a": (48, 96), "b": (LONG, 96), "c": (16, 96)}


def own_kernels() -> CpuKernels:
    kernels = cpu_kernels()
    assert kernels is not None
    return kernels


def weight(name: str, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(len(name) + ord(name[0]))
    wide = 2048 if name == "wide" else 96
    return torch.randn(SHAPES.get(name, (LONG, wide)), generator=random).to(dtype)


def write_folder(folder: Path, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Write two shards; in one of them weights begin at an odd byte."""
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


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fetched(source: WeightSource, backend: Backend, *names: str, columns: int = 96) -> Tensor:
    """Return the rows of the stacked weights after the reads have ended."""
    weights = WeightLoader(source, "cpu", torch.float32, backend(own_kernels()))
    weights.adapters = None
    rows = {name: SHAPES.get(name, (LONG,))[0] for name in names}
    matrix = weights.linear_stack("", rows, columns)
    assert isinstance(matrix, NativeMatrix)
    assert not matrix.packed.any()
    weights.start_reads()()
    return matrix[torch.arange(sum(rows.values()))]


def check_rows(found: Tensor, wanted: Tensor, backend: Backend) -> None:
    """Check that rows are exact, or rounded relative to the largest number of their group."""
    if backend is NativeFloatBackend:
        assert torch.equal(found, wanted)
    else:
        error = (found - wanted).abs().view(len(found), -1, 32)
        largest = wanted.abs().view(len(found), -1, 32).amax(-1, keepdim=True)
        assert (error <= largest * 2**-13.9).all()


@pytest.mark.parametrize("disk", ["cached", "cold", "cannot be read so"])
@pytest.mark.parametrize("backend", [NativeFloatBackend, NativeQuantisedBackend])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_floats_of_a_folder_are_read_unchanged(
    tmp_path: Path,
    dtype: torch.dtype,
    backend: Backend,
    disk: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = write_folder(tmp_path, dict.fromkeys(("a", "b", "c", "wide"), dtype))
    source = SafetensorsFiles(tmp_path)
    try:
        if disk == "cold":
            drop_from_page_cache(tmp_path)
        elif disk != "cached":
            monkeypatch.setattr(fetching, "_open", lambda path, opened: -1)
        joined = torch.cat([weights[name].float() for name in ("c", "a", "b")])
        check_rows(fetched(source, backend, "c", "a", "b"), joined, backend)
        wide = fetched(source, backend, "wide", columns=2048)
        check_rows(wide, weights["wide"].float(), backend)
    finally:
        source.close()


@pytest.mark.parametrize("backend", [NativeFloatBackend, NativeQuantisedBackend])
def test_floats_of_different_dtypes_become_one_matrix(tmp_path: Path, backend: Backend) -> None:
    weights = write_folder(tmp_path, {"a": torch.bfloat16, "b": torch.float32, "c": torch.float16})
    source = SafetensorsFiles(tmp_path)
    joined = torch.cat([weights[name].float() for name in ("a", "b", "c")])
    check_rows(fetched(source, backend, "a", "b", "c"), joined, backend)
    source.close()


def test_exact_floats_need_no_whole_groups(tmp_path: Path) -> None:
    for columns in (1, 15, 17, 61):
        weights = {"x": torch.randn(LONG, columns).half()}
        save_file(weights, tmp_path / "model.safetensors")
        source = SafetensorsFiles(tmp_path)
        found = fetched(source, NativeFloatBackend, "x", columns=columns)
        assert torch.equal(found, weights["x"].float())
        source.close()


@pytest.mark.parametrize("backend", [NativeFloatBackend, NativeQuantisedBackend])
def test_a_file_that_was_truncated_after_opening_is_named(tmp_path: Path, backend: Backend) -> None:
    write_folder(tmp_path, {"a": torch.bfloat16, "b": torch.bfloat16})
    source = SafetensorsFiles(tmp_path)
    os.truncate(tmp_path / "model-2.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: it ends at byte"):
        fetched(source, backend, "a", "b")
    with pytest.raises(CheckpointError, match="it ends at byte"):
        source.tensor("b", SHAPES["b"])
    source.close()


@pytest.mark.parametrize("head_dim", [8, 32])
def test_interleaved_heads_of_a_gguf_file_are_restored(tmp_path: Path, head_dim: int) -> None:
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
    for backend in (NativeFloatBackend, NativeQuantisedBackend):
        weights = WeightLoader(source, "cpu", torch.float32, backend(own_kernels()))
        weights.adapters = None
        at = "model.layers.0."
        queries, up = (
            weights.linear_stack(at, {f"{part}_proj.weight": hidden}, hidden)
            for part in ("self_attn.q", "mlp.up")
        )
        weights.start_reads()()
        assert isinstance(queries, NativeMatrix) and isinstance(up, NativeMatrix)
        rows = torch.arange(hidden)
        wanted = torch.from_numpy(filed).float()
        check_rows(up[rows], wanted, backend)
        turned = wanted.view(heads, head_dim // 2, 2, hidden).swapaxes(1, 2).reshape(hidden, hidden)
        check_rows(queries[rows], turned, backend)
    source.close()

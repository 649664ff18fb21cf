"""Every linear backend multiplies as the matrix does, each within its own tolerance."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from isochrone.wire.engines.engine import Quantisation
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.kernels import selection
from nodeagent.engine.kernels.cpu.library import CpuKernels, cpu_kernels
from nodeagent.engine.kernels.cpu.linear import (
    NativeBytesBackend,
    NativeFloatBackend,
    NativeQuantisedBackend,
)
from nodeagent.engine.kernels.cpu.native_matrix import NativeMatrix
from nodeagent.engine.kernels.linear_backend import Linear, LinearBackend
from nodeagent.engine.kernels.matrix_formats import QuantisedGroups, stack_quantised
from nodeagent.engine.kernels.selection import choose_linear
from nodeagent.engine.kernels.torch.linear import (
    Fp16Linear,
    Int4Linear,
    OneDnnBackend,
    OneDnnLinear,
    PackedBackend,
    PlainBackend,
    PlainLinear,
)
from nodeagent.engine.weights.gguf_file import GgufFile
from nodeagent.engine.weights.gguf_unpacking import BITS_OF

ROWS, COLUMNS = 192, 256
HEADS = 4
WIDE = 8192
"""Rows with more bytes than one read takes."""


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_groups(seed: int) -> QuantisedGroups:
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (ROWS, COLUMNS), generator=random, dtype=torch.uint8)
    scales = torch.rand(ROWS, COLUMNS // 32, generator=random) * 0.01
    return QuantisedGroups(numbers, scales, -8 * scales + 0.001)


def error(product: Linear, weight: torch.Tensor, rows: int) -> float:
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
    exact = x @ weight.T
    found = product(x)
    assert found.shape == exact.shape
    assert found.dtype == torch.float32
    return float((found - exact).norm() / exact.norm()) if rows else 0.0


def eight_bits(seed: int) -> QuantisedGroups:
    four = some_groups(seed)
    numbers = torch.randint(0, 256, four.numbers.shape, dtype=torch.uint8)
    return QuantisedGroups(numbers, four.scales, -128 * four.scales, bits=8)


def own_kernels() -> CpuKernels:
    kernels = cpu_kernels()
    assert kernels is not None
    return kernels


def exact_floats(parts: list[torch.Tensor]) -> NativeMatrix:
    return own_kernels().pack_floats(parts, rounded=False)


def rounded_floats(parts: list[torch.Tensor]) -> NativeMatrix:
    return own_kernels().pack_floats(parts, rounded=True)


needs_kernels = pytest.mark.skipif(
    cpu_kernels() is None, reason="the C kernels need a compiler and AVX-512 VNNI"
)


@needs_kernels
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33])
@pytest.mark.parametrize("groups", [some_groups(1), eight_bits(2)], ids=["four", "eight"])
def test_products_by_groups_are_as_exact_as_the_file(groups: QuantisedGroups, rows: int) -> None:
    halves = QuantisedGroups(
        groups.numbers, groups.scales.half().float(), groups.offsets.half().float(), groups.bits
    )
    product = own_kernels().pack_groups(halves)
    assert error(product, halves.dequantise(), rows) < 1e-4
    wanted = torch.tensor([0, 17, 3, ROWS - 1])
    assert torch.equal(product[wanted], halves.dequantise()[wanted])
    with pytest.raises(IndexError, match="there are 192"):
        product[torch.tensor([ROWS])]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 23, 200])
def test_products_by_floats_are_exact(dtype: torch.dtype, rows: int) -> None:
    parts = [random(count, 161, seed=count).to(dtype) for count in (48, 16)]
    weight = torch.cat(parts).float()
    product = exact_floats(parts)
    assert error(product, weight, rows) < 1e-6
    wanted = torch.tensor([63, 0, 50, 17])
    assert torch.equal(product[wanted], weight[wanted])
    with pytest.raises(IndexError, match="there are 64"):
        product[torch.tensor([-1])]


@needs_kernels
@given(
    tiles=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    columns=st.integers(1, 330),
    rows=st.one_of(st.integers(0, 40), st.integers(188, 196)),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    rounded=st.booleans(),
    threads=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_products_by_floats_equal_torch_for_any_shape(
    tiles: list[int], columns: int, rows: int, dtype: torch.dtype, rounded: bool, threads: int
) -> None:
    columns = max(columns // 32, 1) * 32 if rounded else columns
    parts = [random(16 * count, columns, seed=count).to(dtype) for count in tiles]
    product = own_kernels().pack_floats(parts, rounded)
    x, before = random(rows, columns, seed=rows), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = product(x)
    finally:
        torch.set_num_threads(before)
    most = 1e-3 if rounded else 1e-5
    torch.testing.assert_close(found, x @ torch.cat(parts).float().T, rtol=most, atol=most * 20)


@needs_kernels
def test_floats_of_different_dtypes_are_multiplied_in_fp32() -> None:
    parts = [random(16, 64, seed=1), random(16, 64, seed=2).half(), random(16, 64, seed=3).double()]
    weight = torch.cat([part.float() for part in parts])
    assert error(exact_floats(parts), weight, 3) < 1e-6
    assert error(rounded_floats(parts), weight, 3) < 3e-4


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_the_error_of_rounded_floats_is_relative_to_their_group(rows: int) -> None:
    weight = random(ROWS, COLUMNS, seed=4) * 10.0 ** random(ROWS, 1, seed=5)
    weight[3], weight[4, :32] = 0.0, 1e-30
    product = rounded_floats([weight[:64].half().float(), weight[64:]])
    weight[:64] = weight[:64].half().float()
    assert error(product, weight, rows) < 3e-4
    wanted = torch.tensor([0, 3, 17, ROWS - 1])
    read = product[wanted]
    largest = weight[wanted].view(4, -1, 32).abs().amax(-1, keepdim=True)
    assert ((read - weight[wanted]).abs().view(4, -1, 32) <= largest * 2**-13.9).all()


@needs_kernels
def test_the_largest_numbers_do_not_overflow() -> None:
    """All numbers and all weights of a group are at their largest, with one sign."""
    product = rounded_floats([torch.full((16, 64), 3.0)])
    answer = product(torch.full((5, 64), -7.0))
    torch.testing.assert_close(answer, torch.full((5, 16), -21.0 * 64))
    weight = torch.full((16, 64), 3.0)
    weight[2, 5] = float("nan")
    answer = rounded_floats([weight])(torch.ones(2, 64))
    assert answer[:, 2].isnan().all()
    assert answer[:, 3].isfinite().all()


@needs_kernels
def test_nan_stays_in_its_own_row() -> None:
    product = own_kernels().pack_groups(some_groups(1))
    x = torch.ones(3, COLUMNS)
    x[0, 5], x[2] = float("nan"), 0.0
    found = product(x)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
    assert (found[2] == 0).all()


def bytes_error(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return how far products by bytes may be off: half a step for each number of x.

    A step is 1/127 of the group's largest number, or 1/32639 in a group with an outlier.
    """
    groups = x.view(len(x), x.shape[1] // 32, 32)
    largest = groups.abs().amax(-1, keepdim=True)
    outlier = 8 * x.square().mean(-1).sqrt()[:, None, None]
    step = largest / torch.where(largest > outlier * 0.9999, 32639, 127)
    step = torch.where((largest > outlier * 0.9999) & (largest < outlier * 1.0001), largest, step)
    return (step.expand_as(groups).reshape(x.shape) / 2) @ weight.abs().T


@needs_kernels
@given(
    panels=st.integers(1, 5),
    groups=st.integers(1, 9),
    rows=st.integers(0, 35),
    kind=st.sampled_from(["4 bits", "8 bits", torch.float16, torch.bfloat16, torch.float32]),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_products_by_bytes_are_off_by_half_a_step_at_most_in_any_batch(
    panels: int,
    groups: int,
    rows: int,
    kind: str | torch.dtype,
    spread: float,
    threads: int,
    seed: int,
) -> None:
    columns = 32 * groups
    weight = random(16 * panels, columns, seed=seed)
    if isinstance(kind, torch.dtype):
        product = own_kernels().pack_floats_as_bytes([weight.to(kind)])
    else:
        bits = int(kind[0])
        numbers = ((weight * 2 ** (bits - 3)) + 2 ** (bits - 1)).clamp(0, 2**bits - 1)
        scales = torch.rand(16 * panels, groups).half().float()
        kept = QuantisedGroups(numbers.to(torch.uint8), scales, -scales * 2 ** (bits - 1), bits)
        product = own_kernels().pack_groups(kept, by_bytes=True)
    exact = product[torch.arange(16 * panels)]
    x = random(rows, columns, seed=seed + 1) * (spread * random(columns, seed=seed + 2)).exp()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = product(x)
        alone = [product(x[row : row + 1]) for row in range(rows)]
        later = product(x[rows // 3 :])
    finally:
        torch.set_num_threads(before)
    limit = bytes_error(x, exact) * 1.0001 + (x.abs() @ exact.abs().T) * 1e-5
    assert ((found - x @ exact.T).abs() <= limit).all()
    assert all(torch.equal(row, found[at : at + 1]) for at, row in enumerate(alone))
    assert torch.equal(later, found[rows // 3 :])


@needs_kernels
def test_an_outlier_does_not_make_the_other_numbers_of_its_group_inexact() -> None:
    product = own_kernels().pack_groups(some_groups(1), by_bytes=True)
    weight = product[torch.arange(ROWS)]
    x = random(9, COLUMNS, seed=3)
    x[::2, 40] = 3000.0
    outlier = x[:, 40:41] @ weight[:, 40:41].T
    found, exact = product(x) - outlier, x @ weight.T - outlier
    # With one byte for the group, the 31 other numbers would be rounded to nought.
    assert float((found - exact)[::2].norm() / exact[::2].norm()) < 0.03
    assert float((found - exact)[1::2].norm() / exact[1::2].norm()) < 0.01


@needs_kernels
def test_floats_as_bytes_are_off_by_half_a_step_of_their_group() -> None:
    weight = random(ROWS, COLUMNS, seed=4) * 10.0 ** random(ROWS, 1, seed=5)
    weight[3] = 0.0
    product = own_kernels().pack_floats_as_bytes([weight[:64], weight[64:]])
    read = product[torch.arange(ROWS)]
    largest = weight.view(ROWS, -1, 32).abs().amax(-1, keepdim=True)
    # The scale has 16 bits.
    limit = largest / 127 * (0.5 + 127 * 2**-11) + 1e-5
    assert ((read - weight).abs().view(ROWS, -1, 32) <= limit).all()
    assert (read[3] == 0).all()


@needs_kernels
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_products_by_bytes_keep_what_is_not_finite_in_its_own_row(wrong: float) -> None:
    product = own_kernels().pack_groups(some_groups(1), by_bytes=True)
    x = torch.ones(3, COLUMNS)
    x[0, 5], x[2] = wrong, 0.0
    found = product(x)
    assert not found[0].isfinite().any()
    assert torch.equal(found[1:2], product(torch.ones(1, COLUMNS)))
    assert (found[2] == 0).all()
    weight = torch.ones(16, 64)
    weight[2, 5] = wrong
    answer = own_kernels().pack_floats_as_bytes([weight])(torch.ones(2, 64))
    assert not answer[:, 2].isfinite().any()
    assert answer[:, 3].isfinite().all()


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_each_torch_linear_keeps_its_tolerance(rows: int) -> None:
    groups = some_groups(1)
    weight = groups.dequantise()
    assert error(PlainLinear(weight), weight, rows) < 1e-6
    assert error(OneDnnLinear(weight), weight, rows) < 1e-6
    assert error(Fp16Linear(weight), weight, rows) < 1e-3
    assert error(OneDnnLinear(weight.bfloat16()), weight, rows) < 1e-2
    assert error(Int4Linear(groups), weight, rows) < 1e-2


def test_stacked_groups_are_one_matrix() -> None:
    one, other = some_groups(1), some_groups(2)
    weight = torch.cat((one.dequantise(), other.dequantise()))
    joined = stack_quantised([one, other])
    assert isinstance(joined, QuantisedGroups)
    assert torch.equal(joined.dequantise(), weight)
    assert error(PackedBackend().from_quantised(joined), weight, 2) < 1e-2


def backend_for(device: str, dtype: torch.dtype, quantisation: Quantisation) -> str:
    return choose_linear(device, dtype, quantisation)[0].name


def test_a_matrix_that_a_kernel_cannot_take_is_kept_otherwise() -> None:
    groups = some_groups(3)
    groups = QuantisedGroups(groups.numbers[:90], groups.scales[:90], groups.offsets[:90])
    backends: list[LinearBackend] = [PackedBackend()]
    if cpu_kernels():
        backends.append(NativeQuantisedBackend(own_kernels()))
    for backend in backends:
        assert isinstance(backend.from_quantised(groups), OneDnnLinear | PlainLinear)
    assert isinstance(OneDnnBackend().from_tensor(torch.ones(8, 8)), PlainLinear)


def test_the_backend_follows_the_device_the_dtype_and_the_quantisation() -> None:
    assert backend_for("cuda:0", torch.bfloat16, "file") == "plain"
    assert backend_for("cpu", torch.float16, "file") == "plain"
    floats, quantised = (
        ("native-floats", "native-quantised") if cpu_kernels() else ("onednn", "onednn")
    )
    assert backend_for("cpu", torch.float32, "none") == floats
    assert backend_for("cpu", torch.float32, "auto") == quantised
    in_bytes = "native-bytes" if cpu_kernels() else "packed"
    assert backend_for("cpu", torch.float32, "int8") == in_bytes
    assert backend_for("cpu", torch.bfloat16, "none") == "onednn"


@pytest.mark.parametrize("has_bf16", [True, False])
def test_without_the_c_kernels_weights_are_packed_only_if_asked_and_possible(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(selection, "cpu_kernels", lambda: None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert backend_for("cpu", torch.float32, "auto") == "onednn"
    packed, bf16 = ("packed", "onednn") if has_bf16 else ("onednn", "plain")
    assert backend_for("cpu", torch.float32, "file") == packed
    assert backend_for("cpu", torch.float32, "int8") == packed
    assert backend_for("cpu", torch.bfloat16, "auto") == bf16


@needs_kernels
@pytest.mark.parametrize(("groups", "bits"), [(some_groups(1), 4), (eight_bits(1), 8)])
def test_bytes_per_weight_is_what_a_matrix_takes(groups: QuantisedGroups, bits: int) -> None:
    quantised, floats = (
        NativeQuantisedBackend(own_kernels()),
        NativeFloatBackend(own_kernels()),
    )
    kept = own_kernels().pack_groups(groups)
    promised = quantised.bytes_per_weight(torch.float32, bits)
    assert kept.packed.nbytes == groups.numbers.numel() * promised
    rounded = rounded_floats([torch.ones(32, 64)])
    assert rounded.packed.nbytes == 32 * 64 * quantised.bytes_per_weight(torch.float32, 16)
    by_bytes = NativeBytesBackend(own_kernels())
    as_bytes = own_kernels().pack_floats_as_bytes([torch.ones(32, 64)])
    assert as_bytes.packed.nbytes == 32 * 64 * by_bytes.bytes_per_weight(torch.float32, 16)
    assert by_bytes.bytes_per_weight(torch.float32, bits) == promised
    assert floats.bytes_per_weight(torch.float32, 16) == 2
    assert floats.bytes_per_weight(torch.float32, bits) == 4
    assert PlainBackend().bytes_per_weight(torch.bfloat16, bits) == 2


@pytest.mark.parametrize("disk", ["cached", "cold", "gives nothing past its cache"])
@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
)
def test_the_groups_of_a_gguf_file_are_kept_as_they_are(
    tmp_path: Path, kind: GGMLQuantizationType, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 64),
        (writer.add_embedding_length, COLUMNS),
        (writer.add_block_count, 1),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, HEADS),
    ):
        add(value)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(5)
    weights = {
        "blk.0.attn_q.weight": random.standard_normal((COLUMNS, COLUMNS), dtype=np.float32),
        "blk.0.ffn_down.weight": random.standard_normal((COLUMNS, 64), dtype=np.float32),
        "blk.0.ffn_gate.weight": random.standard_normal((WIDE, COLUMNS), dtype=np.float32),
    }
    for name, weight in weights.items():
        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)
    writer.add_tensor("token_embd.weight", np.ones((32, COLUMNS), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if disk == "cold":
        with path.open("rb") as written:
            os.fdatasync(written.fileno())
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    elif disk != "cached":
        monkeypatch.setattr(
            "nodeagent.engine.kernels.cpu.file_reads._open",
            lambda path, opened: os.open(os.devnull, os.O_RDONLY),
        )
    file = GgufFile(path)
    assert file.filed_bits() == {BITS_OF[kind]: COLUMNS * (COLUMNS + 64 + WIDE), 32: 32 * COLUMNS}
    try:
        for name, shape in (
            ("model.layers.0.self_attn.q_proj.weight", (COLUMNS, COLUMNS)),
            ("model.layers.0.mlp.down_proj.weight", (COLUMNS, 64)),
            ("model.layers.0.mlp.gate_proj.weight", (WIDE, COLUMNS)),
        ):
            groups = file.groups(name, shape)
            assert groups is not None
            wide = groups.groups().dequantise()
            torch.testing.assert_close(wide, file.tensor(name, shape))
            if cpu_kernels():
                backend = NativeQuantisedBackend(own_kernels())
                both = backend.from_quantised(stack_quantised([groups, groups]))
                assert isinstance(both, NativeMatrix)
                backend.start_reads()()
                wanted = torch.cat((wide, wide))
                found = both[torch.arange(len(wanted))]
                torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
        assert file.groups("model.embed_tokens.weight", (32, COLUMNS)) is None
        os.truncate(path, path.stat().st_size // 2)
        groups = file.groups("model.layers.0.mlp.gate_proj.weight", (WIDE, COLUMNS))
        assert groups is not None
        backends: list[LinearBackend] = [PackedBackend()]
        if cpu_kernels():
            backends.append(NativeQuantisedBackend(own_kernels()))
        for reader in backends:
            with pytest.raises(CheckpointError, match="it ends at byte"):
                reader.from_quantised(groups)
                reader.start_reads()()
    finally:
        file.close()

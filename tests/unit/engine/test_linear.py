"""Every way of keeping a matrix multiplies as the matrix does, each within its own tolerance."""

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

from nodeagent.engine.kernels.cpu.file_reads import Fetch, fetch
from nodeagent.engine.kernels.cpu.kernels import kernels
from nodeagent.engine.kernels.cpu.matrix_layouts import Native
from nodeagent.engine.model.layers.linear import (
    Blocked,
    FourBit,
    Groups,
    Half,
    Keeping,
    Linear,
    Plain,
    bytes_kept,
    choose,
    join,
    keep,
    keep_groups,
    native,
    tiled,
)
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.gguf import GgufFile
from nodeagent.engine.weights.gguf_unpacking import BITS

ROWS, COLUMNS = 192, 256
HEADS = 4
WIDE = 8192
"""Rows of more bytes than are read at a time."""


def chance(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_groups(seed: int) -> Groups:
    chance = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 16, (ROWS, COLUMNS), generator=chance, dtype=torch.uint8)
    scales = torch.rand(ROWS, COLUMNS // 32, generator=chance) * 0.01
    return Groups(numbers, scales, -8 * scales + 0.001)


def error(product: Linear, weight: torch.Tensor, rows: int) -> float:
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
    exact = x @ weight.T
    found = product(x)
    assert found.shape == exact.shape
    assert found.dtype == torch.float32
    return float((found - exact).norm() / exact.norm()) if rows else 0.0


def eight_bits(seed: int) -> Groups:
    four = some_groups(seed)
    numbers = torch.randint(0, 256, four.numbers.shape, dtype=torch.uint8)
    return Groups(numbers, four.scales, -128 * four.scales, bits=8)


needs_kernels = pytest.mark.skipif(
    kernels() is None, reason="our own kernels need a compiler and AVX-512 VNNI"
)


@needs_kernels
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33])
@pytest.mark.parametrize("groups", [some_groups(1), eight_bits(2)], ids=["four", "eight"])
def test_our_own_kernel_is_as_exact_as_the_file(groups: Groups, rows: int) -> None:
    halves = Groups(
        groups.numbers, groups.scales.half().float(), groups.offsets.half().float(), groups.bits
    )
    product = native(halves, Keeping.NATIVE)
    assert isinstance(product, Native)
    assert error(product, halves.wide(), rows) < 1e-4
    wanted = torch.tensor([0, 17, 3, ROWS - 1])
    assert torch.equal(product[wanted], halves.wide()[wanted])
    with pytest.raises(IndexError, match="there are 192"):
        product[torch.tensor([ROWS])]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 23, 200])
def test_floats_are_multiplied_as_their_file_has_them(dtype: torch.dtype, rows: int) -> None:
    parts = [chance(count, 161, seed=count).to(dtype) for count in (48, 16)]
    weight = torch.cat(parts).float()
    product = tiled(parts, Keeping.TILED)
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
def test_products_by_floats_are_torchs_whatever_the_shape(
    tiles: list[int], columns: int, rows: int, dtype: torch.dtype, rounded: bool, threads: int
) -> None:
    columns = max(columns // 32, 1) * 32 if rounded else columns
    parts = [chance(16 * count, columns, seed=count).to(dtype) for count in tiles]
    product = tiled(parts, Keeping.NATIVE if rounded else Keeping.TILED)
    x, before = chance(rows, columns, seed=rows), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = product(x)
    finally:
        torch.set_num_threads(before)
    most = 1e-3 if rounded else 1e-5
    torch.testing.assert_close(found, x @ torch.cat(parts).float().T, rtol=most, atol=most * 20)


@needs_kernels
def test_floats_of_several_kinds_are_multiplied_in_fp32() -> None:
    parts = [chance(16, 64, seed=1), chance(16, 64, seed=2).half(), chance(16, 64, seed=3).double()]
    weight = torch.cat([part.float() for part in parts])
    assert error(tiled(parts, Keeping.TILED), weight, 3) < 1e-6
    assert error(tiled(parts, Keeping.NATIVE), weight, 3) < 3e-4


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_rounded_floats_err_by_a_part_of_their_groups_largest(rows: int) -> None:
    weight = chance(ROWS, COLUMNS, seed=4) * 10.0 ** chance(ROWS, 1, seed=5)
    weight[3], weight[4, :32] = 0.0, 1e-30
    product = tiled([weight[:64].half().float(), weight[64:]], Keeping.NATIVE)
    weight[:64] = weight[:64].half().float()
    assert error(product, weight, rows) < 3e-4
    wanted = torch.tensor([0, 3, 17, ROWS - 1])
    read = product[wanted]
    largest = weight[wanted].view(4, -1, 32).abs().amax(-1, keepdim=True)
    assert ((read - weight[wanted]).abs().view(4, -1, 32) <= largest * 2**-13.9).all()


@needs_kernels
def test_the_largest_numbers_of_all_do_not_overflow() -> None:
    """Every number and every weight of a group at its largest, with one sign."""
    product = tiled([torch.full((16, 64), 3.0)], Keeping.NATIVE)
    answer = product(torch.full((5, 64), -7.0))
    torch.testing.assert_close(answer, torch.full((5, 16), -21.0 * 64))
    weight = torch.full((16, 64), 3.0)
    weight[2, 5] = float("nan")
    answer = tiled([weight], Keeping.NATIVE)(torch.ones(2, 64))
    assert answer[:, 2].isnan().all()
    assert answer[:, 3].isfinite().all()


@needs_kernels
def test_what_is_no_number_stays_none_and_harms_no_other_row() -> None:
    product = keep_groups(some_groups(1), Keeping.NATIVE)
    x = torch.ones(3, COLUMNS)
    x[0, 5], x[2] = float("nan"), 0.0
    found = product(x)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
    assert (found[2] == 0).all()


@pytest.mark.parametrize("rows", [1, 4, 5, 33])
def test_each_keeps_its_tolerance(rows: int) -> None:
    groups = some_groups(1)
    weight = groups.wide()
    assert error(Plain(weight), weight, rows) < 1e-6
    assert error(Blocked(weight), weight, rows) < 1e-6
    assert error(Half(weight), weight, rows) < 1e-3
    assert error(Blocked(weight.bfloat16()), weight, rows) < 1e-2
    assert error(FourBit(groups), weight, rows) < 1e-2


def test_four_bits_joined_are_one_below_the_other() -> None:
    one, other = some_groups(1), some_groups(2)
    weight = torch.cat((one.wide(), other.wide()))
    joined = join([one, other])
    assert isinstance(joined, Groups)
    assert torch.equal(joined.wide(), weight)
    assert error(keep_groups(joined, Keeping.PACKED), weight, 2) < 1e-2


def test_what_no_kernel_serves_is_kept_otherwise() -> None:
    odd = some_groups(3)
    odd = Groups(odd.numbers[:90], odd.scales[:90], odd.offsets[:90])
    assert isinstance(keep_groups(odd, Keeping.NATIVE), Blocked | Plain)
    assert isinstance(keep(torch.ones(8, 8), Keeping.BLOCKED), Plain)
    assert choose("cuda:0", torch.bfloat16, "file")[0] is Keeping.PLAIN
    assert choose("cpu", torch.float16, "file")[0] is Keeping.PLAIN
    tiles = Keeping.TILED if kernels() else Keeping.BLOCKED
    assert choose("cpu", torch.float32, "none")[0] is tiles
    wanted = Keeping.NATIVE if kernels() else Keeping.BLOCKED
    assert choose("cpu", torch.float32, "auto")[0] is wanted
    assert choose("cpu", torch.bfloat16, "none")[0] is Keeping.BLOCKED


@pytest.mark.parametrize("halves", [True, False])
def test_without_our_own_kernels_weights_are_packed_only_where_asked_and_able(
    monkeypatch: pytest.MonkeyPatch, halves: bool
) -> None:
    monkeypatch.setattr("nodeagent.engine.model.layers.linear.kernels", lambda: None)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: halves)
    assert choose("cpu", torch.float32, "auto")[0] is Keeping.BLOCKED
    packed, blocked = (
        (Keeping.PACKED, Keeping.BLOCKED) if halves else (Keeping.BLOCKED, Keeping.PLAIN)
    )
    assert choose("cpu", torch.float32, "file")[0] is packed
    assert choose("cpu", torch.bfloat16, "auto")[0] is blocked


@pytest.mark.skipif(kernels() is None, reason="our own kernels are not here")
@pytest.mark.parametrize(("groups", "bits"), [(some_groups(1), 4), (eight_bits(1), 8)])
def test_what_is_kept_takes_what_was_said_before(groups: Groups, bits: int) -> None:
    own = kernels()
    assert own is not None
    kept = own.pack(bits, groups.numbers, groups.scales, groups.offsets)
    said = bytes_kept(Keeping.NATIVE, torch.float32, bits)
    assert kept.packed.nbytes == groups.numbers.numel() * said
    rounded = own.tile([torch.ones(32, 64)], rounded=True)
    assert rounded.packed.nbytes == 32 * 64 * bytes_kept(Keeping.NATIVE, torch.float32, 16)
    assert bytes_kept(Keeping.TILED, torch.float32, 16) == 2
    assert bytes_kept(Keeping.TILED, torch.float32, bits) == 4
    assert bytes_kept(Keeping.PLAIN, torch.bfloat16, bits) == 2


@pytest.mark.parametrize("disk", ["cached", "cold", "gives nothing past its cache"])
@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
)
def test_a_gguf_files_groups_are_read_as_they_are(
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
    chance = np.random.default_rng(5)
    weights = {
        "blk.0.attn_q.weight": chance.standard_normal((COLUMNS, COLUMNS), dtype=np.float32),
        "blk.0.ffn_down.weight": chance.standard_normal((COLUMNS, 64), dtype=np.float32),
        "blk.0.ffn_gate.weight": chance.standard_normal((WIDE, COLUMNS), dtype=np.float32),
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
    assert file.filed_bits() == {BITS[kind]: COLUMNS * (COLUMNS + 64 + WIDE), 32: 32 * COLUMNS}
    try:
        later: list[Fetch] = []
        for name, shape in (
            ("model.layers.0.self_attn.q_proj.weight", (COLUMNS, COLUMNS)),
            ("model.layers.0.mlp.down_proj.weight", (COLUMNS, 64)),
            ("model.layers.0.mlp.gate_proj.weight", (WIDE, COLUMNS)),
        ):
            groups = file.groups(name, shape)
            assert groups is not None
            wide = groups.groups().wide()
            torch.testing.assert_close(wide, file.tensor(name, shape))
            if kernels():
                later.clear()
                both = native(join([groups, groups]), Keeping.NATIVE, later)
                assert both is not None
                fetch(later).result()
                wanted = torch.cat((wide, wide))
                found = both[torch.arange(len(wanted))]
                torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
        assert file.groups("model.embed_tokens.weight", (32, COLUMNS)) is None
        os.truncate(path, path.stat().st_size // 2)
        groups = file.groups("model.layers.0.mlp.gate_proj.weight", (WIDE, COLUMNS))
        assert groups is not None
        later.clear()
        with pytest.raises(CheckpointError, match="it ends at byte"):
            keep_groups(groups, Keeping.NATIVE, later)
            fetch(later).result()
    finally:
        file.close()

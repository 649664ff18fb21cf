"""Products of many rows by AMX, the processor's matrix unit, equal those by vectors."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.kernels.cpu import build as building
from nodeagent.engine.kernels.cpu.library import CpuKernels, cpu_kernels
from nodeagent.engine.kernels.cpu.native_matrix import NativeMatrix
from nodeagent.engine.kernels.matrix_formats import QuantisedGroups

KINDS = ("4 bits", "8 bits", torch.float16, torch.bfloat16, torch.float32)
Kind = str | torch.dtype


@pytest.fixture(scope="module")
def own() -> Iterator[CpuKernels]:
    found = cpu_kernels()
    if found is None or not found.has_amx:
        pytest.skip("this processor has no usable matrix unit")
    yield found
    found.library.allow_amx(1)


def both_products(own: CpuKernels, matrix: NativeMatrix, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product by vectors and by AMX."""
    own.library.allow_amx(0)
    by_vectors = matrix(x)
    own.library.allow_amx(1)
    return by_vectors, matrix(x)


def matrix_of(
    own: CpuKernels, kind: Kind, rows: int, columns: int, random: torch.Generator
) -> NativeMatrix:
    """Return a matrix of numbers between about -4 and 4."""
    if isinstance(kind, torch.dtype):
        return own.pack_floats(
            [torch.randn(rows, columns, generator=random).to(kind)], rounded=False
        )
    bits = int(kind[0])
    shape = (rows, columns)
    numbers = torch.randint(0, 2**bits, shape, generator=random, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 32, generator=random) * 8 / 2**bits).half().float()
    offsets = -scales * 2 ** (bits - 1)
    return own.pack_groups(QuantisedGroups(numbers, scales, offsets, bits))


@given(
    kind=st.sampled_from(KINDS),
    panels=st.integers(1, 5),
    blocks=st.integers(1, 40),
    odd=st.integers(0, 31),
    count=st.integers(8, 130),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_products_by_amx_equal_products_by_vectors(
    own: CpuKernels,
    kind: Kind,
    panels: int,
    blocks: int,
    odd: int,
    count: int,
    threads: int,
    seed: int,
) -> None:
    random = torch.Generator().manual_seed(seed)
    columns = 32 * blocks + (odd if isinstance(kind, torch.dtype) else 0)
    matrix = matrix_of(own, kind, 16 * panels, columns, random)
    x = torch.randn(count, columns, generator=random)
    x *= torch.randn(columns, generator=random).exp()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        by_vectors, by_amx = both_products(own, matrix, x)
    finally:
        torch.set_num_threads(before)
    if isinstance(kind, torch.dtype):
        assert float((by_amx - by_vectors).abs().max()) <= 2e-6 * float(
            by_vectors.norm(dim=1).max()
        )
    else:
        assert torch.equal(by_amx, by_vectors)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_own_row(own: CpuKernels, kind: Kind, wrong: float) -> None:
    random = torch.Generator().manual_seed(1)
    matrix = matrix_of(own, kind, 32, 64, random)
    x = torch.randn(70, 64, generator=random)
    wanted = matrix(x)
    x[33, 5] = wrong
    found = matrix(x)
    assert not found[33].isfinite().any()
    others = torch.arange(70) != 33
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_writes_only_its_own_output(own: CpuKernels, kind: Kind) -> None:
    random = torch.Generator().manual_seed(1)
    matrix = matrix_of(own, kind, 48, 64, random)
    x = torch.randn(51, 64, generator=random)
    wanted = matrix(x)
    output = torch.full((53, 48), 7.0)
    arguments = (*matrix.c_arguments, x.data_ptr(), 51, 2, output[1].data_ptr())
    assert own.library.multiply(*arguments) == 0
    assert torch.equal(output[1:52], wanted)
    assert (output[0] == 7).all()
    assert (output[52] == 7).all()


def test_amx_can_be_switched_off(own: CpuKernels) -> None:
    assert own.library.allow_amx(0) == 0
    assert own.library.allow_amx(1) == 1


def test_a_library_can_be_built_without_amx(
    own: CpuKernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "OPTIONS", (*building.OPTIONS, "-O0", "-mno-amx-tile"))
    assert not CpuKernels(ctypes.CDLL(str(building.kernels_library()))).has_amx

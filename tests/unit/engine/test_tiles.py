"""Products of many rows by the processor's matrix unit answer as those of few rows do."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nodeagent.engine.kernels.cpu import build as building
from nodeagent.engine.kernels.cpu.kernels import Kernels, kernels
from nodeagent.engine.kernels.cpu.matrix_layouts import Native

KINDS = ("4 bits", "8 bits", torch.float16, torch.bfloat16, torch.float32)
Kind = str | torch.dtype


@pytest.fixture(scope="module")
def own() -> Iterator[Kernels]:
    found = kernels()
    if found is None or not found.tiles:
        pytest.skip("this processor has no matrix unit that may be used")
    yield found
    found.library.allow_tiles(1)


def by_both(own: Kernels, matrix: Native, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product without and with tiles."""
    own.library.allow_tiles(0)
    without = matrix(x)
    own.library.allow_tiles(1)
    return without, matrix(x)


def matrix_of(own: Kernels, kind: Kind, rows: int, columns: int, chance: torch.Generator) -> Native:
    """Return a matrix of numbers between about -4 and 4."""
    if isinstance(kind, torch.dtype):
        return own.tile([torch.randn(rows, columns, generator=chance).to(kind)], rounded=False)
    bits = int(kind[0])
    shape = (rows, columns)
    numbers = torch.randint(0, 2**bits, shape, generator=chance, dtype=torch.uint8)
    scales = (torch.rand(rows, columns // 32, generator=chance) * 8 / 2**bits).half().float()
    return own.pack(bits, numbers, scales, -scales * 2 ** (bits - 1))


@given(
    kind=st.sampled_from(KINDS),
    tiles=st.integers(1, 5),
    blocks=st.integers(1, 40),
    odd=st.integers(0, 31),
    count=st.integers(8, 130),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=80, deadline=None)
def test_many_rows_are_multiplied_as_few_are(
    own: Kernels,
    kind: Kind,
    tiles: int,
    blocks: int,
    odd: int,
    count: int,
    threads: int,
    seed: int,
) -> None:
    chance = torch.Generator().manual_seed(seed)
    columns = 32 * blocks + (odd if isinstance(kind, torch.dtype) else 0)
    matrix = matrix_of(own, kind, 16 * tiles, columns, chance)
    x = torch.randn(count, columns, generator=chance)
    x *= torch.randn(columns, generator=chance).exp()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        without, found = by_both(own, matrix, x)
    finally:
        torch.set_num_threads(before)
    if isinstance(kind, torch.dtype):
        assert float((found - without).abs().max()) <= 2e-6 * float(without.norm(dim=1).max())
    else:
        assert torch.equal(found, without)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_own_row(own: Kernels, kind: Kind, wrong: float) -> None:
    chance = torch.Generator().manual_seed(1)
    matrix = matrix_of(own, kind, 32, 64, chance)
    x = torch.randn(70, 64, generator=chance)
    wanted = matrix(x)
    x[33, 5] = wrong
    found = matrix(x)
    assert not found[33].isfinite().any()
    others = torch.arange(70) != 33
    assert torch.equal(found[others], wanted[others])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_the_answer_is_written(own: Kernels, kind: Kind) -> None:
    chance = torch.Generator().manual_seed(1)
    matrix = matrix_of(own, kind, 48, 64, chance)
    x = torch.randn(51, 64, generator=chance)
    wanted = matrix(x)
    room = torch.full((53, 48), 7.0)
    arguments = (*matrix.arguments, x.data_ptr(), 51, 2, room[1].data_ptr())
    assert own.library.multiply(*arguments) == 0
    assert torch.equal(room[1:52], wanted)
    assert (room[0] == 7).all()
    assert (room[52] == 7).all()


def test_where_tiles_are_not_wanted_none_are_used(own: Kernels) -> None:
    assert own.library.allow_tiles(0) == 0
    assert own.library.allow_tiles(1) == 1


def test_a_library_may_be_built_without_them(
    own: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "OPTIONS", (*building.OPTIONS, "-O1", "-mno-amx-tile"))
    assert not Kernels(ctypes.CDLL(str(building.built()))).tiles

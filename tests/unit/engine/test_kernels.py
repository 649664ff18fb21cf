"""Our own kernels answer as torch does; without a compiler the engine goes without them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from nodeagent.engine.layers.rope import Rope, inverse_frequencies
from nodeagent.engine.native import building
from nodeagent.engine.native.building import NoKernels, built
from nodeagent.engine.native.kernels import Kernels, kernels

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4


@pytest.fixture(scope="module")
def own() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("our own kernels need a compiler")
    return found


def chance(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norm_and_gate_are_torchs(own: Kernels, rows: int) -> None:
    x, weight = chance(rows, 100), chance(100, seed=2)
    torch.testing.assert_close(own.normalise(x, weight, 1e-5), rms_norm(x, (100,), weight, 1e-5))
    both = 30 * chance(rows, 200)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(own.gate(both), silu(gate) * up)


def test_a_gate_keeps_what_is_no_number_and_what_is_huge(own: Kernels) -> None:
    both = torch.tensor([[float("nan"), -1e30, 1e30, 0.0, 1.0, 1.0, 1.0, float("nan")]])
    found = own.gate(both)
    assert found[0].isnan().tolist() == [True, False, False, True]
    assert found[0, 1:3].tolist() == pytest.approx([0.0, 1e30], rel=1e-6, abs=1e-6)


def test_queries_and_keys_turn_as_by_the_formula(own: Kernels) -> None:
    cos, sin = Rope(inverse_frequencies(DIM, 1e4, None, None), 50, "cpu", torch.float32).at(
        torch.tensor([0, 7, 49])
    )
    mixed = chance(3, HEADS + 2 * KV_HEADS, DIM)
    wanted = mixed.clone()
    turned = wanted[:, : HEADS + KV_HEADS]
    turned.copy_(turned * cos + turned.roll(DIM // 2, -1) * sin)
    own.turn(mixed, HEADS + KV_HEADS, cos, sin)
    torch.testing.assert_close(mixed, wanted)


def test_a_row_sees_its_span_of_its_own_blocks_and_nothing_else(own: Kernels) -> None:
    pages = chance(12, BLOCK, 2 * KV_HEADS, DIM)
    tables = torch.tensor([[3, 0, 0], [7, 1, 9], [2, 5, 0]])
    spans = torch.tensor([[0, 1], [2, 11], [5, 8]])
    mixed = chance(4, HEADS + 2 * KV_HEADS, DIM, seed=3)
    # What no span reaches may be anything.
    pages[[0, 4]] = float("nan")
    found = own.attend(mixed, HEADS, pages, tables, spans)
    for row, (first, end) in enumerate(spans.tolist()):
        seen = pages[tables[row]].flatten(0, 1)[first:end].transpose(0, 1)[None]
        wanted = scaled_dot_product_attention(
            mixed[row, :HEADS, None][None],
            seen[:, :KV_HEADS],
            seen[:, KV_HEADS:],
            enable_gqa=True,
        )
        torch.testing.assert_close(found[row], wanted[0, :, 0])


def test_what_is_no_number_reaches_the_answer_of_its_own_row_alone(own: Kernels) -> None:
    pages = chance(2, BLOCK, 2 * KV_HEADS, DIM)
    pages[1, 0] = float("nan")
    mixed = chance(2, HEADS + 2 * KV_HEADS, DIM, seed=3)
    tables, spans = torch.tensor([[0], [1]]), torch.tensor([[0, 4], [0, 4]])
    found = own.attend(mixed, HEADS, pages, tables, spans)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_keys_and_values_go_to_their_slots(own: Kernels) -> None:
    pages = torch.zeros(3, BLOCK, 2 * KV_HEADS, DIM)
    mixed = chance(2, HEADS + 2 * KV_HEADS, DIM)
    own.keep(mixed, HEADS, torch.tensor([9, 2]), pages)
    slots = pages.view(-1, 2 * KV_HEADS, DIM)
    assert torch.equal(slots[[9, 2]], mixed[:, HEADS:])
    assert slots.count_nonzero() == mixed[:, HEADS:].numel()


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_COMPILERS", ("no-such-compiler",))
    with pytest.raises(NoKernels, match="no-such-compiler is here"):
        built()
    monkeypatch.setattr(building, "_COMPILERS", ("false",))
    with pytest.raises(NoKernels, match="it failed"):
        built()
    assert not list(tmp_path.rglob("*.so"))


def test_a_folder_that_others_may_write_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "isochrone").mkdir(mode=0o700)
    (tmp_path / "isochrone").chmod(0o777)
    with pytest.raises(NoKernels, match="others may write there"):
        built()

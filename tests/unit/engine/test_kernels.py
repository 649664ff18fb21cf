"""Our own kernels answer as torch does; without a compiler the engine goes without them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from nodeagent.engine.kernels.cpu import build as building
from nodeagent.engine.kernels.cpu.build import NoKernels, built
from nodeagent.engine.kernels.cpu.kernels import PIECE_TOKENS, Kernels, kernels
from nodeagent.engine.model.layers.rope import Rope, inverse_frequencies

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4


@pytest.fixture(scope="module")
def own() -> Kernels:
    found = kernels()
    if found is None:
        pytest.skip("our own kernels need a compiler")
    return found


@pytest.fixture(scope="module", params=["vectors", "tiles"])
def attending(own: Kernels, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels, that attend from many rows by vectors, and by the processor's matrix unit."""
    by_tiles = request.param == "tiles"
    if by_tiles and not own.tiles:
        pytest.skip("this processor has no matrix unit that may be used")
    own.library.allow_tiles(by_tiles)
    yield own
    own.library.allow_tiles(own.tiles)


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


def sequences(*parts: tuple[int, int]) -> tuple[Tensor, Tensor, int]:
    """Return tables and pieces of sequences (place of the first new token, new tokens) side by
    side, and how many rows those are; blocks go backwards from the last."""
    tables, pieces, row = [], [], 0
    width = max(-(-(start + tokens) // BLOCK) for start, tokens in parts)
    for number, (start, tokens) in enumerate(parts):
        tables.append([width * (number + 1) - at for at in range(width)])
        pieces += [
            [row + at, min(PIECE_TOKENS, tokens - at), start + at, number]
            for at in range(0, tokens, PIECE_TOKENS)
        ]
        row += tokens
    return torch.tensor(tables), torch.tensor(pieces), row


def by_torch(
    mixed: Tensor, heads: int, pages: Tensor, tables: Tensor, piece: list[int], window: int
) -> Tensor:
    """Return what torch answers to the queries of one piece, in fp64."""
    row, tokens, start, number = piece
    kv_heads, end = pages.shape[2] // 2, start + tokens
    seen = pages[tables[number]].flatten(0, 1)[:end].transpose(0, 1)[None].double()
    mask = torch.ones(tokens, end, dtype=torch.bool).tril(start).triu(start - window + 1)
    answer = scaled_dot_product_attention(
        mixed[row : row + tokens, :heads].transpose(0, 1)[None].double(),
        seen[:, :kv_heads],
        seen[:, kv_heads:],
        attn_mask=mask,
        enable_gqa=True,
    )
    return answer[0].transpose(0, 1)


@given(
    parts=st.lists(st.tuples(st.integers(0, 190), st.integers(1, 90)), min_size=1, max_size=3),
    grouped=st.sampled_from([(1, 1), (3, 1), (6, 2), (7, 1), (9, 1), (8, 4)]),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    window=st.sampled_from([1, 7, 33, 100, 1000, 2**32 + 5]),
    large=st.sampled_from([1.0, 30.0]),
)
@settings(max_examples=60, deadline=None)
def test_attention_is_torchs_whatever_the_batch(
    attending: Kernels,
    parts: list[tuple[int, int]],
    grouped: tuple[int, int],
    dim: int,
    window: int,
    large: float,
) -> None:
    heads, kv_heads = grouped
    tables, pieces, rows = sequences(*parts)
    pages = chance(int(tables.max()) + 1, BLOCK, 2 * kv_heads, dim)
    mixed = chance(rows, heads + 2 * kv_heads, dim, seed=3)
    mixed[:, :heads] *= large
    found = attending.attend(mixed, heads, pages, tables, pieces, window, by_tiles=True)
    for piece in pieces.tolist():
        wanted = by_torch(mixed, heads, pages, tables, piece, window)
        torch.testing.assert_close(
            found[piece[0] : piece[0] + piece[1]].double(), wanted, rtol=1e-5, atol=4e-6 * large
        )


@given(
    start=st.integers(0, 150),
    tokens=st.integers(1, 70),
    grouped=st.sampled_from([(1, 1), (6, 2), (9, 3), (8, 4)]),
    dim=st.sampled_from([16, 64, 128]),
    threads=st.integers(1, 2),
    sharp=st.sampled_from([1.0, 30.0]),
)
@settings(max_examples=80, deadline=None)
def test_by_vectors_an_answer_is_the_same_however_many_are_computed_at_once(
    own: Kernels,
    start: int,
    tokens: int,
    grouped: tuple[int, int],
    dim: int,
    threads: int,
    sharp: float,
) -> None:
    heads, kv_heads = grouped
    tables, pieces, _ = sequences((start, tokens))
    pages = chance(int(tables.max()) + 1, BLOCK, 2 * kv_heads, dim)
    mixed = chance(tokens, heads + 2 * kv_heads, dim, seed=3)
    mixed[:, :heads] *= sharp
    alone = torch.tensor([[at, 1, start + at, 0] for at in range(tokens)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = own.attend(mixed, heads, pages, tables, pieces, 2**32)
        singly = own.attend(mixed, heads, pages, tables, alone, 2**32)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, singly)


@pytest.mark.parametrize("tokens", [3, 39])
def test_what_no_token_sees_may_be_anything(attending: Kernels, tokens: int) -> None:
    tables, pieces, rows = sequences((5, 1), (0, tokens))
    pages = chance(int(tables.max()) + 1, BLOCK, 2 * KV_HEADS, DIM)
    mixed = chance(rows, HEADS + 2 * KV_HEADS, DIM, seed=3)
    wanted = attending.attend(mixed, HEADS, pages, tables, pieces, 4, by_tiles=True)
    hidden: list[tuple[Tensor, slice | int]] = [
        (tables[0, 0], slice(0, 2)),
        (tables[0, 1], slice(2, 4)),
        (tables[1, tokens // BLOCK], 3),
    ]
    for block, slots in hidden:
        pages[block, slots] = float("nan")
    assert torch.equal(
        attending.attend(mixed, HEADS, pages, tables, pieces, 4, by_tiles=True), wanted
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, 30])
def test_what_is_no_number_reaches_the_answers_of_its_own_rows_alone(
    attending: Kernels, tokens: int, wrong: float
) -> None:
    tables, pieces, rows = sequences((3, 1), (3, tokens))
    pages = chance(int(tables.max()) + 1, BLOCK, 2 * KV_HEADS, DIM)
    pages[tables[1, 0], 0] = wrong
    mixed = chance(rows, HEADS + 2 * KV_HEADS, DIM, seed=3)
    found = attending.attend(mixed, HEADS, pages, tables, pieces, 100, by_tiles=True)
    assert found[0].isfinite().all()
    assert not found[1:].isfinite().any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_wrong_query_spoils_no_other_rows_answer(attending: Kernels, wrong: float) -> None:
    tables, pieces, rows = sequences((70, 30))
    pages = chance(int(tables.max()) + 1, BLOCK, 2 * KV_HEADS, DIM)
    mixed = chance(rows, HEADS + 2 * KV_HEADS, DIM, seed=3)
    wanted = attending.attend(mixed, HEADS, pages, tables, pieces, 50, by_tiles=True)
    mixed[11, 2, 5] = wrong
    found = attending.attend(mixed, HEADS, pages, tables, pieces, 50, by_tiles=True)
    assert not found[11, 2].isfinite().any()
    found[11, 2] = wanted[11, 2]
    assert torch.equal(found, wanted)


def test_keys_and_values_go_to_their_slots(own: Kernels) -> None:
    pages = torch.zeros(3, BLOCK, 2 * KV_HEADS, DIM)
    mixed = chance(2, HEADS + 2 * KV_HEADS, DIM)
    own.keep(mixed, HEADS, torch.tensor([9, 2]), pages)
    slots = pages.view(-1, 2 * KV_HEADS, DIM)
    assert torch.equal(slots[[9, 2]], mixed[:, HEADS:])
    assert slots.count_nonzero() == mixed[:, HEADS:].numel()


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "_PACKAGED", "no_such_package")
    monkeypatch.setattr(building, "_COMPILERS", ("no-such-compiler",))
    with pytest.raises(NoKernels, match="install the packages gcc and libc6-dev"):
        built()
    monkeypatch.setattr(building, "_COMPILERS", ("false",))
    with pytest.raises(NoKernels, match="it failed"):
        built()
    assert not list(tmp_path.rglob("*.so"))


def test_where_the_system_compiler_fails_the_packaged_one_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaged = tmp_path / "packaged"
    packaged.write_text('#!/bin/sh\nfor last; do :; done\necho library > "$last"\n')
    packaged.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "_compilers", lambda: [("false",), (str(packaged), "cc")])
    path = built()
    assert path.read_text() == "library\n"
    assert built() == path


def test_a_prebuilt_library_is_used_on_processors_that_have_its_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building, "PREBUILT_FOLDER", tmp_path)
    for variant in building.VARIANTS:
        (tmp_path / building.prebuilt_name(variant)).touch()
        monkeypatch.setattr(
            building, "_features", lambda v=variant: f"flags : {' '.join(v.features)}"
        )
        assert built() == tmp_path / building.prebuilt_name(variant)
    monkeypatch.setattr(building, "_features", lambda: "flags : avx512f avx512bw avx512_vnni")
    monkeypatch.setattr(building, "_compilers", list)
    with pytest.raises(NoKernels, match="there is no C compiler"):
        built()


def test_for_another_processor_none_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_features", lambda: "flags : sse2 avx2 avx512f")
    with pytest.raises(NoKernels, match="this processor lacks avx512_vnni, avx512bw"):
        built()


def test_a_folder_that_others_may_write_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    (tmp_path / "isochrone").mkdir(mode=0o700)
    (tmp_path / "isochrone").chmod(0o777)
    with pytest.raises(NoKernels, match="other users may write there"):
        built()


def test_a_link_in_place_of_the_folder_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "isochrone").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoKernels, match="symbolic link"):
        built()


def test_a_folder_that_others_may_replace_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    tmp_path.chmod(0o777)
    with pytest.raises(NoKernels, match="other users may replace it"):
        built()


def test_a_library_is_on_the_disk_before_it_has_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho library > "$last"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "_COMPILERS", (str(compiler),))
    synced = []

    def note(path: Path) -> None:
        synced.append((path.read_text(), list((tmp_path / "isochrone").glob("*.so"))))

    monkeypatch.setattr(building, "sync", note)
    assert built().read_text() == "library\n"
    assert synced == [("library\n", [])]

"""The C kernels compute what torch does; without a compiler the engine runs without them."""

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import IO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from nodeagent.engine.kernels.cpu import build as building
from nodeagent.engine.kernels.cpu.build import KernelsUnavailable, kernels_library
from nodeagent.engine.kernels.cpu.library import PIECE_TOKENS, CpuKernels, cpu_kernels
from nodeagent.engine.kvcache.kv_format import KV_DTYPES, KvFormat
from nodeagent.engine.model.rotary import RotaryTable, inverse_frequencies

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4


@pytest.fixture(scope="module")
def own() -> CpuKernels:
    found = cpu_kernels()
    if found is None:
        pytest.skip("the C kernels need a compiler")
    return found


@pytest.fixture(scope="module", params=["vectors", "amx"])
def attending(own: CpuKernels, request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    """The C kernels, with attention of many rows by vectors, and by AMX."""
    use_amx = request.param == "amx"
    if use_amx and not own.has_amx:
        pytest.skip("this processor has no usable matrix unit")
    own.library.allow_amx(use_amx)
    yield own
    own.library.allow_amx(own.has_amx)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norm_and_gate_equal_torch(own: CpuKernels, rows: int) -> None:
    x, weight = random(rows, 100), random(100, seed=2)
    torch.testing.assert_close(own.rms_norm(x, weight, 1e-5), rms_norm(x, (100,), weight, 1e-5))
    both = 30 * random(rows, 200)
    gate, up = both.chunk(2, -1)
    torch.testing.assert_close(own.silu_gate(both), silu(gate) * up)


def test_a_gate_keeps_nan_and_huge_numbers(own: CpuKernels) -> None:
    both = torch.tensor([[float("nan"), -1e30, 1e30, 0.0, 1.0, 1.0, 1.0, float("nan")]])
    found = own.silu_gate(both)
    assert found[0].isnan().tolist() == [True, False, False, True]
    assert found[0, 1:3].tolist() == pytest.approx([0.0, 1e30], rel=1e-6, abs=1e-6)


def test_queries_and_keys_turn_as_by_the_formula(own: CpuKernels) -> None:
    cos, sin = RotaryTable(inverse_frequencies(DIM, 1e4, None, None), 50, "cpu", torch.float32).at(
        torch.tensor([0, 7, 49])
    )
    mixed = random(3, HEADS + 2 * KV_HEADS, DIM)
    wanted = mixed.clone()
    turned = wanted[:, : HEADS + KV_HEADS]
    turned.copy_(turned * cos + turned.roll(DIM // 2, -1) * sin)
    own.rotate_(mixed, HEADS + KV_HEADS, cos, sin)
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
    """Return torch's attention for the queries of one piece, in fp64."""
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
def test_attention_equals_torch_for_any_batch(
    attending: CpuKernels,
    parts: list[tuple[int, int]],
    grouped: tuple[int, int],
    dim: int,
    window: int,
    large: float,
) -> None:
    heads, kv_heads = grouped
    tables, pieces, rows = sequences(*parts)
    pages = random(int(tables.max()) + 1, BLOCK, 2 * kv_heads, dim)
    mixed = random(rows, heads + 2 * kv_heads, dim, seed=3)
    mixed[:, :heads] *= large
    found = attending.attend(mixed, heads, pages, tables, pieces, window, allow_amx=True)
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
def test_by_vectors_the_output_of_a_row_does_not_depend_on_its_batch(
    own: CpuKernels,
    start: int,
    tokens: int,
    grouped: tuple[int, int],
    dim: int,
    threads: int,
    sharp: float,
) -> None:
    heads, kv_heads = grouped
    tables, pieces, _ = sequences((start, tokens))
    pages = random(int(tables.max()) + 1, BLOCK, 2 * kv_heads, dim)
    mixed = random(tokens, heads + 2 * kv_heads, dim, seed=3)
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
def test_slots_that_no_token_sees_may_hold_nan(attending: CpuKernels, tokens: int) -> None:
    tables, pieces, rows = sequences((5, 1), (0, tokens))
    pages = random(int(tables.max()) + 1, BLOCK, 2 * KV_HEADS, DIM)
    mixed = random(rows, HEADS + 2 * KV_HEADS, DIM, seed=3)
    wanted = attending.attend(mixed, HEADS, pages, tables, pieces, 4, allow_amx=True)
    hidden: list[tuple[Tensor, slice | int]] = [
        (tables[0, 0], slice(0, 2)),
        (tables[0, 1], slice(2, 4)),
        (tables[1, tokens // BLOCK], 3),
    ]
    for block, slots in hidden:
        pages[block, slots] = float("nan")
    assert torch.equal(
        attending.attend(mixed, HEADS, pages, tables, pieces, 4, allow_amx=True), wanted
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, 30])
def test_a_nan_key_reaches_only_the_rows_that_see_it(
    attending: CpuKernels, tokens: int, wrong: float
) -> None:
    tables, pieces, rows = sequences((3, 1), (3, tokens))
    pages = random(int(tables.max()) + 1, BLOCK, 2 * KV_HEADS, DIM)
    pages[tables[1, 0], 0] = wrong
    mixed = random(rows, HEADS + 2 * KV_HEADS, DIM, seed=3)
    found = attending.attend(mixed, HEADS, pages, tables, pieces, 100, allow_amx=True)
    assert found[0].isfinite().all()
    assert not found[1:].isfinite().any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_nan_query_changes_no_other_row(attending: CpuKernels, wrong: float) -> None:
    tables, pieces, rows = sequences((70, 30))
    pages = random(int(tables.max()) + 1, BLOCK, 2 * KV_HEADS, DIM)
    mixed = random(rows, HEADS + 2 * KV_HEADS, DIM, seed=3)
    wanted = attending.attend(mixed, HEADS, pages, tables, pieces, 50, allow_amx=True)
    mixed[11, 2, 5] = wrong
    found = attending.attend(mixed, HEADS, pages, tables, pieces, 50, allow_amx=True)
    assert not found[11, 2].isfinite().any()
    found[11, 2] = wanted[11, 2]
    assert torch.equal(found, wanted)


def test_keys_and_values_are_copied_to_their_slots(own: CpuKernels) -> None:
    pages = torch.zeros(3, BLOCK, 2 * KV_HEADS, DIM)
    mixed = random(2, HEADS + 2 * KV_HEADS, DIM)
    own.store_kv(mixed, HEADS, torch.tensor([9, 2]), pages)
    slots = pages.view(-1, 2 * KV_HEADS, DIM)
    assert torch.equal(slots[[9, 2]], mixed[:, HEADS:])
    assert slots.count_nonzero() == mixed[:, HEADS:].numel()


FORMS = [KvFormat(KV_DTYPES[name]) for name in ("bf16", "fp16", "fp8")]


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 1000), power=st.integers(-44, 38), dim=st.sampled_from([16, 64, 80]))
@settings(max_examples=40, deadline=None)
def test_keys_and_values_are_stored_as_by_torch(
    own: CpuKernels, form: KvFormat, seed: int, power: int, dim: int
) -> None:
    mixed = random(3, HEADS + 2 * KV_HEADS, dim, seed=seed) * 10.0**power
    # Numbers between two neighbours of the form, and what no number of it is.
    mixed[1, HEADS, :8] = torch.tensor([448, 436, 26, 2**-7, 3 * 2**-10, 2**-10, 0, -17])
    mixed[2, HEADS, 3], mixed[2, HEADS + 1, 5] = torch.nan, torch.inf
    slots = torch.tensor([9, 2, 4])
    pages = torch.zeros(3, BLOCK, 2 * KV_HEADS, form.width(dim), dtype=form.dtype)
    own.store_kv(mixed, HEADS, slots, pages)
    wanted = torch.zeros_like(pages)
    wanted.view(-1, *wanted.shape[2:])[slots] = form.encode(mixed[:, HEADS:])
    found, read = form.decode(pages, torch.float32), form.decode(wanted, torch.float32)
    # NaN has several forms.
    assert torch.equal(found.nan_to_num(7e37), read.nan_to_num(7e37))
    assert torch.equal(found.isnan(), read.isnan())


@pytest.mark.parametrize("form", FORMS)
@given(
    parts=st.lists(st.tuples(st.integers(0, 190), st.integers(1, 90)), min_size=1, max_size=3),
    grouped=st.sampled_from([(1, 1), (3, 1), (6, 2), (9, 3)]),
    dim=st.sampled_from([16, 64, 80, 256]),
    window=st.sampled_from([7, 100, 2**32 + 5]),
)
@settings(max_examples=30, deadline=None)
def test_attention_over_stored_forms_equals_torch_for_any_batch(
    own: CpuKernels,
    form: KvFormat,
    parts: list[tuple[int, int]],
    grouped: tuple[int, int],
    dim: int,
    window: int,
) -> None:
    heads, kv_heads = grouped
    tables, pieces, rows = sequences(*parts)
    pages = form.encode(random(int(tables.max()) + 1, BLOCK, 2 * kv_heads, dim))
    mixed = random(rows, heads + 2 * kv_heads, dim, seed=3)
    found = own.attend(mixed, heads, pages, tables, pieces, window, allow_amx=True)
    read = form.decode(pages, torch.float32)
    assert torch.equal(found, own.attend(mixed, heads, read, tables, pieces, window))
    for piece in pieces.tolist():
        wanted = by_torch(mixed, heads, read, tables, piece, window)
        torch.testing.assert_close(
            found[piece[0] : piece[0] + piece[1]].double(), wanted, rtol=1e-5, atol=4e-6
        )


def test_without_a_compiler_there_are_no_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "_PACKAGED", "no_such_package")
    monkeypatch.setattr(building, "_COMPILERS", ("no-such-compiler",))
    with pytest.raises(KernelsUnavailable, match="install the packages gcc and libc6-dev"):
        kernels_library()
    monkeypatch.setattr(building, "_COMPILERS", ("false",))
    with pytest.raises(KernelsUnavailable, match="it failed"):
        kernels_library()
    assert not list(tmp_path.rglob("*.so"))


def test_where_the_system_compiler_fails_the_packaged_one_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaged = tmp_path / "packaged"
    packaged.write_text('#!/bin/sh\nfor last; do :; done\necho library > "$last"\n')
    packaged.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "compilers", lambda: [("false",), (str(packaged), "cc")])
    path = kernels_library()
    assert path.read_text() == "library\n"
    assert kernels_library() == path


def test_a_compiler_that_does_not_end_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endless = tmp_path / "cc"
    endless.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    endless.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "_COMPILE_S", 0.01)
    monkeypatch.setattr(building, "compilers", lambda: [(str(endless),)])
    with pytest.raises(KernelsUnavailable, match=r"with \S+/cc: not done after 0.01 s; when"):
        kernels_library()


def test_a_prebuilt_library_is_used_on_processors_that_have_its_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(building, "PREBUILT_FOLDER", tmp_path)
    for variant in building.VARIANTS:
        (tmp_path / building.prebuilt_name(variant)).touch()
        monkeypatch.setattr(
            building, "_features", lambda v=variant: f"flags : {' '.join(v.features)}"
        )
        assert kernels_library() == tmp_path / building.prebuilt_name(variant)
    monkeypatch.setattr(building, "_features", lambda: "flags : avx512f avx512bw avx512_vnni")
    monkeypatch.setattr(building, "compilers", list)
    with pytest.raises(KernelsUnavailable, match="there is no C compiler"):
        kernels_library()


def test_for_another_processor_none_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_features", lambda: "flags : sse2 avx2 avx512f")
    with pytest.raises(KernelsUnavailable, match="this processor lacks avx512_vnni, avx512bw"):
        kernels_library()


def test_a_folder_that_others_can_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    (tmp_path / "isochrone").mkdir(mode=0o700)
    (tmp_path / "isochrone").chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="other users may write there"):
        kernels_library()


def test_a_link_in_place_of_the_folder_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "isochrone").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KernelsUnavailable, match="symbolic link"):
        kernels_library()


def test_a_folder_that_others_may_replace_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    tmp_path.chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="other users may replace it"):
        kernels_library()


def test_a_library_is_synced_before_it_gets_its_name(
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
    assert kernels_library().read_text() == "library\n"
    assert synced == [("library\n", [])]


def test_of_two_that_start_together_one_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(building, "_NEEDED", ())
    monkeypatch.setattr(building, "compilers", lambda: [("cc",)])
    built: list[Path] = []
    found: list[Path] = []
    waits = Event()
    other = Thread(target=lambda: found.append(kernels_library()))

    def build(compiler: tuple[str, ...], path: Path) -> None:
        built.append(path)
        monkeypatch.setattr(fcntl, "flock", lock)
        other.start()
        assert waits.wait(20)
        path.write_text("library\n")

    def lock(file: IO[str], how: int, lock: Callable[[IO[str], int], None] = fcntl.flock) -> None:
        waits.set()
        lock(file, how)

    monkeypatch.setattr(building, "_build", build)
    path = kernels_library()
    other.join(20)
    assert built == [path]
    assert found == [path]

"""The Triton kernels compute what torch does, in Triton's interpreter, which needs no device.

Run by `TRITON_INTERPRET=1 pytest tests/unit/engine/test_triton.py` where Triton is installed.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels.attention_backend import AttentionConfig, LayerKV
from nodeagent.engine.kernels.cuda import triton_kernels as device
from nodeagent.engine.kernels.cuda.attention import TritonAttention
from nodeagent.engine.kernels.cuda.batch_layout import PagedBatch, step_sizes, write_step
from nodeagent.engine.kernels.cuda.triton_kernels import TritonKernels
from nodeagent.engine.kernels.selection import choose_attention
from nodeagent.engine.kvcache.kv_format import KvFormat
from nodeagent.engine.model.rotary import RotaryTable, inverse_frequencies
from nodeagent.engine.workers.commands import ChunkCommand, RunStep
from tests.unit.engine.by_torch import ByTorch
from tests.unit.engine.tiny import SHAPE, llama

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="set TRITON_INTERPRET=1 to interpret kernels"
)

BLOCKS = 16


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the Triton kernels serve CPU tensors."""
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cpu"})


@pytest.fixture
def kernels() -> TritonKernels:
    return TritonKernels()


@pytest.fixture
def chance() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def told(start: int, tokens: int, blocks: list[int]) -> ChunkCommand:
    return ChunkCommand(
        blocks, start, tokens, [(start + at) % 97 for at in range(tokens)], (), True
    )


def steps() -> list[RunStep]:
    """Prompts, a chunk beside a decode, and decodes of different lengths, over scattered blocks."""
    one, other = [7, 3, 11, 2, 9, 14], [5, 8]
    return [
        RunStep((), (told(0, 21, one), told(0, 5, other))),
        RunStep((told(5, 1, other),), (told(21, 50, one),)),
        RunStep((told(6, 1, other), told(71, 1, one)), ()),
    ]


@pytest.mark.parametrize("processors", [1, 64], ids=["whole", "split"])
@pytest.mark.parametrize("kept", [torch.float32, torch.uint8, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 2, 16, None), (9, 3, 8, None), (3, 3, 20, 70), (8, 1, 32, 11)],
)
def test_attention_equals_torch(
    monkeypatch: pytest.MonkeyPatch,
    chance: torch.Generator,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    kept: torch.dtype,
    processors: int,
) -> None:
    monkeypatch.setattr(device, "_multiprocessors", lambda _: processors)
    monkeypatch.setattr(device, "_DECODE_TILE", 16)
    form = KvFormat(kept)
    config = AttentionConfig(BLOCKS, 16, kv_heads, dim, window, "cpu", torch.float32, form)
    attention = choose_attention(config)
    assert isinstance(attention, TritonAttention)
    kv = LayerKV(attention, *attention.allocate_pages(1))
    # Unwritten slots hold NaN, which must not be read.
    kv.pages.view(torch.uint8).fill_(0xFF)
    for step in steps():
        inputs = attention.prepare(step)
        batch = inputs.layout.plan
        assert isinstance(batch, PagedBatch)
        mixed = torch.randn(len(inputs.tokens), heads + 2 * kv_heads, dim, generator=chance)
        found = kv.attend(mixed, heads, inputs.layout)
        wanted = ByTorch(form).attend(mixed, heads, kv.pages, batch)
        assert torch.allclose(found, wanted, atol=2e-6)


def test_padding_rows_see_nothing_and_write_nothing(kernels: TritonKernels) -> None:
    step = RunStep((told(3, 1, [1]),), ())
    sizes = step_sizes(RunStep((told(3, 1, [1]), told(20, 1, [2, 3])), ()), None)
    numbers = sizes.split(write_step(sizes, step, None, pinned=False))
    pages = torch.ones(4, 16, 4, 16)
    mixed = torch.full((2, 8, 16), 2.0)
    kernels.store_kv(mixed, 4, numbers.slots, pages)
    assert (pages != 1).flatten(2).any(-1).nonzero().tolist() == [[1, 3]]
    answer = kernels.attend(mixed, 4, pages, sizes.paged_batch(numbers, None))
    assert answer[0].ne(0).all() and answer[1].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [48, 600])
def test_norm_and_gate_equal_torch(
    kernels: TritonKernels, chance: torch.Generator, columns: int, dtype: torch.dtype
) -> None:
    x, added = torch.randn(2, 5, 2 * columns, generator=chance).to(dtype)
    weight = torch.randn(2 * columns, generator=chance).to(dtype)
    close: dict[str, Any] = {"atol": 1e-5 if dtype is torch.float32 else 2e-2, "rtol": 0.0}
    wanted = rms_norm(x, weight.shape, weight, 1e-5)
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-5), wanted, **close)
    summed, normed = kernels.add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(summed, x + added)
    assert torch.allclose(normed, rms_norm(x + added, weight.shape, weight, 1e-5), **close)
    gate, up = x.chunk(2, -1)
    assert torch.allclose(kernels.silu_gate(x), silu(gate) * up, **close)


def test_heads_are_rotated(kernels: TritonKernels, chance: torch.Generator) -> None:
    mixed = torch.randn(5, 8, 20, generator=chance)
    cos, sin = RotaryTable(inverse_frequencies(20, 1e4, None, None), 64, "cpu", torch.float32).at(
        torch.tensor([0, 3, 9, 40, 63])
    )
    turned = mixed.clone()
    kernels.rotate_(turned, 6, cos, sin)
    wanted = torch.addcmul(mixed[:, :6] * cos, mixed[:, :6].roll(10, -1), sin)
    assert torch.allclose(turned[:, :6], wanted, atol=1e-6)
    assert torch.equal(turned[:, 6:], mixed[:, 6:])


def test_fp8_is_stored_as_torch_stores_it(kernels: TritonKernels, chance: torch.Generator) -> None:
    form = KvFormat(torch.uint8)
    mixed = torch.randn(40, 8, 16, generator=chance)
    pages = torch.zeros(3, 16, 4, form.width(16), dtype=torch.uint8)
    kernels.store_kv(mixed, 4, torch.arange(40), pages)
    found, wanted = pages.view(48, 4, -1)[:40].int(), form.encode(mixed[:, 4:]).int()
    # The interpreter drops the carry where a number is rounded up to the next power of two; and
    # scales may differ in their last bit, as fp32 is divided in either way.
    carried = (wanted % 8 == 0) & (wanted - found == 8)
    assert (found[..., :16] == wanted[..., :16])[~carried[..., :16]].all()
    assert carried[..., :16].float().mean() < 0.1
    scales = [whole[..., 16:].byte().contiguous().view(torch.float32) for whole in (found, wanted)]
    assert torch.allclose(scales[0], scales[1], rtol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_fp8_keeps_nan_and_infinity(kernels: TritonKernels, bad: float) -> None:
    form = KvFormat(torch.uint8)
    mixed = torch.ones(1, 8, 16)
    mixed[0, 4:, 3] = bad
    pages = torch.zeros(1, 16, 4, form.width(16), dtype=torch.uint8)
    kernels.store_kv(mixed, 4, torch.tensor([0]), pages)
    assert not form.decode(pages[0, 0], torch.float32).isfinite().all(-1).any()


@pytest.mark.parametrize("window", [None, 24])
def test_a_model_gives_the_logits_of_torch(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    logits: list[list[Tensor]] = []
    for types in ({"cpu"}, set()):
        monkeypatch.setattr(device, "DEVICE_TYPES", types)
        shape = replace(SHAPE, window_tokens=window)
        runner = ModelRunner(llama(1, shape), BLOCKS, "cpu", torch.float32)
        logits.append([runner.run(step) for step in steps()])
    for found, wanted in zip(*logits, strict=True):
        assert torch.allclose(found, wanted, atol=1e-3)

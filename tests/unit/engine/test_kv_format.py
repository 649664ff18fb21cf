"""KV formats: what each costs in memory and in accuracy."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels.huge_pages import PAGE_BYTES
from nodeagent.engine.kvcache.block_mover import BlockMover
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS, BlockPool
from nodeagent.engine.kvcache.host_tier import HostTier
from nodeagent.engine.kvcache.kv_format import KV_DTYPES, KvFormat
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.scheduler.batch import StepLimits
from nodeagent.engine.scheduler.batch_scheduler import BatchScheduler
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from tests.unit.engine.tiny import SHAPE, VOCABULARY, RandomWeights

FP8 = KvFormat(KV_DTYPES["fp8"])
BLOCKS = 12


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), power=st.integers(-20, 20))
def test_fp8_errs_by_a_sixteenth_at_most(seed: int, power: int) -> None:
    x = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    kept = FP8.encode(x)
    assert kept.shape == (5, 2, FP8.width(64))
    wide = FP8.decode(kept, torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((wide - x).abs() <= x.abs() / 16 + largest * 2**-18).all()
    assert torch.allclose(wide.abs().amax(-1, keepdim=True), largest)


def test_fp8_keeps_zero_nan_and_infinity() -> None:
    x = torch.zeros(3, 8)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    wide = FP8.decode(FP8.encode(x), torch.float32)
    assert not wide[0].any()
    assert not wide[1].isfinite().any()
    assert not wide[2].isfinite().all()
    # A cleared block holds zeros.
    assert not FP8.decode(torch.zeros(2, 12, dtype=torch.uint8), torch.float32).any()


def test_bytes_per_token() -> None:
    heads = 2 * SHAPE.layers * SHAPE.kv_heads
    taken = {name: KvFormat(dtype).bytes_per_token(SHAPE) for name, dtype in KV_DTYPES.items()}
    dim = SHAPE.head_dim
    assert taken == {
        "fp32": heads * dim * 4,
        "bf16": heads * dim * 2,
        "fp16": heads * dim * 2,
        "fp8": heads * (dim + 4),
    }


def logits(form: KvFormat | None) -> tuple[torch.Tensor, ModelRunner]:
    """Return the logits for a fixed text, computed in chunks and then token by token."""
    # Small weights, so that no layer amplifies a small error.
    model = Llama(SHAPE, RandomWeights(1, 0.2), "cpu", torch.float32, SHAPE.context_tokens)
    runner = ModelRunner(model, BLOCKS, "cpu", torch.float32, form)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(0, VOCABULARY, (60,), generator=generator).tolist()
    batching = BatchScheduler(StepLimits(16, 2), BlockPool(BLOCKS))
    batching.submit(Sequence(1, text[:40], StopConditions(20, frozenset())))
    rows = []
    while batching.has_work:
        batch = batching.next_batch()
        found = runner.run(batch)
        for chunk in batch.chunks:
            batching.mark_computed(chunk)
            if chunk.samples:
                rows.append(found[0])
                sequence = chunk.sequence
                if sequence.append(text[len(sequence.tokens)]):
                    batching.remove(sequence)
    return torch.stack(rows), runner


@pytest.mark.parametrize(("name", "error"), [("bf16", 0.02), ("fp16", 0.003), ("fp8", 0.12)])
def test_logits_change_little_with_the_kv_format(name: str, error: float) -> None:
    exact, _ = logits(None)
    found, _ = logits(KvFormat(KV_DTYPES[name]))
    off = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert 0 < off.mean() < error


def test_blocks_of_another_format_are_refused() -> None:
    _, runner = logits(FP8)
    contents = runner.read_blocks([1, 2])
    assert contents.dtype is torch.uint8
    runner.write_blocks([4, 5], contents)
    assert torch.equal(runner.read_blocks([4, 5]), contents)
    shape = (SHAPE.layers, BLOCK_TOKENS, 2 * SHAPE.kv_heads, FP8.width(SHAPE.head_dim))
    mover = BlockMover(runner, HostTier(2, shape, torch.uint8), None)
    mover.import_blocks([b"a" * 32], contents[:1])
    with pytest.raises(ValueError, match=r"cannot take KV blocks of .* torch.float32: those here"):
        mover.import_blocks([b"b" * 32], contents[1:].float())
    with pytest.raises(ValueError, match="cannot take 1 KV blocks as 2"):
        mover.import_blocks([b"b" * 32, b"c" * 32], contents[1:])
    assert len(mover.host) == 1
    mover.close([])


@pytest.mark.parametrize("layers", [1, 3])
def test_a_block_of_all_layers_is_one_copy_and_each_layer_begins_at_a_huge_page(
    layers: int,
) -> None:
    shape: Any = SimpleNamespace(layers=layers, kv_heads=2, head_dim=4, window_tokens=None)
    model: Any = SimpleNamespace(shape=shape)
    runner = ModelRunner(model, 5, "cpu", torch.bfloat16)
    pages = runner.kv_pages()
    assert all(page.data_ptr() % PAGE_BYTES == 0 for page in pages)
    for layer, page in enumerate(pages):
        page.copy_(torch.randn(page.shape, generator=torch.Generator().manual_seed(layer)))
    held = torch.stack([page.clone() for page in pages])
    blocks = [4, 0, 1]
    contents = runner.read_blocks(blocks)
    assert torch.equal(contents, held[:, blocks].transpose(0, 1))
    assert torch.equal(runner.read_blocks(blocks, torch.empty_like(contents)), contents)
    runner.write_blocks([1, 3, 2], contents)
    held[:, [1, 3, 2]] = contents.transpose(0, 1)
    assert torch.equal(torch.stack(pages), held)

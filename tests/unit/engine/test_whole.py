"""All layers in one call compute what the layers do one by one, and what torch does without us."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.kernels.cpu.kernels import Kernels, kernels
from nodeagent.engine.model.families import FAMILIES
from nodeagent.engine.model.layers.linear import Keeping
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.scheduler.batching import Batch, Chunk
from nodeagent.engine.scheduler.sequence import Ending, Sequence
from tests.unit.engine.tiny import SHAPE, RandomWeights

WIDE = replace(SHAPE, hidden=64, intermediate=96, heads=6, head_dim=32, vocabulary=272)

needs_kernels = pytest.mark.skipif(
    kernels() is None, reason="our own kernels need a compiler and AVX-512 VNNI"
)


def build(shape: ModelShape, keeping: Keeping) -> Llama:
    weights = RandomWeights(1, scale=0.1)
    return FAMILIES[shape.family](shape, weights, "cpu", torch.float32, 256, keeping)


def logits(model: Llama) -> list[Tensor]:
    """Return the logits of a prompt and its rest, and of both together with a decode."""
    runner = Runner(model, 16, "cpu", torch.float32)
    first, second = (Sequence(n, list(range(3, 62 + n)), Ending(9, frozenset())) for n in (1, 2))
    first.blocks, second.blocks = [5, 2, 9, 0], [1, 3, 4, 8]
    steps = [
        Batch((), (Chunk(first, 0, 37),)),
        Batch((), (Chunk(first, 37, 23), Chunk(second, 0, 61))),
    ]
    first.tokens.append(7)
    steps.append(Batch((Chunk(first, 60, 1),), ()))
    return [runner.run(step) for step in steps]


@needs_kernels
@pytest.mark.parametrize(
    "shape",
    [
        WIDE,
        replace(WIDE, family="mistral", window_tokens=21),
        replace(WIDE, family="qwen2"),
        replace(WIDE, family="qwen3"),
    ],
    ids=lambda shape: shape.family,
)
def test_whole_one_by_one_and_by_torch_it_is_the_same(
    shape: ModelShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(shape, Keeping.TILED)
    assert model._whole is not None
    whole = logits(model)
    model.heard = lambda layer, x: None
    one_by_one = logits(model)

    def none_here(x: Tensor) -> Kernels | None:
        return None

    monkeypatch.setattr("nodeagent.engine.model.layers.attention.host_kernels", none_here)
    for module in ("gated_mlp", "norm", "rope"):
        monkeypatch.setattr(f"nodeagent.engine.model.layers.{module}.kernels_for", none_here)
    by_torch = logits(build(shape, Keeping.PLAIN))
    for one, other, wanted in zip(whole, one_by_one, by_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("threads", [2, 3])
def test_a_team_computes_what_one_thread_does(threads: int) -> None:
    wide = replace(WIDE, hidden=256, intermediate=512, heads=8)
    model, before = build(wide, Keeping.TILED), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = logits(model)
        torch.set_num_threads(threads)
        for _ in range(3):
            assert all(map(torch.equal, logits(model), alone))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_what_is_not_all_in_our_own_kernels_goes_one_by_one() -> None:
    assert build(WIDE, Keeping.PLAIN)._whole is None
    assert build(replace(WIDE, intermediate=88), Keeping.TILED)._whole is None
    experts = replace(WIDE, family="qwen3_moe", experts=4, experts_per_token=2)
    assert build(experts, Keeping.TILED)._whole is None

"""Fused layers compute what the layers do one by one, and what torch does without the C kernels."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.kernels import selection
from nodeagent.engine.kernels.cpu.library import cpu_kernels
from nodeagent.engine.kernels.cpu.linear import NativeFloatBackend
from nodeagent.engine.kernels.linear_backend import LinearBackend
from nodeagent.engine.kernels.torch.linear import PlainBackend
from nodeagent.engine.model.families import FAMILIES
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.scheduler.batch import Batch, BatchChunk
from nodeagent.engine.scheduler.sequence import Sequence, StopConditions
from tests.unit.engine.tiny import SHAPE, RandomWeights

WIDE = replace(SHAPE, hidden=64, intermediate=96, heads=6, head_dim=32, vocabulary=272)

needs_kernels = pytest.mark.skipif(
    cpu_kernels() is None, reason="the C kernels need a compiler and AVX-512 VNNI"
)


def build(shape: DecoderShape, backend: LinearBackend) -> Llama:
    weights = RandomWeights(1, scale=0.1)
    return FAMILIES[shape.family](shape, weights, "cpu", torch.float32, 256, backend)


def native() -> LinearBackend:
    kernels = cpu_kernels()
    assert kernels is not None
    return NativeFloatBackend(kernels)


def logits(model: Llama) -> list[Tensor]:
    """Return the logits of a prompt and its rest, and of both together with a decode."""
    runner = ModelRunner(model, 16, "cpu", torch.float32)
    first, second = (
        Sequence(n, list(range(3, 62 + n)), StopConditions(9, frozenset())) for n in (1, 2)
    )
    first.blocks, second.blocks = [5, 2, 9, 0], [1, 3, 4, 8]
    steps = [
        Batch((), (BatchChunk(first, 0, 37),)),
        Batch((), (BatchChunk(first, 37, 23), BatchChunk(second, 0, 61))),
    ]
    first.tokens.append(7)
    steps.append(Batch((BatchChunk(first, 60, 1),), ()))
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
def test_fused_one_by_one_and_by_torch_give_the_same_logits(
    shape: DecoderShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(shape, native())
    assert model._fused is not None
    fused = logits(model)
    model.record_states = lambda layer, x: None
    one_by_one = logits(model)

    monkeypatch.setattr(selection, "cpu_kernels", lambda: None)
    by_torch = logits(build(shape, PlainBackend()))
    for one, other, wanted in zip(fused, one_by_one, by_torch, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("threads", [2, 3])
def test_many_threads_give_the_logits_of_one(threads: int) -> None:
    wide = replace(WIDE, hidden=256, intermediate=512, heads=8)
    model, before = build(wide, native()), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = logits(model)
        torch.set_num_threads(threads)
        for _ in range(3):
            assert all(map(torch.equal, logits(model), alone))
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_layers_that_the_c_kernels_do_not_hold_are_not_fused() -> None:
    assert build(WIDE, PlainBackend())._fused is None
    assert build(replace(WIDE, intermediate=88), native())._fused is None
    experts = replace(WIDE, family="qwen3_moe", experts=4, experts_per_token=2)
    assert build(experts, native())._fused is None

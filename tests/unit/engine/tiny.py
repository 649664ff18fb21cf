"""Small models of random weights, computed for real."""

import zlib

import torch
from torch import Tensor

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.model.llama import Llama

VOCABULARY = 257
SHAPE = DecoderShape(
    layers=4,
    hidden=16,
    intermediate=24,
    heads=4,
    kv_heads=2,
    head_dim=4,
    vocabulary=VOCABULARY,
    context_tokens=256,
    rms_epsilon=1e-5,
    rope_theta=10_000.0,
)


class RandomWeights:
    """Any weight by any name, the same for the same name and seed."""

    def __init__(self, seed: int, scale: float = 0.5) -> None:
        self._seed = seed
        self._scale = scale

    def tensor(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> Tensor:
        assert cut is None
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
        drawn = torch.randn(shape, generator=generator)
        return 1 + 0.1 * drawn if "norm" in name else self._scale * drawn

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        """Everything is there."""

    def has(self, name: str) -> bool:
        return name != "rope_freqs.weight"

    def stored(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        return None

    def groups(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        return None


def llama(seed: int, shape: DecoderShape = SHAPE) -> Llama:
    return Llama(shape, RandomWeights(seed), "cpu", torch.float32, shape.context_tokens)

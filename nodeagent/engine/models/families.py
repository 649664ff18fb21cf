"""Which class a model's family is, and building it: its files are checked first, then read."""

from typing import Final

import torch

from nodeagent.engine.layers.linear import Keeping
from nodeagent.engine.models.llama import Llama
from nodeagent.engine.models.mistral import Mistral
from nodeagent.engine.models.mixture import Mixtral, Qwen3Moe
from nodeagent.engine.models.qwen2 import Qwen2
from nodeagent.engine.models.qwen3 import Qwen3
from nodeagent.engine.models.shape import ModelShape
from nodeagent.engine.models.weights import Survey, WeightSource

FAMILIES: Final[dict[str, type[Llama]]] = {
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}


def build(
    shape: ModelShape,
    source: WeightSource,
    device: str,
    dtype: torch.dtype,
    context_tokens: int,
    keeping: Keeping = Keeping.PLAIN,
) -> Llama:
    """Read the model of this shape from `source`, its matrices kept as `keeping` says."""
    return FAMILIES[shape.family](shape, source, device, dtype, context_tokens, keeping)


def survey(shape: ModelShape, source: WeightSource) -> None:
    """Raise CheckpointError where a weight is missing or of another shape; reads none."""
    build(shape, Survey(source), "meta", torch.float32, 1)

"""Which class a model's family is, and building it: its files are checked first, then read."""

from typing import Final

import torch

from nodeagent.engine.distributed.collectives import ALONE, Ranks
from nodeagent.engine.distributed.shards import ONE, Split
from nodeagent.engine.model.layers.linear import Keeping
from nodeagent.engine.model.layers.lora import Adding
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.mistral import Mistral
from nodeagent.engine.model.mixture import Mixtral, Qwen3Moe
from nodeagent.engine.model.qwen2 import Qwen2
from nodeagent.engine.model.qwen3 import Qwen3
from nodeagent.engine.model.shape import ModelShape
from nodeagent.engine.weights.weight_loading import Survey, WeightSource

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
    ranks: Ranks = ALONE,
) -> Llama:
    """Read the model of this shape from `source`, its matrices kept as `keeping` says.

    Of several `ranks` each has its share of the model.
    """
    return FAMILIES[shape.family](shape, source, device, dtype, context_tokens, keeping, ranks)


def survey(shape: ModelShape, source: WeightSource, split: Split = ONE) -> None:
    """Raise CheckpointError where a weight is missing, of another shape, or cannot be split so.

    Reads none.
    """
    split.check(shape)
    for rank in range(split.ranks):
        build(shape, Survey(source), "meta", torch.float32, 1, ranks=Ranks(split, rank))


def adding_of(shape: ModelShape, source: WeightSource) -> Adding:
    """Return what adapters may change of the whole model; reads nothing."""
    return build(shape, Survey(source), "meta", torch.float32, 1).adding

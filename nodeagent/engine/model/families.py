"""Which class a model's family is, and building it: its files are checked first, then read."""

from typing import Final

import torch

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.distributed.collectives import SINGLE_RANK, Communicator
from nodeagent.engine.distributed.shards import NOT_SPLIT, ParallelConfig
from nodeagent.engine.model.experts import Mixtral, Qwen3Moe
from nodeagent.engine.model.layers.linear import Keeping
from nodeagent.engine.model.layers.lora import ActiveAdapters
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.mistral import Mistral
from nodeagent.engine.model.qwen2 import Qwen2
from nodeagent.engine.model.qwen3 import Qwen3
from nodeagent.engine.model.weight_loader import HeaderOnlySource, WeightSource

FAMILIES: Final[dict[str, type[Llama]]] = {
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}


def build_model(
    shape: DecoderShape,
    source: WeightSource,
    device: str,
    dtype: torch.dtype,
    context_tokens: int,
    keeping: Keeping = Keeping.PLAIN,
    ranks: Communicator = SINGLE_RANK,
) -> Llama:
    """Read the model of this shape from `source`, its matrices kept as `keeping` says.

    Of several `ranks` each has its share of the model.
    """
    return FAMILIES[shape.family](shape, source, device, dtype, context_tokens, keeping, ranks)


def check_weights(
    shape: DecoderShape, source: WeightSource, split: ParallelConfig = NOT_SPLIT
) -> None:
    """Raise CheckpointError where a weight is missing, of another shape, or cannot be split so.

    Reads none.
    """
    split.check(shape)
    for rank in range(split.ranks):
        build_model(
            shape,
            HeaderOnlySource(source),
            "meta",
            torch.float32,
            1,
            ranks=Communicator(split, rank),
        )


def adapters_of(shape: DecoderShape, source: WeightSource) -> ActiveAdapters:
    """Return what adapters may change of the whole model; reads nothing."""
    return build_model(shape, HeaderOnlySource(source), "meta", torch.float32, 1).adding

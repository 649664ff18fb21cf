"""Maps a model's family to its class, checks its files and builds it."""

from typing import Final

import torch

from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.distributed.collectives import SINGLE_RANK, Communicator
from nodeagent.engine.distributed.shards import NOT_SPLIT, ParallelConfig
from nodeagent.engine.kernels.linear_backend import LinearBackend
from nodeagent.engine.model.experts import Mixtral, Qwen3Moe
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.lora import ActiveAdapters
from nodeagent.engine.model.mistral import Mistral
from nodeagent.engine.model.qwen2 import Qwen2
from nodeagent.engine.model.qwen3 import Qwen3
from nodeagent.engine.weights.weight_source import HeaderOnlySource, WeightSource

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
    linear_backend: LinearBackend | None = None,
    communicator: Communicator = SINGLE_RANK,
) -> Llama:
    """Start to read the shard of this rank from `source`, and return the model.

    Call the model's `wait_for_weights` before the first step and before closing `source`. Without
    `linear_backend`, matrices are kept as they are.
    """
    return FAMILIES[shape.family](
        shape, source, device, dtype, context_tokens, linear_backend, communicator
    )


def check_weights(
    shape: DecoderShape, source: WeightSource, split: ParallelConfig = NOT_SPLIT
) -> None:
    """Raise CheckpointError where a weight is missing, misshapen, or cannot be split so.

    Only the headers of the files are read.
    """
    split.check(shape)
    for rank in range(split.ranks):
        build_model(
            shape,
            HeaderOnlySource(source),
            "meta",
            torch.float32,
            1,
            communicator=Communicator(split, rank),
        )


def adapters_of(shape: DecoderShape, source: WeightSource) -> ActiveAdapters:
    """Return which modules of the whole model adapters can change; reads only headers."""
    return build_model(shape, HeaderOnlySource(source), "meta", torch.float32, 1).adapters

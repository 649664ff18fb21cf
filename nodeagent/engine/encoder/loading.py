"""From a configuration to an encoder ready to read: files checked first, memory asked second."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.encoder.worker import Text
from nodeagent.engine.loading import available_bytes
from nodeagent.engine.model.bert import Bert, survey_bert
from nodeagent.engine.model.layers.kv_format import DTYPES
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.encoder import EncoderFolder


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """A model with what its server must know."""

    model: Bert
    tokenizer: Tokenizer
    frame: tuple[list[int], list[int]]
    """The tokens that stand before and after those of every text."""
    kind: Literal["embedding", "rerank"]
    context_tokens: int
    weights_bytes: int
    load_s: float

    def tokenise(self, given: list[Any]) -> list[Text]:
        """Tokenise texts or pairs of texts."""
        encodings = self.tokenizer.encode_batch(given, add_special_tokens=True)
        return [Text(encoding.ids, encoding.type_ids) for encoding in encodings]


def load_encoder(config: EngineConfig) -> LoadedEncoder:
    """Load what `config` names, or raise CheckpointError in words before memory is spent."""
    started_s = time.monotonic()
    torch.set_num_threads(config.threads)
    dtype = DTYPES[config.dtype]
    source = EncoderFolder(Path(config.model_path))
    try:
        shape = source.shape
        if shape.labels > 1:
            raise CheckpointError(
                f"cannot load {config.model_path}: it classifies into {shape.labels} labels; a"
                " model that reranks has one"
            )
        survey_bert(shape, source)
        weights_bytes = shape.parameters() * dtype.itemsize
        available = available_bytes(config.device)
        if weights_bytes > available:
            raise CheckpointError(
                f"cannot load {config.model_path} on {config.device}: {weights_bytes} bytes of"
                f" weights are needed, {available} are available"
            )
        model = Bert(shape, source, config.device, dtype)
    finally:
        source.close()
    return LoadedEncoder(
        model=model,
        tokenizer=source.tokenizer,
        frame=_frame(source.tokenizer),
        kind="rerank" if shape.labels else "embedding",
        context_tokens=min(source.context_tokens, config.context_tokens_max),
        weights_bytes=weights_bytes,
        load_s=round(time.monotonic() - started_s, 3),
    )


def _frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Find what the tokenizer puts around a text: what is around a letter and is not the letter."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    before = next(
        (at for at in range(len(framed)) if framed[at : at + len(plain)] == plain), len(framed)
    )
    return framed[:before], framed[before + len(plain) :]

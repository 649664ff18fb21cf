"""Loads an encoder: the files are checked first, then the memory, then the weights are read."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tokenizers import Tokenizer

from isochrone.wire.engines.engine import EngineConfig
from nodeagent.engine.architecture.bert_shape import BertShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.encoder.bert_folder import BertFolder
from nodeagent.engine.encoder.encoder_thread import TokenizedText
from nodeagent.engine.kvcache.kv_format import DTYPES
from nodeagent.engine.memory.memory_watch import available_bytes
from nodeagent.engine.model.bert import Bert, check_bert_weights


class TextFrame(NamedTuple):
    """The special tokens before and after the tokens of every text."""

    before: list[int]
    after: list[int]


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder with the facts about it that its server needs."""

    model: Bert
    tokenizer: Tokenizer
    frame: TextFrame
    kind: Literal["embedding", "rerank", "classify"]
    labels: tuple[str, ...]
    is_multi_label: bool
    context_tokens: int
    weights_bytes: int
    load_s: float

    def tokenise(self, texts: list[Any]) -> list[TokenizedText]:
        """Tokenise texts, or pairs of texts."""
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=True)
        return [TokenizedText(encoding.ids, encoding.type_ids) for encoding in encodings]


def load_encoder(config: EngineConfig) -> LoadedEncoder:
    """Load the encoder of `config`, or raise CheckpointError before memory is allocated."""
    started_s = time.monotonic()
    torch.set_num_threads(config.threads)
    dtype = DTYPES[config.dtype]
    source = BertFolder(Path(config.model_path))
    try:
        shape = source.shape
        check_bert_weights(shape, source)
        weights_bytes = shape.parameters() * dtype.itemsize
        available = available_bytes(config.device)
        if weights_bytes > available:
            raise CheckpointError(
                f"cannot load {config.model_path} on {config.device}: the weights need"
                f" {weights_bytes} bytes, {available} are available"
            )
        model = Bert(shape, source, config.device, dtype)
    finally:
        source.close()
    return LoadedEncoder(
        model=model,
        tokenizer=source.tokenizer,
        frame=_text_frame(source.tokenizer),
        kind=_kind_of(shape),
        labels=source.labels,
        is_multi_label=source.is_multi_label,
        context_tokens=min(source.context_tokens, config.context_tokens_max),
        weights_bytes=weights_bytes,
        load_s=round(time.monotonic() - started_s, 3),
    )


def _kind_of(shape: BertShape) -> Literal["embedding", "rerank", "classify"]:
    """Return what the model is for: one label is the relevance of a reranker."""
    if not shape.labels:
        return "embedding"
    return "rerank" if shape.labels == 1 else "classify"


def _text_frame(tokenizer: Tokenizer) -> TextFrame:
    """Find the special tokens around a text, by tokenising one letter with and without them."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    framed = tokenizer.encode("a", add_special_tokens=True).ids
    start = next(
        (start for start in range(len(framed)) if framed[start : start + len(plain)] == plain),
        len(framed),
    )
    return TextFrame(framed[:start], framed[start + len(plain) :])

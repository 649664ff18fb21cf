"""Opening the model that drafts: checked against the served one before memory is spent."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.checkpoint.gguf import GgufFile
from nodeagent.engine.checkpoint.opening import open_checkpoint
from nodeagent.engine.checkpoint.safetensors import SafetensorsFolder
from nodeagent.engine.layers.linear import Keeping
from nodeagent.engine.models.families import build, survey
from nodeagent.engine.models.shape import CheckpointError, ModelShape
from nodeagent.engine.runner import Runner
from nodeagent.engine.speculate.ahead import Ahead, Habits, likeliest
from nodeagent.engine.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A small model of the same tokens, its weights not read yet."""

    source: GgufFile | SafetensorsFolder
    tokens: int
    """How many tokens both models know: the rest of its logits are padding."""

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return self.source.shape

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """What its weights take."""
        return self.shape.parameters() * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """What it keeps of each token beside the served model's KV."""
        return self.shape.kv_bytes_per_token(dtype)

    def close(self) -> None:
        """Close its files."""
        self.source.close()

    def load(
        self, config: EngineConfig, served: Runner, dtype: torch.dtype, keeping: Keeping
    ) -> Ahead:
        """Read its weights, and give it KV beside that of the `served` model."""
        context = min(config.context_tokens_max, self.shape.context_tokens)
        model = build(self.shape, self.source, config.device, dtype, context, keeping)
        known = self.tokens
        return Ahead(
            runner=Runner(model, served.blocks, config.device, dtype),
            habits=Habits("model", pick=lambda logits: likeliest(logits[:, :known])),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            share=self.shape.parameters() / served.shape.parameters(),
        )


def open_draft(config: EngineConfig, vocabulary: Vocabulary) -> DraftModel | None:
    """Open what `draft_path` names; None where it names nothing, or nothing is to be drafted."""
    if not config.draft_path or config.draft_tokens_max == 0:
        return None
    source, its_own = open_checkpoint(Path(config.draft_path))
    try:
        _same_tokens(config, vocabulary, its_own)
        if source.shape.vocabulary < vocabulary.size:
            raise CheckpointError(
                f"cannot draft with {config.draft_path}: embeddings for {source.shape.vocabulary}"
                f" of {vocabulary.size} tokens"
            )
        survey(source.shape, source)
    except BaseException:
        source.close()
        raise
    return DraftModel(source, vocabulary.size)


def _same_tokens(config: EngineConfig, served: Vocabulary, drafting: Vocabulary) -> None:
    ours = served.tokenizer.get_vocab(with_added_tokens=True)
    theirs = drafting.tokenizer.get_vocab(with_added_tokens=True)
    if ours == theirs:
        return
    odd = min(piece for piece, token in (ours.items() ^ theirs.items()))
    raise CheckpointError(
        f"cannot draft with {config.draft_path}: its tokens are not those of {config.model_path}:"
        f" {odd!r} is token {theirs.get(odd)} of {len(theirs)} there, {ours.get(odd)} of"
        f" {len(ours)} here"
    )

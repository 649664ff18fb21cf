"""Opening the model that drafts: checked against the served one before memory is spent."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.core.model_runner import Runner
from nodeagent.engine.distributed.collectives import Ranks
from nodeagent.engine.model.eagle3 import Eagle3, Features
from nodeagent.engine.model.families import build, survey
from nodeagent.engine.model.layers.linear import Keeping, choose
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.shape import CheckpointError, ModelShape
from nodeagent.engine.sampling.sampler import likeliest
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS
from nodeagent.engine.speculative.draft_model import Ahead, Habits
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import Checkpoint, open_checkpoint
from nodeagent.engine.weights.eagle3 import HeadFolder, is_head
from nodeagent.engine.weights.weight_loading import Survey, Weights, WeightSource


class Served(NamedTuple):
    """The model that is drafted for, as its files have it, and who computes it."""

    source: WeightSource
    shape: ModelShape
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A small model of the same tokens, its weights not read yet."""

    source: Checkpoint
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

    def load(self, config: EngineConfig, served: Runner, model: Llama, whole: Served) -> Ahead:
        """Read its weights, and give it KV beside that of the `served` model."""
        dtype = served.dtype
        context = min(config.context_tokens_max, self.shape.context_tokens)
        # Drafts need not be exact but fast: packed wherever its file is, and this device can.
        keeping, _ = choose(config.device, dtype, "file")
        own = build(self.shape, self.source, config.device, dtype, context, keeping)
        own.arrived()
        known, runner = self.tokens, Runner(own, served.blocks, config.device, dtype)
        if config.graphs:
            runner.capture(config.sequences_max, context)
        return Ahead(
            runner=runner,
            habits=Habits("model", pick=lambda logits: likeliest(logits[:, :known])),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            share=self.shape.parameters() / served.shape.parameters(),
        )


@dataclass(frozen=True, slots=True)
class Head:
    """An EAGLE-3 head for the served model, its weights not read yet."""

    source: HeadFolder
    layers: tuple[int, ...]
    """Before which of the served model's layers it listens."""
    embeddings: int
    """Weights of the served model's embeddings, where it needs a copy: ranks cut the model's."""

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """What its weights take."""
        return (self.source.parameters() + self.embeddings) * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """What it keeps of each token beside the served model's KV."""
        shape = self.source.shape
        return shape.kv_bytes_per_token(dtype) + shape.hidden * dtype.itemsize

    def close(self) -> None:
        """Close its files."""
        self.source.close()

    def load(self, config: EngineConfig, served: Runner, model: Llama, whole: Served) -> Ahead:
        """Read its weights, and have it listen to the `served` model."""
        context = min(config.context_tokens_max, self.source.shape.context_tokens)
        features = Features(self.source, self.source, self.layers)
        features.place(served.blocks * BLOCK_TOKENS, config.device, served.dtype)
        head = Eagle3(
            *(self.source, self.source, features, self._embedding(config, served, model, whole)),
            *(config.device, served.dtype, context),
        )
        model.heard = features.hear
        served.beside = features
        if whole.ranks.split.ranks > 1:
            features.afar, whole.ranks.told = True, features.arrive
            whole.ranks.listen(self.layers, whole.shape)
        targets = self.source.targets()
        return Ahead(
            runner=Runner(head, served.blocks, config.device, served.dtype),
            habits=Habits("head", 1, lambda logits: targets[likeliest(logits).cpu()], head.chain),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            share=self.source.parameters() / served.shape.parameters(),
        )

    def _embedding(
        self, config: EngineConfig, served: Runner, model: Llama, whole: Served
    ) -> Callable[[Tensor], Tensor]:
        """Return the served model's embeddings: a table of its own where ranks cut the model's."""
        if not self.embeddings:
            return model.embed
        shape = whole.shape
        weights = Weights(whole.source, config.device, served.dtype, Keeping.PLAIN)
        table = weights.read("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        weights.begin()()
        return table.__getitem__


def open_draft(
    config: EngineConfig, shape: ModelShape, vocabulary: Vocabulary
) -> DraftModel | Head | None:
    """Open what `draft_path` names; None where it names nothing, or nothing is to be drafted.

    Raises CheckpointError where it does not go with the served model of this `shape`.
    """
    if not config.draft_path or config.draft_tokens_max == 0:
        return None
    if is_head(Path(config.draft_path)):
        return _open_head(config, shape)
    return _open_model(config, vocabulary)


def _open_model(config: EngineConfig, vocabulary: Vocabulary) -> DraftModel:
    source = open_checkpoint(Path(config.draft_path))
    try:
        _same_tokens(config, vocabulary, source.vocabulary())
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


def _open_head(config: EngineConfig, shape: ModelShape) -> Head:
    head = HeadFolder(Path(config.draft_path))
    try:
        for what, its_own, wanted in (
            ("hidden states", head.target_hidden, shape.hidden),
            ("tokens", head.shape.vocabulary, shape.vocabulary),
        ):
            if its_own != wanted:
                raise CheckpointError(
                    f"cannot draft with {config.draft_path}: a head for {what} of {its_own}, those"
                    f" of {config.model_path} are {wanted}"
                )
        if head.shape.hidden != shape.hidden and not head.has("embed_tokens.weight"):
            raise CheckpointError(
                f"cannot draft with {config.draft_path}: it lacks embed_tokens.weight, and the"
                f" model's embeddings are {shape.hidden} wide, not {head.shape.hidden}"
            )
        layers = head.layers_heard(shape.layers)
        head.targets()
        seen = Survey(head)
        Eagle3(
            seen,
            head,
            Features(seen, head, layers),
            lambda tokens: tokens,
            "meta",
            torch.float32,
            1,
        )
    except BaseException:
        head.close()
        raise
    shared = config.tensor_parallel == 1 or head.has("embed_tokens.weight")
    return Head(head, layers, 0 if shared else shape.vocabulary * shape.hidden)


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

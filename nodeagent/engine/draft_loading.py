"""Opening the model that drafts: checked against the served one before memory is spent."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.architecture.decoder_shape import DecoderShape
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.core.model_runner import ModelRunner
from nodeagent.engine.distributed.collectives import Communicator
from nodeagent.engine.kernels.selection import choose_linear
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.model.eagle3 import Eagle3, HiddenStateFeatures
from nodeagent.engine.model.families import build_model, check_weights
from nodeagent.engine.model.llama import Llama
from nodeagent.engine.model.weight_loader import WeightLoader
from nodeagent.engine.sampling.sampler import most_likely
from nodeagent.engine.speculative.draft_model import DraftModel, DraftModelTraits
from nodeagent.engine.tokenizer.loading import read_vocabulary
from nodeagent.engine.tokenizer.vocabulary import Vocabulary
from nodeagent.engine.weights.checkpoint import Checkpoint, open_checkpoint
from nodeagent.engine.weights.eagle3_folder import EagleFolder, is_eagle_head
from nodeagent.engine.weights.weight_source import HeaderOnlySource, WeightSource


class TargetModel(NamedTuple):
    """The model that is drafted for, as its files have it, and who computes it."""

    source: WeightSource
    shape: DecoderShape
    ranks: Communicator


@dataclass(frozen=True, slots=True)
class DraftModelFiles:
    """A small model of the same tokens, its weights not read yet."""

    source: Checkpoint
    tokens: int
    """How many tokens both models know: the rest of its logits are padding."""

    @property
    def shape(self) -> DecoderShape:
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
        self, config: EngineConfig, served: ModelRunner, model: Llama, whole: TargetModel
    ) -> DraftModel:
        """Read its weights, and give it KV beside that of the `served` model."""
        dtype = served.dtype
        context = min(config.context_tokens_max, self.shape.context_tokens)
        # Drafts need not be exact but fast: packed wherever its file is, and this device can.
        linear, _ = choose_linear(config.device, dtype, "file")
        own = build_model(self.shape, self.source, config.device, dtype, context, linear)
        own.wait_for_weights()
        known, runner = self.tokens, ModelRunner(own, served.blocks, config.device, dtype)
        if config.graphs:
            runner.capture(config.sequences_max, context)
        return DraftModel(
            runner=runner,
            habits=DraftModelTraits("model", pick=lambda logits: most_likely(logits[:, :known])),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            share=self.shape.parameters() / served.shape.parameters(),
        )


@dataclass(frozen=True, slots=True)
class Eagle3HeadFiles:
    """An EAGLE-3 head for the served model, its weights not read yet."""

    source: EagleFolder
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

    def load(
        self, config: EngineConfig, served: ModelRunner, model: Llama, whole: TargetModel
    ) -> DraftModel:
        """Read its weights, and have it listen to the `served` model."""
        context = min(config.context_tokens_max, self.source.shape.context_tokens)
        features = HiddenStateFeatures(self.source, self.source, self.layers)
        features.allocate(served.blocks * BLOCK_TOKENS, config.device, served.dtype)
        head = Eagle3(
            *(self.source, self.source, features, self._embedding(config, served, model, whole)),
            *(config.device, served.dtype, context),
        )
        model.record_states = features.record
        served.token_states = features
        if whole.ranks.split.ranks > 1:
            features.has_remote_states, whole.ranks.on_layer_inputs = True, features.add_remote
            whole.ranks.forward_layer_inputs(self.layers, whole.shape)
        targets = self.source.targets()
        return DraftModel(
            runner=ModelRunner(head, served.blocks, config.device, served.dtype),
            habits=DraftModelTraits(
                "head", 1, lambda logits: targets[most_likely(logits).cpu()], head.use_own_states
            ),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            share=self.source.parameters() / served.shape.parameters(),
        )

    def _embedding(
        self, config: EngineConfig, served: ModelRunner, model: Llama, whole: TargetModel
    ) -> Callable[[Tensor], Tensor]:
        """Return the served model's embeddings: a table of its own where ranks cut the model's."""
        if not self.embeddings:
            return model.embed
        shape = whole.shape
        weights = WeightLoader(whole.source, config.device, served.dtype)
        table = weights.read("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        weights.start_reads()()
        return table.__getitem__


def open_draft(
    config: EngineConfig, shape: DecoderShape, vocabulary: Vocabulary
) -> DraftModelFiles | Eagle3HeadFiles | None:
    """Open what `draft_path` names; None where it names nothing, or nothing is to be drafted.

    Raises CheckpointError where it does not go with the served model of this `shape`.
    """
    if not config.draft_path or config.draft_tokens_max == 0:
        return None
    if is_eagle_head(Path(config.draft_path)):
        return _open_head(config, shape)
    return _open_model(config, vocabulary)


def _open_model(config: EngineConfig, vocabulary: Vocabulary) -> DraftModelFiles:
    source = open_checkpoint(Path(config.draft_path))
    try:
        _same_tokens(config, vocabulary, read_vocabulary(source))
        if source.shape.vocabulary < vocabulary.size:
            raise CheckpointError(
                f"cannot draft with {config.draft_path}: embeddings for {source.shape.vocabulary}"
                f" of {vocabulary.size} tokens"
            )
        check_weights(source.shape, source)
    except BaseException:
        source.close()
        raise
    return DraftModelFiles(source, vocabulary.size)


def _open_head(config: EngineConfig, shape: DecoderShape) -> Eagle3HeadFiles:
    head = EagleFolder(Path(config.draft_path))
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
        seen = HeaderOnlySource(head)
        Eagle3(
            seen,
            head,
            HiddenStateFeatures(seen, head, layers),
            lambda tokens: tokens,
            "meta",
            torch.float32,
            1,
        )
    except BaseException:
        head.close()
        raise
    shared = config.tensor_parallel == 1 or head.has("embed_tokens.weight")
    return Eagle3HeadFiles(head, layers, 0 if shared else shape.vocabulary * shape.hidden)


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

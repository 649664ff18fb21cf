"""Loads the draft model: checked against the target model before memory is allocated.

A draft model is opened first (its files are checked), and loaded once the target model is.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from isochrone.wire.engines.engine import EngineConfig
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


class TargetCheckpoint(NamedTuple):
    """The target model's weights, shape and ranks."""

    source: WeightSource
    shape: DecoderShape
    ranks: Communicator


@dataclass(frozen=True, slots=True)
class DraftModelFiles:
    """An opened draft model with the target's vocabulary; its weights are not read yet."""

    source: Checkpoint
    tokens: int
    """The size of the shared vocabulary. Logits beyond it are padding."""

    @property
    def shape(self) -> DecoderShape:
        """The model's shape."""
        return self.source.shape

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the weights."""
        return self.shape.parameters() * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return what is kept of each token beside the target model's KV."""
        return self.shape.kv_bytes_per_token(dtype)

    def close(self) -> None:
        """Close the files."""
        self.source.close()

    def load(
        self,
        config: EngineConfig,
        target_runner: ModelRunner,
        target_model: Llama,
        target: TargetCheckpoint,
    ) -> DraftModel:
        """Read the weights, and place the KV beside that of the target model."""
        dtype = target_runner.dtype
        context = min(config.context_tokens_max, self.shape.context_tokens)
        # Speed matters more than precision: the weights stay packed as in the file if possible.
        linear, _ = choose_linear(config.device, dtype, "file")
        own = build_model(self.shape, self.source, config.device, dtype, context, linear)
        own.wait_for_weights()
        size, runner = self.tokens, ModelRunner(own, target_runner.blocks, config.device, dtype)
        if config.graphs:
            runner.capture(config.sequences_max, context)
        return DraftModel(
            runner=runner,
            traits=DraftModelTraits("model", pick=lambda logits: most_likely(logits[:, :size])),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            cost_share=self.shape.parameters() / target_runner.shape.parameters(),
        )


@dataclass(frozen=True, slots=True)
class Eagle3HeadFiles:
    """An opened EAGLE-3 head for the target model; its weights are not read yet."""

    source: EagleFolder
    layers: tuple[int, ...]
    """The target model's layers whose inputs the head reads."""
    embeddings: int
    """Weights in the head's copy of the target's embeddings; 0 unless ranks split the table."""

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the weights."""
        return (self.source.parameters() + self.embeddings) * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return what is kept of each token beside the target model's KV."""
        shape = self.source.shape
        return shape.kv_bytes_per_token(dtype) + shape.hidden * dtype.itemsize

    def close(self) -> None:
        """Close the files."""
        self.source.close()

    def load(
        self,
        config: EngineConfig,
        target_runner: ModelRunner,
        target_model: Llama,
        target: TargetCheckpoint,
    ) -> DraftModel:
        """Read the weights, and attach the head to the target model's layers."""
        context = min(config.context_tokens_max, self.source.shape.context_tokens)
        features = HiddenStateFeatures(self.source, self.source, self.layers)
        features.allocate(target_runner.blocks * BLOCK_TOKENS, config.device, target_runner.dtype)
        embed = self._embedding(config, target_runner, target_model, target)
        head = Eagle3(
            self.source,
            self.source,
            features,
            embed,
            config.device,
            target_runner.dtype,
            context,
        )
        target_model.record_states = features.record
        target_runner.token_states = features
        if target.ranks.split.ranks > 1:
            features.has_remote_states, target.ranks.on_layer_inputs = True, features.add_remote
            target.ranks.forward_layer_inputs(self.layers, target.shape)
        targets = self.source.targets()
        return DraftModel(
            runner=ModelRunner(head, target_runner.blocks, config.device, target_runner.dtype),
            traits=DraftModelTraits(
                "head", 1, lambda logits: targets[most_likely(logits).cpu()], head.use_own_states
            ),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            cost_share=self.source.parameters() / target_runner.shape.parameters(),
        )

    def _embedding(
        self,
        config: EngineConfig,
        target_runner: ModelRunner,
        target_model: Llama,
        target: TargetCheckpoint,
    ) -> Callable[[Tensor], Tensor]:
        """Return the target model's embeddings: a copy of the table if ranks split it."""
        if not self.embeddings:
            return target_model.embed
        shape = target.shape
        weights = WeightLoader(target.source, config.device, target_runner.dtype)
        table = weights.read("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        weights.start_reads()()
        return table.__getitem__


def open_draft(
    config: EngineConfig, shape: DecoderShape, vocabulary: Vocabulary
) -> DraftModelFiles | Eagle3HeadFiles | None:
    """Open the draft model at `draft_path`; None if there is none or drafts are turned off.

    `shape` and `vocabulary` are the target model's. Raises CheckpointError if they do not match.
    """
    if not config.draft_path or config.draft_tokens_max == 0:
        return None
    if is_eagle_head(Path(config.draft_path)):
        return _open_head(config, shape)
    return _open_draft_model(config, vocabulary)


def _open_draft_model(config: EngineConfig, vocabulary: Vocabulary) -> DraftModelFiles:
    source = open_checkpoint(Path(config.draft_path))
    try:
        _check_same_tokens(config, vocabulary, read_vocabulary(source))
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
        for name, size, target_size in (
            ("hidden states", head.target_hidden, shape.hidden),
            ("tokens", head.shape.vocabulary, shape.vocabulary),
        ):
            if size != target_size:
                raise CheckpointError(
                    f"cannot draft with {config.draft_path}: a head for {name} of {size}, those"
                    f" of {config.model_path} are {target_size}"
                )
        if head.shape.hidden != shape.hidden and not head.has("embed_tokens.weight"):
            raise CheckpointError(
                f"cannot draft with {config.draft_path}: it lacks embed_tokens.weight, and the"
                f" model's embeddings are {shape.hidden} wide, not {head.shape.hidden}"
            )
        layers = head.layers_heard(shape.layers)
        head.targets()
        headers = HeaderOnlySource(head)
        Eagle3(
            headers,
            head,
            HiddenStateFeatures(headers, head, layers),
            lambda tokens: tokens,
            "meta",
            torch.float32,
            1,
        )
    except BaseException:
        head.close()
        raise
    is_shared = config.tensor_parallel == 1 or head.has("embed_tokens.weight")
    return Eagle3HeadFiles(head, layers, 0 if is_shared else shape.vocabulary * shape.hidden)


def _check_same_tokens(config: EngineConfig, target: Vocabulary, draft: Vocabulary) -> None:
    target_tokens = target.tokenizer.get_vocab(with_added_tokens=True)
    draft_tokens = draft.tokenizer.get_vocab(with_added_tokens=True)
    if target_tokens == draft_tokens:
        return
    different = min(piece for piece, token in (target_tokens.items() ^ draft_tokens.items()))
    raise CheckpointError(
        f"cannot draft with {config.draft_path}: its tokens are not those of {config.model_path}:"
        f" {different!r} is token {draft_tokens.get(different)} of {len(draft_tokens)} there,"
        f" {target_tokens.get(different)} of {len(target_tokens)} here"
    )

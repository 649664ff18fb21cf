"""Opening the model that drafts: checked against the served one before memory is spent."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from isochrone.wire.engine import EngineConfig
from nodeagent.engine.checkpoint.eagle3 import HeadFolder, is_head
from nodeagent.engine.checkpoint.gguf import GgufFile
from nodeagent.engine.checkpoint.opening import open_checkpoint
from nodeagent.engine.checkpoint.safetensors import SafetensorsFolder
from nodeagent.engine.decide.sequence import BLOCK_TOKENS
from nodeagent.engine.layers.linear import choose
from nodeagent.engine.models.eagle3 import Eagle3, Features
from nodeagent.engine.models.families import build, survey
from nodeagent.engine.models.llama import Llama
from nodeagent.engine.models.shape import CheckpointError, ModelShape
from nodeagent.engine.models.weights import Survey
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

    def load(self, config: EngineConfig, served: Runner, model: Llama) -> Ahead:
        """Read its weights, and give it KV beside that of the `served` model."""
        dtype = served.dtype
        context = min(config.context_tokens_max, self.shape.context_tokens)
        # Drafts need not be exact but fast: packed wherever its file is, and this device can.
        keeping, _ = choose(config.device, dtype, quantised=True)
        own = build(self.shape, self.source, config.device, dtype, context, keeping)
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

    def weights_bytes(self, dtype: torch.dtype) -> int:
        """What its weights take."""
        return self.source.parameters() * dtype.itemsize

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """What it keeps of each token beside the served model's KV."""
        shape = self.source.shape
        return shape.kv_bytes_per_token(dtype) + shape.hidden * dtype.itemsize

    def close(self) -> None:
        """Close its files."""
        self.source.close()

    def load(self, config: EngineConfig, served: Runner, model: Llama) -> Ahead:
        """Read its weights, and have it listen to the `served` model."""
        context = min(config.context_tokens_max, self.source.shape.context_tokens)
        features = Features(self.source, self.source, self.layers)
        features.place(served.blocks * BLOCK_TOKENS, config.device, served.dtype)
        head = Eagle3(
            self.source, self.source, features, model.embed, config.device, served.dtype, context
        )
        model.heard = features.hear
        served.beside = features
        targets = self.source.targets()
        return Ahead(
            runner=Runner(head, served.blocks, config.device, served.dtype),
            habits=Habits(
                "head", 1, lambda logits: targets[logits.argmax(-1).cpu()].tolist(), head.chain
            ),
            clock=time.perf_counter,
            read_tokens_max=config.batch_tokens_max,
            context_tokens=context,
            share=self.source.parameters() / served.shape.parameters(),
        )


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
    return Head(head, layers)


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

"""The folder of a BERT: config.json, what sentence-transformers adds to it, and the tokenizer."""

from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from nodeagent.engine.architecture.bert_shape import BertShape, Pooling
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.tokenizer.hf_tokenizer import read_tokenizer
from nodeagent.engine.weights.hf_config import read_json, read_optional_json
from nodeagent.engine.weights.safetensors_folder import SafetensorsFiles

_CLASSIFIER: Final = "BertForSequenceClassification"
_SEVERAL_CLASSES: Final = "multi_label_classification"
_MODE: Final = "pooling_mode_"


class _ModelTypeConfig(msgspec.Struct):
    model_type: str = ""


class _BertConfig(msgspec.Struct):
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    architectures: list[str] | None = None
    num_labels: int | None = None
    id2label: dict[str, str] | None = None
    problem_type: str | None = None


class _SentenceTransformersModule(msgspec.Struct):
    path: str = ""
    type: str = ""


class _SentenceConfig(msgspec.Struct):
    max_seq_length: int | None = None


def is_encoder(path: Path) -> bool:
    """True where `path` is the folder of a model that reads and does not write."""
    config = path / "config.json"
    return config.exists() and read_json(config, _ModelTypeConfig).model_type == "bert"


class BertFolder(SafetensorsFiles):
    """A BERT's weights, shape, tokenizer, and how many tokens of a text it takes.

    `labels` are the names of a classifier's classes. If it `is_multi_label` a text may have several
    of them, or none.
    """

    def __init__(self, folder: Path) -> None:
        config: _BertConfig = read_json(folder / "config.json", _BertConfig)
        self.shape = _shape(folder, config)
        names = config.id2label or {}
        self.labels = tuple(
            names.get(str(label), f"LABEL_{label}") for label in range(self.shape.labels)
        )
        self.is_multi_label = config.problem_type == _SEVERAL_CLASSES
        sentence: _SentenceConfig = read_optional_json(
            folder / "sentence_bert_config.json", _SentenceConfig
        )
        self.context_tokens = min(
            sentence.max_seq_length or config.max_position_embeddings,
            config.max_position_embeddings,
        )
        self.tokenizer = _tokenizer(folder / "tokenizer.json")
        _check_tokenizer(folder, self.tokenizer, self.shape)
        super().__init__(folder)


def _shape(folder: Path, config: _BertConfig) -> BertShape:
    if config.hidden_act != "gelu" or config.position_embedding_type != "absolute":
        raise CheckpointError(
            f"cannot load {folder}: activation {config.hidden_act!r} or positions"
            f" {config.position_embedding_type!r} are unsupported"
        )
    if config.num_attention_heads < 1:
        raise CheckpointError(f"cannot load {folder}: no attention heads")
    if config.problem_type == "regression":
        raise CheckpointError(f"cannot load {folder}: a regression has no classes")
    scores = _CLASSIFIER in (config.architectures or ())
    pooling, normalised = _pooling(folder)
    return BertShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        kinds=config.type_vocab_size,
        epsilon=config.layer_norm_eps,
        labels=(config.num_labels or len(config.id2label or {}) or 2) if scores else 0,
        pooling=pooling,
        normalised=normalised,
    )


def _pooling(folder: Path) -> tuple[Pooling, bool]:
    """Return what sentence-transformers would do after the model; without its file, the usual."""
    path = folder / "modules.json"
    if not path.exists():
        return "mean", True
    steps: list[_SentenceTransformersModule] = read_json(path, list[_SentenceTransformersModule])
    kinds = [step.type.rpartition(".")[2] for step in steps]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(f"cannot load {folder}: the steps {kinds} are unsupported")
    if steps[1].path != Path(steps[1].path).name:
        raise CheckpointError(f"cannot read {path}: {steps[1].path!r} is no folder beside it")
    config: dict[str, Any] = read_json(folder / steps[1].path / "config.json", dict[str, Any])
    modes = [name for name, chosen in config.items() if name.startswith(_MODE) and chosen]
    named: dict[str, Pooling] = {
        f"{_MODE}mean_tokens": "mean",
        f"{_MODE}cls_token": "cls",
    }
    if len(modes) != 1 or modes[0] not in named:
        raise CheckpointError(f"cannot load {folder}: pooling by {modes} is unsupported")
    return named[modes[0]], len(kinds) == 3


def _tokenizer(path: Path) -> Tokenizer:
    # Read as JSON first: this bounds its size, and refuses a file that is not JSON with a clear
    # message.
    read_json(path, msgspec.Raw)
    tokenizer = read_tokenizer(path)
    # The settings for training would truncate texts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_tokenizer(folder: Path, tokenizer: Tokenizer, shape: BertShape) -> None:
    """Refuse a tokenizer whose tokens, or kinds of texts, the model has no embeddings for."""
    framed = tokenizer.encode("a", "a" if shape.labels == 1 else None)
    known = tokenizer.get_vocab(with_added_tokens=True)
    token = max([*known.values(), *framed.ids], default=0)
    kind = max(framed.type_ids, default=0)
    if token >= shape.vocabulary or kind >= shape.kinds:
        raise CheckpointError(
            f"cannot load {folder}: the tokenizer gives token {token}, but embeddings for"
            f" {shape.vocabulary}; and texts of kind {kind}, but embeddings for {shape.kinds}"
        )

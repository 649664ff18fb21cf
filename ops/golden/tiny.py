"""Tiny models of each family with reproducible weights.

Each weight is drawn from a generator seeded with its name. The streams of numpy's RandomState never
change, so golden values can be committed without the weights.
"""

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDE, VOCABULARY = 32, 3, 4, 2, 16, 48, 64
EXPERTS, EXPERT_WIDE = 6, 24

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": WIDE,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_LLAMA3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_EXPERTS: Final = {"num_experts_per_tok": 2, "head_dim": HEAD_DIM}

CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {"head_dim": HEAD_DIM, "rope_scaling": _LLAMA3, "tie_word_embeddings": True},
    "mistral": {"head_dim": HEAD_DIM, "sliding_window": 8},
    "qwen2": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3},
    "qwen3": {"head_dim": HEAD_DIM, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
    "qwen3_moe": {
        **_EXPERTS,
        "num_experts": EXPERTS,
        "moe_intermediate_size": EXPERT_WIDE,
        "norm_topk_prob": True,
    },
    "mixtral": {**_EXPERTS, "num_local_experts": EXPERTS, "sliding_window": None},
}
"""The values of each family's config.json in addition to the common ones."""

STRETCHED: Final[dict[str, dict[str, Any]]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 16},
    "tuned": {
        "factor": 2.5,
        "original_max_position_embeddings": 24,
        "beta_fast": 3.0,
        "beta_slow": 0.5,
        "attention_factor": 0.8,
    },
    "as DeepSeek's": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}
"""RoPE scalings (YaRN unless named otherwise) for a Qwen3. The prompts are longer than the original
context."""


def config_of(family: str) -> dict[str, Any]:
    """Return the content of config.json."""
    return {"model_type": family, **_COMMON, **CONFIGS[family]}


def weight(name: str, shape: tuple[int, ...], scale: float = 0.2) -> Tensor:
    """Return the weight of this name: norms are around one, all others around zero."""
    generator = np.random.RandomState(zlib.crc32(name.encode()))
    values = generator.standard_normal(shape) * scale
    return torch.from_numpy((values + name.lower().endswith("norm.weight")).astype(np.float32))


def shapes_of(family: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight under its published name."""
    config = config_of(family)
    head_dim = config.get("head_dim", HIDDEN // HEADS)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (heads * head_dim, HIDDEN)
            if family == "qwen2":
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (heads * head_dim,)
            if family.startswith("qwen3") and name != "v":
                shapes[f"{prefix}self_attn.{name}_norm.weight"] = (head_dim,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * head_dim)
        shapes |= {f"{prefix}{name}": shape for name, shape in _mlp_shapes(family).items()}
    return shapes


def _mlp_shapes(family: str) -> dict[str, tuple[int, ...]]:
    gate, up, down = "gate_proj", "up_proj", "down_proj"
    block, modules, wide = "mlp", ["mlp"], WIDE
    shapes: dict[str, tuple[int, ...]] = {}
    if family == "mixtral":
        block, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    if family in ("mixtral", "qwen3_moe"):
        wide = EXPERT_WIDE if family == "qwen3_moe" else WIDE
        shapes[f"{block}.gate.weight"] = (EXPERTS, HIDDEN)
        modules = [f"{block}.experts.{number}" for number in range(EXPERTS)]
    for module in modules:
        shapes[f"{module}.{gate}.weight"] = shapes[f"{module}.{up}.weight"] = (wide, HIDDEN)
        shapes[f"{module}.{down}.weight"] = (HIDDEN, wide)
    return shapes


def weights_of(family: str) -> dict[str, Tensor]:
    """Return all weights of the tiny model."""
    return {name: weight(name, shape) for name, shape in shapes_of(family).items()}


def write_folder(folder: Path, family: str, scaling: str = "") -> None:
    """Write the tiny model as a Hugging Face folder without a tokenizer.

    `scaling` is a key of STRETCHED.
    """
    config = config_of(family)
    if scaling:
        config["rope_scaling"] = {"rope_type": "yarn", **STRETCHED[scaling]}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights_of(family), folder / "model.safetensors", metadata={"format": "pt"})


def prompts() -> list[list[int]]:
    """Return the token ids of three sequences: short, long, and across a KV block boundary."""
    generator = np.random.RandomState(7)
    lengths = (9, 45, 24)
    return [[int(t) for t in generator.randint(0, VOCABULARY, length)] for length in lengths]


ANSWER_TOKENS: Final = 6
"""The last tokens of each sequence are its output; the rest is the prompt."""

RERANK_WORDS: Final = 30_522
"""The size of BERT's vocabulary, so that BERT's tokenizer can be used."""
RERANK_CONFIG: Final[dict[str, Any]] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": RERANK_WORDS,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "id2label": {"0": "relevance"},
    "label2id": {"relevance": 0},
}


def reranker_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a small classifier under its published name."""
    hidden, wide = RERANK_CONFIG["hidden_size"], RERANK_CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.word_embeddings.weight": (RERANK_WORDS, hidden),
        "bert.embeddings.position_embeddings.weight": (64, hidden),
        "bert.embeddings.token_type_embeddings.weight": (2, hidden),
    }
    dense = {"bert.pooler.dense": (hidden, hidden), "classifier": (1, hidden)}
    norms = ["bert.embeddings.LayerNorm"]
    for layer in range(RERANK_CONFIG["num_hidden_layers"]):
        prefix = f"bert.encoder.layer.{layer}."
        dense |= {
            f"{prefix}attention.self.{n}": (hidden, hidden) for n in ("query", "key", "value")
        }
        dense[f"{prefix}attention.output.dense"] = (hidden, hidden)
        dense[f"{prefix}intermediate.dense"] = (wide, hidden)
        dense[f"{prefix}output.dense"] = (hidden, wide)
        norms += [f"{prefix}attention.output.LayerNorm", f"{prefix}output.LayerNorm"]
    for name, shape in dense.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
    return shapes


def write_reranker(folder: Path) -> None:
    """Write a small cross-encoder as a Hugging Face folder without a tokenizer."""
    weights = {name: weight(name, shape, 0.5) for name, shape in reranker_shapes().items()}
    (folder / "config.json").write_text(json.dumps(RERANK_CONFIG))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_classifier(folder: Path, encoder: Path, labels: Sequence[str], **config: Any) -> None:
    """Write a classifier of texts: the BERT in `encoder` with a drawn head, and its tokenizer."""
    weights = {
        f"bert.{name}": one for name, one in load_file(encoder / "model.safetensors").items()
    }
    values = json.loads((encoder / "config.json").read_text())
    head = ("classifier.weight", (len(labels), values["hidden_size"]))
    weights[head[0]] = weight(*head, 0.5)
    weights["classifier.bias"] = weight("classifier.bias", (len(labels),), 0.5)
    values |= {"architectures": ["BertForSequenceClassification"], **config}
    values["id2label"] = {str(number): label for number, label in enumerate(labels)}
    values["label2id"] = {label: number for number, label in enumerate(labels)}
    (folder / "config.json").write_text(json.dumps(values))
    shutil.copy(encoder / "tokenizer.json", folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with the tiny models' number of tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCABULARY - 1]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": {"content": "<end>"}, "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

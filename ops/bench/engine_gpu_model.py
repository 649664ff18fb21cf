"""Writes a Llama with random weights as a Hugging Face folder: of 8B's shape, or tiny for the CPU.

Random weights cost as much to run as trained ones; only their answers mean nothing.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHARD_BYTES: Final = 4_000_000_000
_DEVIATION: Final = 0.02


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    """The sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int

    def config(self, dtype: str) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
        }

    def weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight by its Hugging Face name, in order of use."""
        wide, queries, kept = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, wide)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            shapes |= {
                f"{at}input_layernorm.weight": (wide,),
                f"{at}self_attn.q_proj.weight": (queries, wide),
                f"{at}self_attn.k_proj.weight": (kept, wide),
                f"{at}self_attn.v_proj.weight": (kept, wide),
                f"{at}self_attn.o_proj.weight": (wide, queries),
                f"{at}post_attention_layernorm.weight": (wide,),
                f"{at}mlp.gate_proj.weight": (self.intermediate, wide),
                f"{at}mlp.up_proj.weight": (self.intermediate, wide),
                f"{at}mlp.down_proj.weight": (wide, self.intermediate),
            }
        return shapes | {
            "model.norm.weight": (wide,),
            "lm_head.weight": (self.vocabulary, wide),
        }

    def read_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of weights that a decode step reads: everything but the embeddings."""
        sizes = {name: math.prod(shape) for name, shape in self.weights().items()}
        return (sum(sizes.values()) - sizes["model.embed_tokens.weight"]) * dtype.itemsize


LLAMA_8B: Final = LlamaSizes(32, 4096, 14_336, 32, 8, 128, 128_256, 8192)
TOY: Final = LlamaSizes(2, 64, 96, 4, 2, 16, 512, 1024)


def write_model(
    folder: Path,
    plan: LlamaSizes,
    device: str,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model unless it exists. The weights are drawn on the device, which is fast."""
    done = folder / "config.json"
    config = plan.config(str(dtype).removeprefix("torch."))
    if done.exists() and json.loads(done.read_text()) == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    tokenizer = tokenizer or _words(plan.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    chance = torch.Generator(device).manual_seed(1)
    placed: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, shape in plan.weights().items():
        weight = torch.empty(shape, device=device, dtype=dtype)
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, _DEVIATION, generator=chance)
        shard[name] = weight.cpu()
        if sum(one.nbytes for one in shard.values()) >= shard_bytes:
            _write_shard(folder, shard, placed)
    _write_shard(folder, shard, placed)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done.write_text(json.dumps(config))


def _write_shard(folder: Path, shard: dict[str, torch.Tensor], placed: dict[str, str]) -> None:
    if shard:
        file = f"model-{len(set(placed.values())):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(shard, file)
        shard.clear()


def _words(vocabulary: int) -> Tokenizer:
    """Return a tokenizer with a token for each byte, and meaningless words as the other tokens."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"w{number}" for number in range(len(words), vocabulary)]
    known = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

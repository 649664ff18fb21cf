"""A tiny model that counts: its answer to a prompt is known, whatever is computed beside it.

Attention and MLP add nothing, so the next token depends on the last one alone, and its logit is
higher than all others by far more than sums of floats can differ.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ops.golden import tiny

CONTEXT_TOKENS = 512
COUNTED = tiny.VOCABULARY - 1
"""The tokens that are letters; the last one is the end of text."""


def write_counting_model(folder: Path) -> None:
    """Write the model, with its tokenizer, as a Hugging Face folder."""
    config = {**tiny.config_of("qwen3"), "tie_word_embeddings": False}
    config["max_position_embeddings"] = CONTEXT_TOKENS
    weights = tiny.weights_of("qwen3")
    for name, one in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(one)
    directions = torch.nn.functional.normalize(weights["model.embed_tokens.weight"], dim=1)
    weights["model.embed_tokens.weight"] = directions
    weights["model.norm.weight"] = torch.ones(tiny.HIDDEN)
    heads = torch.zeros(tiny.VOCABULARY, tiny.HIDDEN)
    for token in range(COUNTED):
        heads[(token + 1) % COUNTED] = directions[token]
    weights["lm_head.weight"] = heads
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(folder)


def counted_from(letter: str, tokens: int) -> str:
    """Return the answer to a prompt that ends with `letter`."""
    first = ord(letter) - ord("!")
    return "".join(chr(ord("!") + (first + 1 + n) % COUNTED) for n in range(tokens))

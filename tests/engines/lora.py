"""Writes a LoRA adapter for the chat model whose effect is plain to see."""

import json
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file

RANK: Final = 4


def write_adapter(
    folder: Path, model: Path, rank: int = RANK, extra_module: str = "", seed: int = 7
) -> Path:
    """Write a PEFT adapter of made-up weights for the attention of a Llama model; return it.

    With `extra_module` it also changes a module of the first layer that the model does not have.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rows = {"q_proj": hidden, "v_proj": hidden // heads * config["num_key_value_heads"]}
    chance = np.random.RandomState(seed)
    stored: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        extra = {extra_module: hidden} if extra_module and layer == 0 else {}
        for part, size in {**rows, **extra}.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            down = chance.standard_normal((rank, hidden)).astype(np.float32)
            up = chance.standard_normal((size, rank)).astype(np.float32) * 0.1
            stored[f"{module}.lora_A.weight"] = torch.from_numpy(down)
            stored[f"{module}.lora_B.weight"] = torch.from_numpy(up)
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 4,
        "target_modules": [*rows, *((extra_module,) if extra_module else ())],
        "base_model_name_or_path": str(model),
        "task_type": "CAUSAL_LM",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder

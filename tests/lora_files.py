"""Made-up LoRA adapters as files, without torch."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN, QUERIES, KEYS, LAYERS, RANK = 16, 16, 8, 2, 4
DIMENSIONS = {"layers": LAYERS, "hidden_size": HIDDEN, "heads": 4, "kv_heads": 2, "head_size": 4}
"""The dimensions of the model that `adapter_shapes` fits."""


def adapter_shapes(
    *, hidden: int = HIDDEN, rank: int = RANK, layers: int = LAYERS
) -> dict[str, list[int]]:
    """Return the shapes of an adapter for the attention of the model."""
    shapes: dict[str, list[int]] = {}
    for layer in range(layers):
        for part, rows in (("q_proj", QUERIES), ("v_proj", KEYS)):
            module = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            shapes[f"{module}.lora_A.weight"] = [rank, hidden]
            shapes[f"{module}.lora_B.weight"] = [rows, rank]
    return shapes


def config_file(**fields: Any) -> bytes:
    """Return an `adapter_config.json`."""
    base = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    return json.dumps({**base, **fields}).encode()


def weights_file(shapes: Mapping[str, Sequence[int]] | None = None) -> bytes:
    """Return an `adapter_model.safetensors` of zeros."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in (shapes or adapter_shapes()).items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)

"""Writes the chat model with its first layers only, for tests of where KV is, not of what it says.

Of 30 layers two are left, so that a prompt costs a CPU little.
"""

import json
from pathlib import Path
from typing import Final

from safetensors import safe_open
from safetensors.torch import save_file

LAYERS: Final = 2


def write_shallow(source: Path, target: Path) -> Path:
    """Write the first layers of the model of the folder `source` to `target`, and return it."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names if is_kept(name)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def is_kept(tensor: str) -> bool:
    """Return whether a tensor is of the first layers, or of no layer."""
    parts = tensor.split(".")
    return parts[:2] != ["model", "layers"] or int(parts[2]) < LAYERS

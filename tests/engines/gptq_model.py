"""Writes the chat model as a GPTQ checkpoint, in the layout that published ones have.

The weights are rounded to the nearest of 16 values per group, without the calibration that the
method is named after: engines cannot tell.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GROUP: Final = 64
BITS: Final = 4
ZERO: Final = 8
Integers = NDArray[np.uint32]
Floats = NDArray[np.floating[Any]]
PER_WORD: Final = 32 // BITS
CONFIG: Final = {
    **{"quant_method": "gptq", "checkpoint_format": "gptq", "bits": BITS, "group_size": GROUP},
    **{"sym": True, "desc_act": False, "lm_head": False},
}


class Rounded(NamedTuple):
    """A matrix: numbers of 4 bits [inputs, outputs], ZERO for 0, and scales [groups, outputs]."""

    numbers: Integers
    scales: Floats


def write_gptq(source: Path, target: Path) -> Path:
    """Write the model of the folder `source` to `target`, and return it."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config = {**config, "dtype": "float16", "quantization_config": CONFIG}
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = file.keys()
        for name in names:
            weight = file.get_tensor(name)
            if name.endswith("_proj.weight"):
                base = name.removesuffix("weight")
                found = packed(rounded(weight.float().numpy()))
                tensors |= {base + part: tensor for part, tensor in found.items()}
            else:
                tensors[name] = weight.half()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def rounded(weight: Floats) -> Rounded:
    """Return a matrix [outputs, inputs] with a scale for each group of inputs."""
    groups = np.ascontiguousarray(weight.T).reshape(-1, GROUP, weight.shape[0])
    scales = np.abs(groups).max(1) / 7
    numbers = np.clip(np.round(groups / scales[:, None] + ZERO), 0, 15)
    whole = numbers.reshape(-1, weight.shape[0]).astype(np.uint32)
    return Rounded(whole, scales.astype(np.float16))


def packed(matrix: Rounded) -> dict[str, Tensor]:
    """Return the tensors of a matrix, with neighbouring inputs in a word."""
    # The layout subtracts one from each zero.
    zeros = np.full(matrix.scales.shape, ZERO - 1, dtype=np.uint32)
    return {
        "qweight": words(matrix.numbers.T).T.contiguous(),
        "qzeros": words(zeros),
        "scales": torch.from_numpy(matrix.scales),
        "g_idx": torch.arange(len(matrix.numbers), dtype=torch.int32) // GROUP,
    }


def words(numbers: Integers) -> Tensor:
    """Pack eight neighbours of each row into a word of 32 bits, the first lowest."""
    rows = numbers.reshape(numbers.shape[0], -1, PER_WORD)
    found = np.zeros(rows.shape[:2], dtype=np.uint32)
    for place in range(PER_WORD):
        found |= rows[:, :, place] << np.uint32(place * BITS)
    return torch.from_numpy(found.view(np.int32))

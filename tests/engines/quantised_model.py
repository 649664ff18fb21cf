"""Writes the chat model as GPTQ and AWQ checkpoints, in the layouts that published ones have.

The weights are rounded to the nearest of 16 values per group, without the calibration that the two
methods are named after: engines cannot tell.
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
Integers = NDArray[np.uint32]
Floats = NDArray[np.floating[Any]]
PER_WORD: Final = 32 // BITS
IN_ORDER: Final = tuple(range(PER_WORD))
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours has which bits of a word, the lowest first."""
CONFIGS: Final = {
    "gptq": {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "sym": True}
    | {"desc_act": False, "checkpoint_format": "gptq", "lm_head": False},
    "awq": {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True}
    | {"version": "gemm"},
}


class Rounded(NamedTuple):
    """A matrix in groups of its inputs: numbers [inputs, outputs], the others [groups, outputs]."""

    numbers: Integers
    zeros: Integers
    scales: Floats


def write_quantised(source: Path, target: Path, method: str) -> Path:
    """Write the model of the folder `source` to `target`, and return it."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (target / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config = {**config, "dtype": "float16", "quantization_config": CONFIGS[method]}
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, Tensor] = {}
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = file.keys()
        for name in names:
            weight = file.get_tensor(name)
            if name.endswith("_proj.weight"):
                base = name.removesuffix("weight")
                values = weight.float().numpy()
                found = packed(rounded(values, is_symmetric=method == "gptq"), method)
                tensors |= {base + part: tensor for part, tensor in found.items()}
            else:
                tensors[name] = weight.half()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def rounded(weight: Floats, *, is_symmetric: bool) -> Rounded:
    """Return a matrix [outputs, inputs] as numbers from 0 to 15."""
    groups = np.ascontiguousarray(weight.T).reshape(-1, GROUP, weight.shape[0])
    if is_symmetric:
        scales = np.abs(groups).max(1) / 7
        zeros = np.full_like(scales, 8)
    else:
        low, high = groups.min(1, initial=0), groups.max(1, initial=0)
        scales = (high - low) / 15
        zeros = np.round(-low / scales)
    numbers = np.clip(np.round(groups / scales[:, None] + zeros[:, None]), 0, 15)
    whole = numbers.reshape(-1, weight.shape[0]).astype(np.uint32)
    return Rounded(whole, zeros.astype(np.uint32), scales.astype(np.float16))


def packed(matrix: Rounded, method: str) -> dict[str, Tensor]:
    """Return the tensors of a matrix: GPTQ packs neighbouring inputs, AWQ neighbouring outputs."""
    scales = torch.from_numpy(matrix.scales)
    if method == "awq":
        return {
            "qweight": words(matrix.numbers, AWQ_ORDER),
            "qzeros": words(matrix.zeros, AWQ_ORDER),
            "scales": scales,
        }
    return {
        "qweight": words(matrix.numbers.T, IN_ORDER).T.contiguous(),
        # The layout subtracts one from each zero.
        "qzeros": words(matrix.zeros - 1, IN_ORDER),
        "scales": scales,
        "g_idx": torch.arange(len(matrix.numbers), dtype=torch.int32) // GROUP,
    }


def words(numbers: Integers, order: tuple[int, ...]) -> Tensor:
    """Pack eight neighbours of each row into a word of 32 bits."""
    rows = numbers.reshape(numbers.shape[0], -1, PER_WORD)
    found = np.zeros(rows.shape[:2], dtype=np.uint32)
    for place, which in enumerate(order):
        found |= rows[:, :, which] << np.uint32(place * BITS)
    return torch.from_numpy(found.view(np.int32))

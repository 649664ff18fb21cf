"""Reads the folder of a PEFT LoRA adapter, and checks that it fits the model."""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from isochrone.wire.models.adapter_files import AdapterConfig
from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.hf_config import read_json
from nodeagent.engine.weights.lora_adapter import LoraAdapter
from nodeagent.engine.weights.safetensors_folder import SafetensorsFiles

RANK_MAX: Final = 256
_WEIGHT: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")


def read_adapter(
    name: str,
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    device: str,
    dtype: torch.dtype,
    bytes_max: int,
) -> LoraAdapter:
    """Read the adapter in `folder` for a model with these `modules`: name to (rows, columns).

    Raises CheckpointError, before weights are read, where the adapter is for another model, needs
    a feature that the engine lacks, or takes more than `bytes_max`.
    """
    config: AdapterConfig = read_json(folder / "adapter_config.json", AdapterConfig)
    _check_config(folder, config)
    rank = config.r
    scale = config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank)
    pairs, digest = {}, hashlib.sha256()
    source = SafetensorsFiles(folder, "adapter_model.safetensors")
    try:
        found = _check_tensors(folder, source, rank, modules)
        size_bytes = sum(rank * sum(modules[module]) for module in found) * dtype.itemsize
        if size_bytes > bytes_max:
            raise CheckpointError(
                f"cannot load adapter {folder}: it takes {size_bytes} bytes, {bytes_max} are left"
            )
        for module, (down_name, up_name) in sorted(found.items()):
            rows, columns = modules[module]
            down = source.tensor(down_name, (rank, columns)).to(dtype)
            up = (source.tensor(up_name, (rows, rank)).float() * scale).to(dtype)
            if not (down.isfinite().all() and up.isfinite().all()):
                raise CheckpointError(
                    f"cannot load adapter {folder}: {module} is not finite in {dtype}"
                )
            digest.update(module.encode() + b"\0")
            for half in (down, up):
                digest.update(half.contiguous().view(torch.uint8).numpy().data)
            pairs[module] = (down.to(device), up.to(device))
    finally:
        source.close()
    return LoraAdapter(name, pairs, digest.digest(), size_bytes)


def _check_config(folder: Path, config: AdapterConfig) -> None:
    if config.peft_type != "LORA" or not 1 <= config.r <= RANK_MAX:
        raise CheckpointError(
            f"cannot load adapter {folder}: {config.peft_type} of rank {config.r}; LORA of rank 1"
            f" to {RANK_MAX} is supported"
        )
    used = config.unsupported()
    if used or not math.isfinite(config.lora_alpha):
        raise CheckpointError(
            f"cannot load adapter {folder}: {', '.join(used) or 'its lora_alpha'} is unsupported"
        )


def _check_tensors(
    folder: Path, source: SafetensorsFiles, rank: int, modules: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[str, str]]:
    """Check the name and shape of every tensor from the headers alone.

    Returns the names of the (down, up) tensors by module.
    """
    halves: dict[str, dict[str, str]] = {}
    for name in source.names():
        matched = _WEIGHT.fullmatch(name)
        if matched is None or matched[1] not in modules:
            raise CheckpointError(
                f"cannot load adapter {folder}: {name[:200]} belongs to no module of this model"
            )
        halves.setdefault(matched[1], {})[matched[2]] = name
    if not halves:
        raise CheckpointError(f"cannot load adapter {folder}: it has no weights")
    for module, names in halves.items():
        if len(names) != 2:
            raise CheckpointError(f"cannot load adapter {folder}: half of {module} is missing")
        rows, columns = modules[module]
        source.check(names["A"], (rank, columns))
        source.check(names["B"], (rows, rank))
    return {module: (names["A"], names["B"]) for module, names in halves.items()}

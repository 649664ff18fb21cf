"""Reading a PEFT adapter's folder, and holding it to the model that it is to change."""

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from nodeagent.engine.checkpoint.config import read_json
from nodeagent.engine.checkpoint.safetensors import SafetensorsFiles
from nodeagent.engine.layers.lora import Adapter
from nodeagent.engine.models.shape import CheckpointError

RANK_MAX: Final = 256
_FILE: Final = "adapter_model.safetensors"
_WEIGHT: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")


class _AdapterConfig(msgspec.Struct):
    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    trainable_token_indices: Any = None


class _Found(msgspec.Struct, frozen=True):
    """One module's two weights in the file, and their shapes."""

    down: str
    up: str
    rank: int
    rows: int
    columns: int


def read_adapter(
    name: str,
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    device: str,
    dtype: torch.dtype,
    bytes_max: int,
) -> Adapter:
    """Read the adapter in `folder` for a model of these `modules` (rows, columns).

    Raises CheckpointError, before its weights are read, where it is for another model or asks for
    what the engine lacks.
    """
    config: _AdapterConfig = read_json(folder / "adapter_config.json", _AdapterConfig)
    _check(folder, config)
    source = SafetensorsFiles(folder, _FILE)
    try:
        found = _survey(folder, source, config.r, modules)
        numbers = sum(one.rank * (one.rows + one.columns) for one in found.values())
        size_bytes = numbers * dtype.itemsize
        if size_bytes > bytes_max:
            raise CheckpointError(
                f"cannot load adapter {folder}: it takes {size_bytes} bytes, {bytes_max} are left"
            )
        pairs = {}
        for module, one in found.items():
            down = source.tensor(one.down, (one.rank, one.columns))
            up = source.tensor(one.up, (one.rows, one.rank)).float() * _scale(config)
            if not (down.isfinite().all() and up.isfinite().all()):
                raise CheckpointError(f"cannot load adapter {folder}: {module} is not finite")
            pairs[module] = (down.to(device, dtype), up.to(device, dtype))
    finally:
        source.close()
    return Adapter(name, pairs, _digest(folder), size_bytes)


def _check(folder: Path, config: _AdapterConfig) -> None:
    if config.peft_type != "LORA" or not 1 <= config.r <= RANK_MAX:
        raise CheckpointError(
            f"cannot load adapter {folder}: {config.peft_type} of rank {config.r}; LORA of rank 1"
            f" to {RANK_MAX} is supported"
        )
    lacking = {
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "bias": config.bias != "none",
        "modules_to_save": config.modules_to_save,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "trainable_token_indices": config.trainable_token_indices,
    }
    asked = [name for name, value in lacking.items() if value]
    if asked or not math.isfinite(config.lora_alpha):
        raise CheckpointError(
            f"cannot load adapter {folder}: {', '.join(asked) or 'its lora_alpha'} is unsupported"
        )


def _digest(folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in ("adapter_config.json", _FILE):
        with (folder / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def _scale(config: _AdapterConfig) -> float:
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _survey(
    folder: Path, source: SafetensorsFiles, rank: int, modules: Mapping[str, tuple[int, int]]
) -> dict[str, _Found]:
    """Hold every weight's name and shape to the model; reads none."""
    halves: dict[str, dict[str, str]] = {}
    for name in source.names():
        matched = _WEIGHT.fullmatch(name)
        if matched is None or matched[1] not in modules:
            raise CheckpointError(
                f"cannot load adapter {folder}: {name[:200]} changes nothing that this model has"
            )
        halves.setdefault(matched[1], {})[matched[2]] = name
    found: dict[str, _Found] = {}
    for module, names in halves.items():
        if len(names) != 2:
            raise CheckpointError(f"cannot load adapter {folder}: half of {module} is missing")
        rows, columns = modules[module]
        one = _Found(names["A"], names["B"], rank, rows, columns)
        source.check(one.down, (rank, columns))
        source.check(one.up, (rows, rank))
        found[module] = one
    if not found:
        raise CheckpointError(f"cannot load adapter {folder}: it changes nothing")
    return found

"""Reads a Hugging Face folder whose matrices are quantised (compressed-tensors, GPTQ, AWQ).

An unknown scheme raises CheckpointError: its numbers would be read as wrong weights.
"""

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.kernels.matrix_formats import GROUP_WEIGHTS, QuantisedGroups
from nodeagent.engine.weights.hf_config import read_json
from nodeagent.engine.weights.quantised_layouts import PackedMatrix, PackingScheme
from nodeagent.engine.weights.safetensors_folder import FLOATS, INTEGERS, SafetensorsFolder
from nodeagent.engine.weights.stored_tensor import StoredTensor

log = logging.getLogger(__name__)


class _GroupWeightsConfig(msgspec.Struct):
    num_bits: int = 0
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    actorder: Any = None


class _GroupConfig(msgspec.Struct):
    weights: _GroupWeightsConfig | None = None
    input_activations: Any = None


class QuantisationConfig(msgspec.Struct):
    """`quantization_config`: the fields of all methods."""

    quant_method: str = ""
    format: str = ""
    config_groups: dict[str, _GroupConfig] = {}
    bits: int = 0
    group_size: int = 0
    checkpoint_format: str = "gptq"
    version: str = "gemm"


class _QuantisedModelConfig(msgspec.Struct):
    quantization_config: QuantisationConfig | None = None


def quantisation_of(folder: Path) -> QuantisationConfig | None:
    """Return the folder's quantisation; None where its matrices are floats."""
    config: _QuantisedModelConfig = read_json(folder / "config.json", _QuantisedModelConfig)
    return config.quantization_config


class QuantisedFolder(SafetensorsFolder):
    """A decoder's folder with packed matrices."""

    def __init__(self, folder: Path, quantisation: QuantisationConfig) -> None:
        self._scheme = _scheme(folder, quantisation)
        super().__init__(folder)
        log.info("quantised weights", extra={"fields": {"scheme": str(self._scheme)}})

    def filed_bits(self) -> Counter[int]:
        """Return the number of weights by their size in the file; see `LinearBackend`."""
        counts = super().filed_bits()
        bits = self._scheme.bits if self._scheme.group % GROUP_WEIGHTS == 0 else 32
        for name, stored in self._stored.items():
            if name.endswith(f".{self._scheme.packed_name}"):
                words = math.prod(stored.shape)
                counts[32] -= words
                counts[bits] += words * 32 // self._scheme.bits
        return counts

    def has(self, name: str) -> bool:
        """Return whether the files hold `name`, packed or not."""
        return super().has(name) or self._is_packed(name)

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        """Raise CheckpointError where `tensor` would."""
        if not self._is_packed(name):
            super().check(name, shape, cut)
            return
        if len(shape) != 2 or not self._scheme.fits(*shape):
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {shape}, which {self._scheme} does not fit"
            )
        for part, wanted in self._scheme.parts(*shape).items():
            kinds, words = (FLOATS, "a float") if "scale" in part else (INTEGERS, "a whole number")
            self._check(_sibling(name, part), wanted, kinds, words)

    def tensor(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> Tensor:
        """Read one weight, or a slice of it; in fp32 where it is packed."""
        if not self._is_packed(name):
            return super().tensor(name, shape, cut)
        weight = self._packed(name, shape).dequantise()
        return weight if cut is None else weight.narrow(cut.axis, cut.start, cut.end - cut.start)

    def stored(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> StoredTensor | None:
        """Return where a weight lies; None where it is packed."""
        return None if self._is_packed(name) else super().stored(name, shape, cut)

    def groups(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> QuantisedGroups | None:
        """Return one matrix in groups of 32; None where it is not packed so."""
        if not self._is_packed(name):
            return None
        groups = self._packed(name, shape).groups()
        return groups if groups is None or cut is None else _slice_groups(groups, cut)

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and super().has(_sibling(name, self._scheme.packed_name))

    def _packed(self, name: str, shape: tuple[int, ...]) -> PackedMatrix:
        self.check(name, shape)
        packed = self._scheme.read(lambda part: self._read(self._stored[_sibling(name, part)]))
        group_of, groups = packed.group_of, packed.scales.shape[1]
        if group_of is not None and not 0 <= group_of.min() <= group_of.max() < groups:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} has {groups} groups, g_idx names others"
            )
        return packed


def _slice_groups(groups: QuantisedGroups, cut: WeightSlice) -> QuantisedGroups | None:
    """Return a slice of a matrix; None where it does not end between groups."""
    per_group = 1 if cut.axis == 0 else GROUP_WEIGHTS
    if cut.start % per_group or cut.end % per_group:
        return None
    start, length = cut.start // per_group, (cut.end - cut.start) // per_group
    return replace(
        groups,
        numbers=groups.numbers.narrow(cut.axis, cut.start, cut.end - cut.start).contiguous(),
        scales=groups.scales.narrow(cut.axis, start, length),
        offsets=groups.offsets.narrow(cut.axis, start, length),
    )


def _sibling(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def _scheme(folder: Path, config: QuantisationConfig) -> PackingScheme:
    """Return how the matrices are packed; raise CheckpointError for an unknown scheme."""
    method = f"{config.quant_method!r} {config.format}".strip()
    scheme = None
    if config.quant_method == "compressed-tensors" and config.format == "pack-quantized":
        scheme = _compressed(config)
    elif config.quant_method == "gptq" and config.checkpoint_format in ("gptq", "gptq_v2"):
        is_version_1 = config.checkpoint_format == "gptq"
        scheme = PackingScheme(
            "gptq", config.bits, max(config.group_size, 0), zeros_less_one=is_version_1
        )
    elif config.quant_method == "awq" and config.version.lower() == "gemm" and config.bits == 4:
        # Models without zero points store zeros in the middle of the range.
        scheme = PackingScheme("awq", 4, max(config.group_size, 0))
    if scheme is None or scheme.bits not in (4, 8):
        raise CheckpointError(
            f"cannot load {folder}: quantisation {method} of {config.bits or 'these'} bits is"
            " unknown; compressed-tensors' pack-quantized, gptq (4 or 8 bits) and awq (gemm, 4"
            " bits) are supported, with float activations"
        )
    return scheme


def _compressed(config: QuantisationConfig) -> PackingScheme | None:
    """Return the scheme that all config groups share; None unless there is exactly one."""
    found = {
        (weights.num_bits, weights.type, weights.symmetric, weights.strategy, weights.group_size)
        for group in config.config_groups.values()
        if (weights := group.weights) is not None
        and group.input_activations is None
        # With activation order, the columns of a group are not neighbours.
        and weights.actorder in (None, False, "weight", "static")
    }
    if len(found) != 1 or len(config.config_groups) == 0:
        return None
    ((bits, kind, symmetric, strategy, group),) = found
    if kind != "int" or strategy not in ("group", "channel"):
        return None
    columns = (group or 0) if strategy == "group" else 0
    return PackingScheme("compressed", bits, columns, zeros=not symmetric)

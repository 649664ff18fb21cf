"""A Hugging Face folder whose matrices are quantised: what its config says, and reading them.

Unknown schemes are refused by name: their numbers would be read as other weights.
"""

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from nodeagent.engine.distributed.shards import Cut
from nodeagent.engine.kernels.cpu.matrix_layouts import GROUP_WEIGHTS
from nodeagent.engine.model.layers.linear import Groups
from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.hf_config import read_json
from nodeagent.engine.weights.quantised_layouts import Packed, Scheme
from nodeagent.engine.weights.safetensors import FLOATS, INTEGERS, SafetensorsFolder
from nodeagent.engine.weights.stored_tensor import Stored

log = logging.getLogger(__name__)


class _Weights(msgspec.Struct):
    num_bits: int = 0
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    actorder: Any = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    input_activations: Any = None


class Quantisation(msgspec.Struct):
    """`quantization_config` of all methods together."""

    quant_method: str = ""
    format: str = ""
    config_groups: dict[str, _Group] = {}
    bits: int = 0
    group_size: int = 0
    checkpoint_format: str = "gptq"
    version: str = "gemm"
    zero_point: bool = True


class _Config(msgspec.Struct):
    quantization_config: Quantisation | None = None


def quantisation_of(folder: Path) -> Quantisation | None:
    """Return what the folder's config says of its matrices; None where they are floats."""
    config: _Config = read_json(folder / "config.json", _Config)
    return config.quantization_config


class QuantisedFolder(SafetensorsFolder):
    """A decoder's folder, some of whose matrices are packed."""

    def __init__(self, folder: Path, quantisation: Quantisation) -> None:
        self._scheme = _scheme(folder, quantisation)
        super().__init__(folder)
        log.info("quantised weights", extra={"fields": {"scheme": str(self._scheme)}})

    def filed_bits(self) -> Counter[int]:
        """Return how many weights there are of so many bits: see `layers.linear.bytes_kept`."""
        counts = super().filed_bits()
        bits = self._scheme.bits if self._scheme.group % GROUP_WEIGHTS == 0 else 32
        for name, stored in self._stored.items():
            if name.endswith(f".{self._scheme.mark}"):
                words = math.prod(stored.shape)
                counts[32] -= words
                counts[bits] += words * 32 // self._scheme.bits
        return counts

    def has(self, name: str) -> bool:
        """True where the files hold `name`, packed or not."""
        return super().has(name) or self._is_packed(name)

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
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

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Tensor:
        """Read one weight, or a part of it; in fp32 where it is packed."""
        if not self._is_packed(name):
            return super().tensor(name, shape, cut)
        wide = self._packed(name, shape).wide()
        return wide if cut is None else wide.narrow(cut.axis, cut.start, cut.end - cut.start)

    def stored(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Stored | None:
        """Return where a weight lies that is not packed."""
        return None if self._is_packed(name) else super().stored(name, shape, cut)

    def groups(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Groups | None:
        """Read one matrix in the groups that kernels know; None where it is not packed so."""
        if not self._is_packed(name):
            return None
        groups = self._packed(name, shape).groups()
        return groups if groups is None or cut is None else _part(groups, cut)

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and super().has(_sibling(name, self._scheme.mark))

    def _packed(self, name: str, shape: tuple[int, ...]) -> Packed:
        self.check(name, shape)

        packed = self._scheme.read(lambda part: self._read(self._stored[_sibling(name, part)]))
        group_of, groups = packed.group_of, packed.scales.shape[1]
        if group_of is not None and not 0 <= group_of.min() <= group_of.max() < groups:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} has {groups} groups, g_idx names others"
            )
        return packed


def _part(groups: Groups, cut: Cut) -> Groups | None:
    """Return a part of a matrix; None where it ends within a group."""
    per_group = 1 if cut.axis == 0 else GROUP_WEIGHTS
    if cut.start % per_group or cut.end % per_group:
        return None
    at, length = cut.start // per_group, (cut.end - cut.start) // per_group
    return replace(
        groups,
        numbers=groups.numbers.narrow(cut.axis, cut.start, cut.end - cut.start).contiguous(),
        scales=groups.scales.narrow(cut.axis, at, length),
        offsets=groups.offsets.narrow(cut.axis, at, length),
    )


def _sibling(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def _scheme(folder: Path, config: Quantisation) -> Scheme:
    """Return how the matrices are packed, or refuse what would be read wrongly."""
    what = f"{config.quant_method!r} {config.format}".strip()
    scheme = None
    if config.quant_method == "compressed-tensors" and config.format == "pack-quantized":
        scheme = _compressed(config)
    elif config.quant_method == "gptq" and config.checkpoint_format in ("gptq", "gptq_v2"):
        less_one = config.checkpoint_format == "gptq"
        scheme = Scheme("gptq", config.bits, max(config.group_size, 0), zeros_less_one=less_one)
    elif config.quant_method == "awq" and config.version.lower() == "gemm" and config.bits == 4:
        # Without zero points they are stored all the same, in the middle of the numbers.
        scheme = Scheme("awq", 4, max(config.group_size, 0))
    if scheme is None or scheme.bits not in (4, 8):
        raise CheckpointError(
            f"cannot load {folder}: quantisation {what} of {config.bits or 'these'} bits is"
            " unknown; compressed-tensors' pack-quantized, gptq (4 or 8 bits) and awq (gemm, 4"
            " bits) are supported, with float activations"
        )
    return scheme


def _compressed(config: Quantisation) -> Scheme | None:
    """Return the one scheme of all config groups; None where there is none, or several."""
    found = {
        (one.num_bits, one.type, one.symmetric, one.strategy, one.group_size)
        for group in config.config_groups.values()
        if (one := group.weights) is not None
        and group.input_activations is None
        # Where groups follow the order of activations, columns are not side by side.
        and one.actorder in (None, False, "weight", "static")
    }
    if len(found) != 1 or len(config.config_groups) == 0:
        return None
    ((bits, kind, symmetric, strategy, group),) = found
    if kind != "int" or strategy not in ("group", "channel"):
        return None
    columns = (group or 0) if strategy == "group" else 0
    return Scheme("compressed", bits, columns, zeros=not symmetric)

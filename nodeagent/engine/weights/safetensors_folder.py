"""Reads a Hugging Face folder: config.json, and one or many *.safetensors files."""

import math
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.distributed.shards import WeightSlice
from nodeagent.engine.weights.hf_config import DecoderConfig, read_json, shape_of
from nodeagent.engine.weights.stored_tensor import StoredTensor, check_regular_file, stored_tensors
from nodeagent.engine.weights.weight_source import WeightSource

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_HALVES: Final = frozenset({"F16", "BF16"})
INTEGERS: Final = frozenset({"I64", "I32"})


class SafetensorsFiles(WeightSource):
    """The weights of a folder, in one file or in the files of an index."""

    def __init__(self, folder: Path, name: str = "model.safetensors") -> None:
        self._folder = folder
        self._name = name
        self._files: dict[Path, int] = {}
        self._stored: dict[str, StoredTensor] = {}
        with ExitStack() as opened:
            for name in self._file_names():
                self._open(folder / name, opened)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def names(self) -> list[str]:
        """Return the names of all weights."""
        return list(self._stored)

    def filed_bits(self) -> Counter[int]:
        """Return the number of weights by their size in the file; see `LinearBackend`."""
        counts: Counter[int] = Counter()
        for stored in self._stored.values():
            counts[16 if stored.kind in _HALVES else 32] += math.prod(stored.shape)
        return counts

    def has(self, name: str) -> bool:
        """Return whether the files hold `name`."""
        return name in self._stored

    def check(self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None) -> None:
        """Raise CheckpointError where `name` is missing, misshapen, or not a float."""
        self._check(name, shape, FLOATS, "a float")

    def integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a tensor of integers."""
        return self._read(self._check(name, shape, INTEGERS, "an integer")).long()

    def _check(
        self, name: str, shape: tuple[int, ...], kinds: frozenset[str], expected: str
    ) -> StoredTensor:
        stored = self._stored.get(name)
        if stored is None:
            raise CheckpointError(f"cannot read {self._folder}: it lacks {name}")
        if stored.shape != shape:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {stored.shape}, {shape} is expected"
            )
        if stored.kind not in kinds:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {stored.kind}, {expected} is expected"
            )
        return stored

    def stored(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> StoredTensor | None:
        """Return where a weight, or a slice of it, lies; None where that is not contiguous."""
        stored = self._check(name, shape, FLOATS, "a float")
        if cut is None:
            return stored
        return stored.rows(cut.start, cut.end) if cut.axis == 0 else None

    def tensor(
        self, name: str, shape: tuple[int, ...], cut: WeightSlice | None = None
    ) -> torch.Tensor:
        """Read one weight, or a slice of it, in the dtype it is stored in."""
        stored = self.stored(name, shape, cut)
        if stored is not None or cut is None:
            return self._read(stored or self._stored[name])
        return self._read(self._stored[name]).narrow(cut.axis, cut.start, cut.end - cut.start)

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        return stored.read(self._files[stored.path])

    def _open(self, path: Path, opened: ExitStack) -> None:
        check_regular_file(path)
        try:
            # safe_open checks the header; `stored_tensors` then reads it without checks.
            with safe_open(path, framework="pt"):
                found = stored_tensors(path)
            self._files[path] = os.open(path, os.O_RDONLY)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        opened.callback(os.close, self._files[path])
        duplicate = next((name for name in found if name in self._stored), None)
        if duplicate is not None:
            raise CheckpointError(f"cannot read {path}: {duplicate!r} is in another file too")
        self._stored |= found

    def _file_names(self) -> list[str]:
        index = self._folder / f"{self._name}.index.json"
        if not index.exists():
            return [self._name]
        names = read_json(index, dict[str, Any]).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"cannot read {index}: no weight_map")
        files = sorted({str(name) for name in names.values()})
        for name in files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"cannot read {index}: {name!r} is not a .safetensors file of this folder"
                )
        return files


class SafetensorsFolder(SafetensorsFiles):
    """The weights, the config and the shape of a decoder."""

    def __init__(self, folder: Path) -> None:
        self.config: DecoderConfig = read_json(folder / "config.json", DecoderConfig)
        self.shape = shape_of(folder, self.config)
        super().__init__(folder)

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

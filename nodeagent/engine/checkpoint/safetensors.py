"""A Hugging Face folder: config.json, and one or many *.safetensors files."""

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from nodeagent.engine.checkpoint.config import DecoderConfig, read_json, shape_of
from nodeagent.engine.checkpoint.stored import Stored, places
from nodeagent.engine.models.shape import CheckpointError
from nodeagent.engine.models.weights import WeightSource
from nodeagent.engine.parallel.share import Cut
from nodeagent.engine.vocabulary import Vocabulary, vocabulary_of_folder

FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_HALVES: Final = frozenset({"F16", "BF16"})
INTEGERS: Final = frozenset({"I64", "I32"})


class SafetensorsFiles(WeightSource):
    """The weights of one Hugging Face folder, in one file or in those of an index."""

    def __init__(self, folder: Path, name: str = "model.safetensors") -> None:
        self._folder = folder
        self._name = name
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._places: dict[Path, dict[str, Stored]] = {}
        try:
            for name in self._file_names():
                self._open(folder / name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """Return the names of all weights."""
        return list(self._files)

    def filed_bits(self) -> Counter[int]:
        """Return how many weights there are of so many bits: see `layers.linear.bytes_kept`."""
        counts: Counter[int] = Counter()
        for name, file in self._files.items():
            stored = file.get_slice(name)
            counts[16 if stored.get_dtype() in _HALVES else 32] += math.prod(stored.get_shape())
        return counts

    def has(self, name: str) -> bool:
        """True where the files hold `name`."""
        return name in self._files

    def check(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> None:
        """Raise CheckpointError where `name` is missing, of another shape, or no float."""
        self._check(name, shape, FLOATS, "a float")

    def integers(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a table of whole numbers."""
        self._check(name, shape, INTEGERS, "a whole number")
        numbers: torch.Tensor = self._files[name].get_tensor(name).long()
        return numbers

    def _check(self, name: str, shape: tuple[int, ...], kinds: frozenset[str], wanted: str) -> None:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"cannot read {self._folder}: it lacks {name}")
        stored = file.get_slice(name)
        found = tuple(stored.get_shape())
        if found != shape:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {found}, {shape} is expected"
            )
        if stored.get_dtype() not in kinds:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {stored.get_dtype()}, {wanted} is expected"
            )

    def stored(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> Stored | None:
        """Return where a weight lies, or a part of it; None where that is not in one piece."""
        self.check(name, shape)
        path = self._paths[name]
        if path not in self._places:
            self._places[path] = places(path)
        stored = self._places[path][name]
        if cut is None:
            return stored
        row_bytes = math.prod(shape[1:]) * stored.dtype.itemsize
        return (
            replace(stored, start=stored.start + cut.start * row_bytes) if cut.axis == 0 else None
        )

    def tensor(self, name: str, shape: tuple[int, ...], cut: Cut | None = None) -> torch.Tensor:
        """Read one weight as it is stored, or a part of it."""
        self.check(name, shape)
        if cut is None:
            weights: torch.Tensor = self._files[name].get_tensor(name)
        else:
            before = (slice(None),) * cut.axis
            weights = self._files[name].get_slice(name)[(*before, slice(cut.start, cut.end))]
        return weights

    def _open(self, path: Path) -> None:
        try:
            opened = self._stack.enter_context(safe_open(path, framework="pt"))
            names = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        twice = next((name for name in names if name in self._files), None)
        if twice is not None:
            raise CheckpointError(f"cannot read {path}: {twice!r} is in another file too")
        self._files.update(dict.fromkeys(names, opened))
        self._paths.update(dict.fromkeys(names, path))

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
                raise CheckpointError(f"cannot read {index}: {name!r} is no file of this folder")
        return files


class SafetensorsFolder(SafetensorsFiles):
    """A decoder's folder: its weights and its shape."""

    def __init__(self, folder: Path) -> None:
        self.config: DecoderConfig = read_json(folder / "config.json", DecoderConfig)
        self.shape = shape_of(folder, self.config)
        super().__init__(folder)

    def vocabulary(self) -> Vocabulary:
        """Read the tokenizer beside the weights."""
        return vocabulary_of_folder(self._folder, self.config)

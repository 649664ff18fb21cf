"""A model in one GGUF file, or in the parts that it was split into: their headers as one.

Parts are named as llama.cpp names them, NAME-00001-of-00003.gguf. The first says what the model is;
each holds whole tensors, and says which part of how many it is.
"""

import re
from pathlib import Path
from typing import Final

from nodeagent.engine.model.shape import CheckpointError
from nodeagent.engine.weights.gguf_header import GgufHeader, read_header

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def first_of(path: Path) -> Path:
    """Return the first of the parts that `path` is one of; `path` itself where it is no part."""
    name = _PART.fullmatch(path.name)
    return path.with_name(f"{name[1]}-00001-of-{name[3]}.gguf") if name else path


def read_whole(path: Path) -> GgufHeader:
    """Read the header of a file and of the parts that follow it, or raise CheckpointError."""
    header = read_header(path)
    said = header.metadata.get("split.count", 1)
    if said == 1:
        return header
    name = _PART.fullmatch(path.name)
    count = int(name[3]) if name else 0
    if name is None or said != count:
        raise CheckpointError(
            f"cannot read {path}: it is one of {said!r:.20} parts, which are named"
            " NAME-00001-of-00002.gguf and so on"
        )
    _check_number(path, header, 0, count)
    for number in range(1, count):
        part = path.with_name(f"{name[1]}-{number + 1:05}-of-{name[3]}.gguf")
        if not part.exists():
            raise CheckpointError(
                f"cannot read {path}: of its {count} parts, {part.name} is missing"
            )
        following = read_header(part)
        _check_number(part, following, number, count)
        twice = header.tensors.keys() & following.tensors.keys()
        if twice:
            raise CheckpointError(f"cannot read {part}: {min(twice)!r} is in another part too")
        header.tensors.update(following.tensors)
    wanted = header.metadata.get("split.tensors.count")
    if wanted != len(header.tensors):
        raise CheckpointError(
            f"cannot read {path}: its {count} parts hold {len(header.tensors)} tensors,"
            f" {wanted!r:.20} are expected"
        )
    return header


def _check_number(path: Path, header: GgufHeader, number: int, count: int) -> None:
    said = [header.metadata.get(f"split.{what}") for what in ("no", "count")]
    if said != [number, count]:
        raise CheckpointError(
            f"cannot read {path}: its name says part {number} of {count} (from 0 on), it says"
            f" {said!r:.80}"
        )

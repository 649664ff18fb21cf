"""Reads the headers of a GGUF model that is split into several files, as one header.

llama.cpp names the parts NAME-00001-of-00003.gguf. The first has the model's metadata. Each holds
whole tensors, its own number and the number of parts.
"""

import re
from pathlib import Path
from typing import Final

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.gguf_header import GgufHeader, read_header

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def first_part(path: Path) -> Path:
    """Return the first part of the model of which `path` is a part; `path` if it is not split."""
    name = _PART.fullmatch(path.name)
    return path.with_name(f"{name[1]}-00001-of-{name[3]}.gguf") if name else path


def read_all_headers(path: Path) -> GgufHeader:
    """Read the header of a file and of all further parts, or raise CheckpointError."""
    header = read_header(path)
    parts = header.metadata.get("split.count", 1)
    if parts == 1:
        return header
    name = _PART.fullmatch(path.name)
    count = int(name[3]) if name else 0
    if name is None or parts != count:
        raise CheckpointError(
            f"cannot read {path}: it is one of {parts!r:.20} parts, which must be named"
            " NAME-00001-of-00002.gguf and so on"
        )
    _check_part_number(path, header, 0, count)
    for number in range(1, count):
        part = path.with_name(f"{name[1]}-{number + 1:05}-of-{name[3]}.gguf")
        if not part.exists():
            raise CheckpointError(
                f"cannot read {path}: {part.name}, one of its {count} parts, is missing"
            )
        following = read_header(part)
        _check_part_number(part, following, number, count)
        duplicates = header.tensors.keys() & following.tensors.keys()
        if duplicates:
            raise CheckpointError(f"cannot read {part}: {min(duplicates)!r} is in another part too")
        header.tensors.update(following.tensors)
    expected = header.metadata.get("split.tensors.count")
    if expected != len(header.tensors):
        raise CheckpointError(
            f"cannot read {path}: its {count} parts hold {len(header.tensors)} tensors,"
            f" {expected!r:.20} are expected"
        )
    return header


def _check_part_number(path: Path, header: GgufHeader, number: int, count: int) -> None:
    numbers = [header.metadata.get(f"split.{key}") for key in ("no", "count")]
    if numbers != [number, count]:
        raise CheckpointError(
            f"cannot read {path}: by its name it is part {number} of {count} (from 0), by its"
            f" metadata {numbers!r:.80}"
        )

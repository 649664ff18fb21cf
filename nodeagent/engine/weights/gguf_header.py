"""Reads the header of a GGUF file (metadata and tensor table), checking every length before use.

The reader of the `gguf` package takes seconds for a vocabulary of 50,000 and trusts the lengths in
the file. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Final

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.weights.stored_tensor import check_regular_file

_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING: Final = 8
_ARRAY: Final = 9
_U32: Final = _SCALARS[4]
_U64: Final = _SCALARS[10]

_KEYS_MAX: Final = 65_536
_TENSORS_MAX: Final = 65_536
_DIMENSIONS_MAX: Final = 4
_NAME_BYTES_MAX: Final = 65_535
_SHORT_ARRAY_ITEMS: Final = 1024
"""Arrays that say something of each layer, and none of each token, have at most this many items."""
_ITEMS_MAX: Final = 8 * 1024 * 1024
"""Array items of a file. A vocabulary has a few hundred thousand; each becomes a Python object."""
_TEXT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of all strings of a file. Strings are copied, and a sparse file may have terabytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of one tensor in the file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """In torch's order: rows first."""
    kind: int
    """A `GGMLQuantizationType`."""
    start: int
    """Offset in the file in bytes."""

    @property
    def size_bytes(self) -> int:
        """The size in the file. Raises CheckpointError for an unknown type."""
        try:
            group, group_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.kind)]
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"cannot read {self.path}: {self.name} has unknown type {self.kind}"
            ) from error
        if self.shape[-1] % group:
            raise CheckpointError(
                f"cannot read {self.path}: {self.name}'s rows of {self.shape[-1]} are no multiple"
                f" of {group}"
            )
        return int(math.prod(self.shape) // group * group_bytes)


@dataclass(frozen=True, slots=True)
class PackedStrings:
    """An array of strings, decoded when read.

    Decoding a vocabulary takes most of the time of a header, and weights need not wait for it.
    """

    path: Path
    what: str
    """The metadata key, for errors."""
    packed: bytes
    """The strings, each preceded by its length."""
    ends: list[int]
    """The end of each string in `packed`."""

    def read(self) -> list[str]:
        """Return the strings; raise CheckpointError where one is not UTF-8."""
        packed, length = self.packed, _U64.size
        try:
            return [packed[at + length : end].decode() for at, end in pairwise([0, *self.ends])]
        except UnicodeDecodeError as error:
            raise CheckpointError(f"cannot read {self.path}: {self.what} is not UTF-8") from error


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata, and the tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def without_vocabulary(self) -> "GgufHeader":
        """Return the header with what weights need: without long arrays."""
        short = {
            key: value
            for key, value in self.metadata.items()
            if not isinstance(value, PackedStrings)
            and not (isinstance(value, list) and len(value) > _SHORT_ARRAY_ITEMS)
        }
        return GgufHeader(short, self.tensors)


class KnownHeader:
    """The header of a model whose files were read before, to open them again.

    Reading it takes as long as reading the weights of a small model, most of it for the vocabulary.
    """

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path = path
        self.header = header.without_vocabulary()
        self._stamps = self._read_stamps()

    def is_current(self) -> bool:
        """Return whether the files are still those that were read."""
        try:
            return self._read_stamps() == self._stamps
        except OSError:
            return False

    def _read_stamps(self) -> list[tuple[int, int, int]]:
        parts = {self.path, *(entry.path for entry in self.header.tensors.values())}
        stats = [part.stat() for part in sorted(parts)]
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]


class _HeaderCursor:
    """Reads forward through the file; raises CheckpointError instead of passing its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = len(data)
        self.items_left = _ITEMS_MAX
        self.text_bytes_left = _TEXT_BYTES_MAX

    def skip(self, length: int, what: str) -> int:
        start = self.at
        if length > self.end - start:
            raise CheckpointError(
                f"cannot read {self.path}: {what} claims {length} bytes at {start},"
                f" the file ends at {self.end}"
            )
        self.at = start + length
        return start

    def number(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self.data, self.skip(layout.size, what))[0]

    def string(self, what: str, bytes_max: int = _TEXT_BYTES_MAX) -> str:
        length = self.number(_U64, what)
        start = self.skip(length, what)
        if length > bytes_max:
            raise CheckpointError(f"cannot read {self.path}: {what} takes {length} bytes")
        self._take_text(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"cannot read {self.path}: {what} is not UTF-8") from error

    def name(self, what: str) -> str:
        name = self.string(what, _NAME_BYTES_MAX)
        if not name:
            raise CheckpointError(f"cannot read {self.path}: {what} is empty")
        return name

    def _take_text(self, length: int, what: str) -> None:
        self.text_bytes_left -= length
        if self.text_bytes_left < 0:
            raise CheckpointError(
                f"cannot read {self.path}: {what} ends after more than {_TEXT_BYTES_MAX} bytes of"
                " text, which is the limit"
            )

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise CheckpointError(f"cannot read {self.path}: {what} has unknown type {kind}")
        return self.number(layout, what)

    def _array(self, what: str) -> list[Any] | PackedStrings:
        kind = self.number(_U32, what)
        count = self.number(_U64, what)
        self.items_left -= count
        if self.items_left < 0:
            raise CheckpointError(
                f"cannot read {self.path}: {what} claims {count} items, at most {_ITEMS_MAX} in"
                " all are supported"
            )
        layout = _SCALARS.get(kind)
        if layout is not None:
            start = self.skip(count * layout.size, what)
            view = memoryview(self.data)[start : self.at]
            try:
                return [item for (item,) in layout.iter_unpack(view)]
            finally:
                view.release()
        if kind != _STRING:
            raise CheckpointError(f"cannot read {self.path}: {what} is an array of type {kind}")
        return self._strings(count, what)

    def _strings(self, count: int, what: str) -> PackedStrings:
        """Skip `count` strings, noting where each ends. A tight loop: a vocabulary has 100,000."""
        data, start = self.data, self.at
        at, last, length_at = 0, self.end - start - _U64.size, _U64.unpack_from
        ends: list[int] = []
        for _ in repeat(None, count):
            if at > last:
                break
            at += _U64.size + length_at(data, start + at)[0]
            ends.append(at)
        else:
            if start + at <= self.end:
                self._take_text(at, what)
                self.at = start + at
                return PackedStrings(self.path, what, data[start : self.at], ends)
        raise CheckpointError(
            f"cannot read {self.path}: {what} claims {count} strings, the file ends at {self.end}"
        )


def read_header(path: Path) -> GgufHeader:
    """Read the metadata and the tensor table of one file, or raise CheckpointError."""
    check_regular_file(path)
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise CheckpointError(f"cannot read {path}: the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # Read the pages ahead, instead of one page fault at a time.
            data.madvise(mmap.MADV_WILLNEED)
            return _read(path, data)


def _read(path: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _HeaderCursor(path, data)
    start = cursor.skip(4, "magic")
    if data[start : start + 4] != b"GGUF":
        raise CheckpointError(f"cannot read {path}: not a GGUF file")
    version = cursor.number(_U32, "version")
    if version not in (2, 3):
        raise CheckpointError(
            f"cannot read {path}: GGUF version {version}; versions 2 and 3 are supported"
        )
    tensor_count = cursor.number(_U64, "tensor count")
    key_count = cursor.number(_U64, "key count")
    if tensor_count > _TENSORS_MAX or key_count > _KEYS_MAX:
        raise CheckpointError(
            f"cannot read {path}: it claims {tensor_count} tensors and {key_count} keys"
        )
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.name("a metadata key")
        if key in metadata:
            raise CheckpointError(f"cannot read {path}: {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number(_U32, key), key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 65_536:
        raise CheckpointError(f"cannot read {path}: general.alignment is {alignment!r}")
    found = [_read_entry(cursor) for _ in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, tensor_kind, offset in found:
        if name in tensors:
            raise CheckpointError(f"cannot read {path}: {name!r} occurs twice")
        tensors[name] = TensorEntry(path, name, shape, tensor_kind, data_start + offset)
    _check_extents(path, tensors.values(), len(data))
    return GgufHeader(metadata, tensors)


def _read_entry(cursor: _HeaderCursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return a tensor's name, shape, type, and offset relative to the data section."""
    name = cursor.name("a tensor's name")
    count = cursor.number(_U32, name)
    if not 1 <= count <= _DIMENSIONS_MAX:
        raise CheckpointError(f"cannot read {cursor.path}: {name} has {count} dimensions")
    dimensions = [cursor.number(_U64, name) for _ in range(count)]
    if min(dimensions) < 1:
        raise CheckpointError(f"cannot read {cursor.path}: {name} has a dimension of 0")
    kind = cursor.number(_U32, name)
    return name, tuple(reversed(dimensions)), kind, cursor.number(_U64, name)


def _check_extents(path: Path, entries: Iterable[TensorEntry], end: int) -> None:
    """Raise CheckpointError where tensors pass the end of the file or overlap."""
    ordered = sorted(entries, key=lambda entry: entry.start)
    for entry in ordered:
        if entry.start + entry.size_bytes > end:
            raise CheckpointError(f"cannot read {path}: {entry.name} lies past its end")
    for entry, following in pairwise(ordered):
        if entry.start + entry.size_bytes > following.start:
            raise CheckpointError(f"cannot read {path}: {entry.name} and {following.name} overlap")

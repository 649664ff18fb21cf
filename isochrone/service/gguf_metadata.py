"""Reads what a GGUF file says of its model, to size its KV cache. The weights are not read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

MAGIC: Final = b"GGUF"
KEYS_MAX: Final = 10_000
STRING_BYTES_MAX: Final = 4 * 1024 * 1024
"""A chat template has up to 30 kB."""
ARRAY_ITEMS_MAX: Final = 8 * 1024 * 1024
"""The vocabulary is the longest array: some 256,000 items."""
NUMBERS: Final = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i"},
    **{6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"},
}
"""The format of struct for each type number."""
STRING: Final = 8
ARRAY: Final = 9

Scalar = int | float | bool | str
Metadata = dict[str, Scalar | list[int]]


class GgufError(Exception):
    """A file is no GGUF file, or says too little of its model."""


class AttentionSize(msgspec.Struct, frozen=True, kw_only=True):
    """The values that a model caches for each token, over all layers."""

    keys: int
    values: int


def attention_size(path: Path) -> AttentionSize:
    """Return how many values a model caches per token. Raises GgufError. Blocks."""
    metadata = read_metadata(path)
    architecture = metadata.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        value = metadata.get(f"{architecture}.{name}", default)
        return value if isinstance(value, int) else default

    layers, heads = number("block_count"), number("attention.head_count")
    latent = number("attention.kv_lora_rank")
    if latent:
        # Multi-head latent attention caches one vector per token, which holds keys and values.
        size = latent + number("rope.dimension_count")
        return AttentionSize(keys=layers * size, values=0)
    per_layer = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    kv_heads = sum(per_layer) if isinstance(per_layer, list) else layers * int(per_layer)
    head_size = number("embedding_length") // heads if heads else 0
    keys = number("attention.key_length", head_size)
    values = number("attention.value_length", head_size)
    if kv_heads <= 0 or keys <= 0 or values <= 0:
        raise GgufError(f"cannot size the KV cache: {path.name} has no dimensions of its attention")
    return AttentionSize(keys=kv_heads * keys, values=kv_heads * values)


def read_metadata(path: Path) -> Metadata:
    """Return the numbers, texts and short arrays of numbers of a file's header.

    Raises GgufError.
    """
    try:
        with path.open("rb") as file:
            return _read_header(file, path.name)
    except OSError as error:
        raise GgufError(f"cannot read {path.name}: {error.strerror}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise GgufError(f"cannot read {path.name}: its header ends early or is damaged") from error


def _read_header(file: BinaryIO, name: str) -> Metadata:
    if file.read(4) != MAGIC:
        raise GgufError(f"cannot read {name}: it is no GGUF file")
    version, _tensors, keys = _unpack(file, "<IQQ")
    if version not in (2, 3) or keys > KEYS_MAX:
        raise GgufError(f"cannot read {name}: GGUF version {version} with {keys} keys")
    found: Metadata = {}
    for _ in range(int(keys)):
        key = _string(file)
        (kind,) = _unpack(file, "<I")
        value = _value(file, int(kind))
        if value is not None:
            found[key] = value
    return found


def _value(file: BinaryIO, kind: int) -> Scalar | list[int] | None:
    """Return a value, or None for an array that is not of integers."""
    if kind == STRING:
        return _string(file)
    if kind != ARRAY:
        return _unpack(file, "<" + _format(kind))[0]
    item_kind, count = _unpack(file, "<IQ")
    if count > ARRAY_ITEMS_MAX:
        raise GgufError(f"cannot read an array of {count} items")
    if item_kind == STRING:
        for _ in range(int(count)):
            (size,) = _unpack(file, "<Q")
            file.seek(_limited(int(size)), 1)
        return None
    item = _format(int(item_kind))
    if item in "fd?" or count > KEYS_MAX:
        file.seek(struct.calcsize("<" + item) * int(count), 1)
        return None
    return [int(number) for number in _unpack(file, f"<{count}{item}")]


def _format(kind: int) -> str:
    if kind not in NUMBERS:
        raise GgufError(f"cannot read a value of type {kind}")
    return NUMBERS[kind]


def _string(file: BinaryIO) -> str:
    (size,) = _unpack(file, "<Q")
    return file.read(_limited(int(size))).decode()


def _limited(size: int) -> int:
    if size > STRING_BYTES_MAX:
        raise GgufError(f"cannot read a text of {size} bytes")
    return size


def _unpack(file: BinaryIO, form: str) -> tuple[int | float, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))

"""Reads the two files of a LoRA adapter without its weights: the config, and the tensors' shapes.

Both files are untrusted. This module reads no more than the given bytes, and checks every offset.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from isochrone.wire.codec import describe

CONFIG_BYTES_MAX: Final = 1024 * 1024
TENSORS_MAX: Final = 40_000
"""An adapter of 100 layers has some 1,400 tensors, one of all experts of Qwen3-30B-A3B 37,248. One
of a larger model has more, and more bytes than a file may have by default. Decoding a header holds
Python's lock, which the event loop waits for: 190,000 tensors stalled it for 110 ms, and 1,600,000
entries that are none for a second."""

HEADER_BYTES_MAX: Final = 8 * 1024 * 1024
"""The longest header of a safetensors file: a tensor takes some 150 bytes of it."""

COLONS_MAX: Final = 4 * TENSORS_MAX + 1_000
"""Colons of a header: a tensor has four, its metadata some."""

LENGTH_BYTES: Final = 8
AXES_MAX: Final = 8
"""More than a tensor has. The product of a million large numbers takes many minutes."""

TENSOR_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
INIT_KEEPS_BASE: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights unchanged; PiSSA and others do not."""


class BadAdapter(ValueError):
    """The files are not those of a usable adapter; the message says why."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """The fields of `adapter_config.json` that decide whether an adapter can be used."""

    peft_type: str
    r: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    lora_alpha: float
    target_modules: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None
    use_bdlora: Any = None
    init_lora_weights: Any = True

    def unsupported(self) -> list[str]:
        """Return the features that it needs and the engines here lack."""
        kept = self.init_lora_weights in INIT_KEEPS_BASE
        needs = {
            "use_dora": self.use_dora,
            "fan_in_fan_out": self.fan_in_fan_out,
            "bias": self.bias != "none",
            "modules_to_save": self.modules_to_save,
            "rank_pattern": self.rank_pattern,
            "alpha_pattern": self.alpha_pattern,
            "trainable_token_indices": self.trainable_token_indices,
            "layer_replication": self.layer_replication,
            "alora_invocation_tokens": self.alora_invocation_tokens,
            "use_bdlora": self.use_bdlora,
            f"init_lora_weights {self.init_lora_weights!r:.40}": not kept,
        }
        return [name for name, value in needs.items() if value]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=2**32)]], msgspec.Meta(max_length=AXES_MAX)
    ]
    data_offsets: tuple[
        Annotated[int, msgspec.Meta(ge=0, le=2**53)], Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    ]


TensorShapes = Mapping[str, tuple[int, ...]]

_CONFIG: Final = msgspec.json.Decoder(AdapterConfig)
_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR: Final = msgspec.json.Decoder(_Tensor)


def read_adapter_config(body: bytes) -> AdapterConfig:
    """Return the config. Raises BadAdapter, also for features that no engine here has."""
    try:
        config = _CONFIG.decode(body)
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"cannot read adapter_config.json: {describe(error)}") from error
    if config.peft_type != "LORA":
        raise BadAdapter(f"cannot use a {config.peft_type[:40]!r} adapter: expected 'LORA'")
    if not math.isfinite(config.lora_alpha):
        raise BadAdapter("cannot use the adapter: its lora_alpha is not a number")
    used = ", ".join(config.unsupported())
    if used:
        raise BadAdapter(f"cannot use the adapter: it needs {used}, which is not supported")
    return config


def header_length(start: bytes) -> int:
    """Return the length of a safetensors header from the first 8 bytes. Raises BadAdapter."""
    if len(start) < LENGTH_BYTES:
        raise BadAdapter("cannot read the weights: the file ends within its header")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise BadAdapter(
            f"cannot read the weights: a header of {length} bytes, expected at most"
            f" {HEADER_BYTES_MAX}; this is no adapter in the safetensors format"
        )
    return length


def read_tensor_shapes(start: bytes, size_bytes: int) -> TensorShapes:
    """Return the shapes of all tensors, by name.

    `start` is the beginning of a file of `size_bytes`, at least to the end of its header. Raises
    BadAdapter, also if the tensors are not exactly what follows the header.
    """
    length = header_length(start)
    header = start[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(header) < length:
        raise BadAdapter("cannot read the weights: the file ends within its header")
    # Counted before it is decoded, and whatever the entries are.
    if header.count(b":") > COLONS_MAX:
        raise BadAdapter(f"cannot use the weights: they have more than {TENSORS_MAX} tensors")
    try:
        tensors = {
            name: _TENSOR.decode(raw)
            for name, raw in _HEADER.decode(header).items()
            if name != "__metadata__"
        }
    except (ValueError, RecursionError) as error:
        raise BadAdapter(f"cannot read the weights' header: {describe(error)}") from error
    end = 0
    # Sorted by a number, which takes a fifth of the time for pairs.
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets[0]):
        item_bytes = TENSOR_BYTES.get(tensor.dtype)
        if item_bytes is None:
            raise BadAdapter(
                f"cannot use tensor {name[:200]!r}: its type is {tensor.dtype[:20]!r}, expected one"
                f" of {', '.join(TENSOR_BYTES)}"
            )
        first, last = tensor.data_offsets
        if first != end or last - first != math.prod(tensor.shape) * item_bytes:
            raise BadAdapter(f"cannot use tensor {name[:200]!r}: its offsets do not fit its shape")
        end = last
    if LENGTH_BYTES + length + end != size_bytes:
        raise BadAdapter(
            f"cannot read the weights: the header describes {LENGTH_BYTES + length + end} bytes,"
            f" the file has {size_bytes}"
        )
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}

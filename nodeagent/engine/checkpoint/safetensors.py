"""A Hugging Face folder: config.json of the Llama family, and one or many *.safetensors files."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from nodeagent.engine.layers.rope import Llama3Scaling
from nodeagent.engine.models.shape import CheckpointError, ModelShape

_JSON_BYTES_MAX: Final = 64 * 1024 * 1024
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class RopeConfig(msgspec.Struct):
    """`rope_scaling`, or `rope_parameters` as newer files call it."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None


class LlamaConfig(msgspec.Struct):
    """The part of config.json that fixes a Llama's shape."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_scaling: RopeConfig | None = None
    rope_parameters: RopeConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None


def read_json(path: Path, kind: Any) -> Any:
    """Read a JSON file into `kind`, or raise CheckpointError."""
    try:
        if path.stat().st_size > _JSON_BYTES_MAX:
            raise CheckpointError(f"cannot read {path}: larger than {_JSON_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


class SafetensorsFolder:
    """The weights of one Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.config: LlamaConfig = read_json(folder / "config.json", LlamaConfig)
        self.shape = _shape(folder, self.config)
        self._stack = ExitStack()
        self._files = {}
        for name in self._file_names():
            try:
                opened = self._stack.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {folder / name}: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        """True where the files hold `name`."""
        return name in self._files

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Read one weight as it is stored."""
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"cannot read {self._folder}: it lacks {name}")
        stored = tuple(file.get_slice(name).get_shape())
        if stored != shape:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {stored}, {shape} is expected"
            )
        weights: torch.Tensor = file.get_tensor(name)
        if weights.dtype not in _FLOATS:
            raise CheckpointError(
                f"cannot read {self._folder}: {name} is {weights.dtype}, a float is expected"
            )
        return weights

    def _file_names(self) -> list[str]:
        index = self._folder / "model.safetensors.index.json"
        if not index.exists():
            return ["model.safetensors"]
        names = read_json(index, dict[str, Any]).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise CheckpointError(f"cannot read {index}: no weight_map")
        files = sorted({str(name) for name in names.values()})
        for name in files:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(f"cannot read {index}: {name!r} is no file of this folder")
        return files


def _shape(folder: Path, config: LlamaConfig) -> ModelShape:
    if config.model_type != "llama":
        raise CheckpointError(
            f"cannot load {folder}: model_type {config.model_type!r}, llama is supported"
        )
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise CheckpointError(
            f"cannot load {folder}: biases or activation {config.hidden_act!r} are unsupported"
        )
    if config.num_attention_heads < 1:
        raise CheckpointError(f"cannot load {folder}: no attention heads")
    rope = config.rope_parameters or config.rope_scaling or RopeConfig()
    return ModelShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        context_tokens=config.max_position_embeddings,
        rms_epsilon=config.rms_norm_eps,
        rope_theta=rope.rope_theta or config.rope_theta or 10_000.0,
        rope_scaling=_scaling(folder, rope, config.max_position_embeddings),
        tied_embeddings=config.tie_word_embeddings,
    )


def _scaling(folder: Path, rope: RopeConfig, context_tokens: int) -> Llama3Scaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(f"cannot load {folder}: rope scaling {kind!r} is unsupported")
    if rope.factor <= 0 or rope.low_freq_factor <= 0:
        raise CheckpointError(f"cannot load {folder}: rope scaling factors must be positive")
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(f"cannot load {folder}: rope high_freq_factor is not above the low")
    return Llama3Scaling(
        factor=rope.factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_context=rope.original_max_position_embeddings or context_tokens,
    )

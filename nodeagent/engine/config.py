"""The engine's configuration: one JSON file, checked once."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isochrone.service.config import ConfigError

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine process serves, where it listens, and its limits."""

    model_path: str
    served_name: str
    socket: str
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda:\d{1,3})$")] = "cpu"
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    threads: Annotated[int, Meta(ge=1, le=1024)] = 2
    kv_memory_bytes: Positive = 256 * 1024 * 1024
    context_tokens_max: Positive = 2048
    batch_tokens_max: Positive = 256
    """Tokens computed in one step at most: bounds how long a prompt can delay a decode."""
    sequences_max: Positive = 16
    waiting_max: Annotated[int, Meta(ge=0)] = 64
    body_bytes_max: Positive = 4 * 1024 * 1024
    client_queue_max: Positive = 1024
    """Tokens a client may be behind before it is cut."""
    client_stall_s: Seconds = 30.0
    """How long one write may wait for a client that does not read."""
    drain_s: Seconds = 30.0
    """How long SIGTERM waits for running generations."""
    stall_s: Seconds = 60.0
    """How long a step may take before /health says stalled."""


def read_config(path: Path) -> EngineConfig:
    """Read `path`, or raise ConfigError saying what is wrong with it."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"cannot use config {path}: {error}") from error
    if config.batch_tokens_max <= config.sequences_max:
        raise ConfigError(
            f"cannot use config {path}: batch_tokens_max {config.batch_tokens_max} must exceed"
            f" sequences_max {config.sequences_max}, so that every step has room for a prompt"
        )
    return config

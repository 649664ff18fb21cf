"""Reads the configuration of an engine: one JSON file, checked when it is read."""

from pathlib import Path

import msgspec

from isochrone.service.config import ConfigError
from isochrone.wire.engines.engine import EngineConfig


def read_config(path: Path) -> EngineConfig:
    """Read `path`; raises ConfigError if the file or a value in it is invalid."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot use config {path}: {error}") from error
    if config.batch_tokens_max <= config.sequences_max:
        raise ConfigError(
            f"cannot use config {path}: batch_tokens_max {config.batch_tokens_max} must exceed"
            f" sequences_max {config.sequences_max}, so that every step can take tokens of a prompt"
        )
    group = config.group
    if group is not None and config.pipeline_parallel % group.nodes:
        raise ConfigError(
            f"cannot use config {path}: pipeline_parallel {config.pipeline_parallel} must be a"
            f" multiple of the group's {group.nodes} nodes"
        )
    return config

"""Validates the RoPE scaling of a model file, whatever its format."""

import math
from pathlib import Path
from typing import Final

import msgspec

from nodeagent.engine.architecture.errors import CheckpointError
from nodeagent.engine.architecture.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)

_FACTOR_MAX: Final = 2**32


class RopeConfig(msgspec.Struct):
    """`rope_scaling` of config.json, or `rope_parameters`, its newer name."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def scaling_of(
    path: Path, rope: RopeConfig, theta: float, context_tokens: int
) -> tuple[RopeScaling | None, int]:
    """Return the scaling rule and the stretched context.

    `context_tokens` is the context in the rest of the file; with YaRN that may be the original one.
    Raises CheckpointError for unsupported kinds and unusable numbers.
    """
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None, context_tokens
    if kind == "linear":
        return LinearScaling(_positive(path, rope.factor)), context_tokens
    original = rope.original_max_position_embeddings or context_tokens
    if kind == "llama3":
        return _llama3(path, rope, original), context_tokens
    if kind == "yarn":
        scaling = _yarn(path, rope, theta, original, context_tokens)
        return scaling, scaling.context_tokens
    raise CheckpointError(f"cannot load {path}: rope scaling {kind!r} is unsupported")


def _llama3(path: Path, rope: RopeConfig, original: int) -> Llama3Scaling:
    factor, low = _positive(path, rope.factor), _positive(path, rope.low_freq_factor)
    if rope.high_freq_factor <= low:
        raise CheckpointError(f"cannot load {path}: rope high_freq_factor is not above the low")
    if not 0 < original < _FACTOR_MAX:
        raise CheckpointError(f"cannot load {path}: rope scaling of {original!r:.40} tokens")
    return Llama3Scaling(factor, low, rope.high_freq_factor, original)


def _positive(path: Path, factor: float | None) -> float:
    factor = 1.0 if factor is None else factor
    # The comparison is written so that NaN fails it.
    if not 0 < factor < _FACTOR_MAX:
        raise CheckpointError(f"cannot load {path}: rope scaling by a factor of {factor}")
    return factor


def _yarn(
    path: Path, rope: RopeConfig, theta: float, original: int, context_tokens: int
) -> YarnScaling:
    try:
        factor = context_tokens / max(original, 1) if rope.factor is None else rope.factor
        attention_factor = _attention_factor(rope, factor)
    except ArithmeticError as error:
        raise CheckpointError(f"cannot load {path}: rope scaling: {error}") from error
    scaling = YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=attention_factor,
        truncate=rope.truncate,
    )
    numbers = [factor, original, scaling.beta_fast, scaling.beta_slow, scaling.attention_factor]
    # The comparison is written so that NaN fails it.
    if theta < 2 or not all(1 / _FACTOR_MAX < number < _FACTOR_MAX for number in numbers):
        raise CheckpointError(f"cannot load {path}: rope scaling by {scaling}, theta {theta}")
    return scaling


def _attention_factor(rope: RopeConfig, factor: float) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    stretched = math.log(factor) if factor > 1 else 0.0
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * stretched + 1) / (0.1 * rope.mscale_all_dim * stretched + 1)
    return 0.1 * stretched + 1

"""Agent to engine: the file an engine is started with, and what it says of itself over HTTP.

An engine is a process that serves the OpenAI API on a Unix socket, and beside it `GET /health`
(EngineHealth), `GET /stats` (EngineStats), `GET /metrics` and `POST /drain`.
"""

from typing import Literal

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is told at its start, as JSON."""

    model_path: str
    served_name: str
    socket: str
    device: str = "cpu"
    threads: int = 1
    kv_memory_bytes: int = 512 * 1024 * 1024
    context_tokens_max: int = 4096
    batch_tokens_max: int = 512
    sequences_max: int = 32
    waiting_max: int = 256
    dtype: str = "float32"
    stall_s: float = 15.0
    drain_timeout_s: float = 30.0
    options: dict[str, str] = {}


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine makes progress, not merely whether it answers."""

    status: Literal["ok", "stalled", "draining", "failed"]
    model: str
    steps: int
    tokens_out: int
    last_step_age_s: float
    reason: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the engine is and how fast it has been measured to be."""

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    block_tokens: int = 16
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    tokens_out_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    steps_total: int = 0
    load_s: float = 0.0
    memory_bytes: int = 0

"""Agent to engine: the file an engine is started with, and what it says of itself over HTTP.

An engine is a process that serves the OpenAI API on a Unix socket, and beside it `GET /health`
(EngineHealth), `GET /stats` (EngineStats), `GET /metrics` and `POST /drain`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.assignment import ReplicaGroup

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Quantisation = Literal["auto", "file", "none"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine process serves, where it listens, and its limits.

    `batch_tokens_max` bounds one step. While answers are being written, prompts get only so much of
    it that the next tokens come within `interval_ms`.
    `quantisation` "file" keeps weights as their file packs them, where this device multiplies by
    them so, and rounds others: to 14 bits, or where our own kernels are not here to bf16 and fp16.
    "none" computes with each weight in full, and "auto" where our own kernels are not here.
    `kv_dtype` is what keys and values are kept in, `dtype` where it is empty; fp8 has a scale for
    each head of each token.
    KV that the device gives up is kept in `kv_host_bytes` of memory and `kv_file_bytes` of files
    below `kv_folder`; 0 is no such tier.
    `draft_tokens_max` is how many tokens of a sequence a step may verify ahead; 0 turns that off.
    `draft_path` names a model of the same tokens, or an EAGLE-3 head for this one, that drafts.
    The model is split over `tensor_parallel` times `pipeline_parallel` processes, each with its own
    device, counted up from `device`, and `threads`, `kv_memory_bytes` of its own: into stages of
    layers, and within a stage by heads and rows; a mixture's experts into `expert_parallel` groups.
    With `graphs` a GPU runs decodes as captured CUDA graphs, where the model allows it.
    With `group` they are on several nodes, as many on each. The one at place 0 listens and waits
    `join_s` for the others, which have no door: where their socket would be they leave an empty
    file once all have met.
    New requests are refused while the process's resident memory comes near `memory_max_bytes` (0 is
    no such ceiling), or its cgroup's near that one's limit.
    `client_queue_max` is how many tokens a client may be behind before it is cut. `options` are
    the mock's faults.
    """

    model_path: str
    served_name: str
    socket: str
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda:\d{1,3})$")] = "cpu"
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    quantisation: Quantisation = "auto"
    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    pipeline_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    expert_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    threads: Annotated[int, Meta(ge=1, le=1024)] = 2
    kv_dtype: Literal["", "fp32", "bf16", "fp16", "fp8"] = ""
    kv_memory_bytes: Positive = 256 * 1024 * 1024
    kv_host_bytes: Annotated[int, Meta(ge=0)] = 0
    kv_file_bytes: Annotated[int, Meta(ge=0)] = 0
    kv_folder: str = ""
    context_tokens_max: Positive = 2048
    batch_tokens_max: Positive = 256
    interval_ms: Positive = 250
    memory_max_bytes: Annotated[int, Meta(ge=0)] = 0
    sequences_max: Positive = 16
    graphs: bool = True
    draft_tokens_max: Annotated[int, Meta(ge=0, le=64)] = 8
    draft_path: str = ""
    waiting_max: Annotated[int, Meta(ge=0)] = 64
    body_bytes_max: Positive = 8 * 1024 * 1024
    client_queue_max: Positive = 1024
    adapters_max: Annotated[int, Meta(ge=1, le=4096)] = 8
    adapter_memory_bytes: Positive = 512 * 1024 * 1024
    client_stall_s: Seconds = 30.0
    drain_s: Seconds = 30.0
    join_s: Seconds = 1800.0
    stall_s: Seconds = 60.0
    group: ReplicaGroup | None = None
    options: dict[str, str] = {}


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the engine makes progress, not merely whether it answers."""

    status: Literal["ok", "stalled", "draining"]
    model: str
    steps: int
    tokens_out: int
    last_step_age_s: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the engine is and how fast it has been measured to be.

    `kind` is what its model is for: `chat`, `embedding` or `rerank`. `memory_full` says that new
    requests are refused until memory is given back.
    """

    kind: str = "chat"
    running: int = 0
    waiting: int = 0
    prefill_tokens_in_flight: int = 0
    decode_tokens_in_flight: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    block_tokens: int = 16
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    tokens_out_total: int = 0
    prompt_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    steps_total: int = 0
    memory_full: bool = False
    load_s: float = 0.0
    weights_bytes: int = 0

"""Agent and engine: the configuration file of an engine, and the bodies of its HTTP endpoints.

An engine is a process that serves the OpenAI API on a Unix socket, and also `GET /health`
(EngineHealth), `GET /stats` (EngineStats), `GET /metrics` and `POST /drain`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isochrone.wire.peers.assignment import ReplicaGroup

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Quantisation = Literal["auto", "file", "int8", "none"]


class KvStorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """The PoP's store of KV, as one engine reaches it.

    Its master is at `master_port` on loopback. The engine listens at a port from `first_port` to
    `last_port`, and other engines reach it at `host`.
    """

    master_port: int
    host: str
    first_port: int
    last_port: int


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one engine process: its model, its socket and its limits.

    Batching: `batch_tokens_max` limits the tokens of one step. While answers are being decoded, a
    step prefills only as much as keeps the time between tokens within `interval_ms`.

    Weights: with `quantisation` "file", weights stay packed as in their file if this device can
    multiply packed weights; otherwise they are rounded to 14 bits, or without our own kernels to
    bf16 or fp16. "int8" is faster and less exact: float weights are rounded to 8 bits, and so is
    what packed weights are multiplied by; without our own kernels it is "file". "none" computes
    with full weights. "auto" is "file" if our own kernels are
    available, else "none".

    KV cache: `kv_dtype` is its data type (default: `dtype`); fp8 has one scale per head and token.
    Evicted blocks go to `kv_host_bytes` of host memory and `kv_file_bytes` of files below
    `kv_folder`; 0 disables a tier. With `kv_store` the engine belongs to its PoP's store of KV, to
    which it gives `kv_store_bytes` of host memory.

    With `sleeps` the copy of the weights that a sleep needs is written at the start, so that the
    first sleep takes no longer than others.

    Speculative decoding: a step verifies at most `draft_tokens_max` drafted tokens per sequence; 0
    disables it. `draft_path` is a draft model with the same vocabulary, or an EAGLE-3 head.

    Parallelism: the model runs in `tensor_parallel` times `pipeline_parallel` processes, each with
    a device of its own, numbered from `device` on, and its own `threads` and `kv_memory_bytes`.
    Experts are divided into `expert_parallel` groups. With `group`, the processes are on several
    nodes, equally many on each. The part at place 0 listens and waits `join_s` for the others. The
    others have no HTTP server; each creates an empty file at `socket` once all have met.

    Limits: new requests are refused while the resident memory is close to `memory_max_bytes` (0: no
    limit) or the cgroup's memory close to its limit. A client that is `client_queue_max` tokens
    behind is disconnected. `graphs` lets a GPU run decode steps as captured CUDA graphs. `options`
    are the faults of the mock engine.
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
    kv_store_bytes: Annotated[int, Meta(ge=0)] = 0
    kv_store: KvStorePlace | None = None
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
    sleeps: bool = False
    group: ReplicaGroup | None = None
    options: dict[str, str] = {}


class EngineHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /health`, which shows whether the engine makes progress."""

    status: Literal["ok", "stalled", "draining"]
    model: str
    steps: int
    tokens_out: int
    last_step_age_s: float


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /stats`: the engine's load and its measured speed.

    `kind` is the kind of model: `chat`, `embedding` or `rerank`. While `memory_full` is true, new
    requests are refused. The last wake took `wake_s`. The prefix cache has lost the blocks last
    used more than `prefix_evicted_age_s` ago, and still has the others; -1 if the engine does not
    say. Of `prefix_hit_tokens_total`, `store_hit_tokens_total` came from the PoP's store of KV.
    `layers_computed_total` moves within a step, too. `is_waiting_for_peers` is true while nothing
    is computed, and other engines have yet to send KV or to take it.
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
    store_hit_tokens_total: int = 0
    steps_total: int = 0
    memory_full: bool = False
    load_s: float = 0.0
    weights_bytes: int = 0
    wake_s: float = 0.0
    prefix_evicted_age_s: float = -1.0
    layers_computed_total: int = 0
    is_waiting_for_peers: bool = False

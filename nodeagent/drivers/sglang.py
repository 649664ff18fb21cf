"""SGLang (`python -m sglang.launch_server`). Metric names: SGLang's Prometheus endpoint."""

import sys
from typing import Final

from isochrone.wire import headers
from isochrone.wire.assignment import ReplicaSpec
from isochrone.wire.engine import EngineStats
from nodeagent.drivers.driver import (
    CHAT,
    COMPLETIONS,
    EngineCommand,
    EngineLaunch,
    check_options,
    flags,
    no_package,
    read_prometheus,
    visible_devices,
)

OPTIONS: Final = frozenset(
    {
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "mem_fraction_static",
        "max_running_requests",
        "chunked_prefill_size",
        "attention_backend",
        "speculative_algorithm",
        "speculative_draft_model_path",
        "tool_call_parser",
        "reasoning_parser",
    }
)


class SglangDriver:
    """Starts SGLang's OpenAI server on a loopback port."""

    health_path = "/health"
    stats_path = metrics_path = "/metrics"
    resumes = headers.GREEDY
    salted = frozenset({CHAT, COMPLETIONS})

    def lacks(self) -> str:
        """Say where it is not installed."""
        return no_package("sglang")

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Split the model over the replica's devices by tensor parallelism."""
        spec = launch.spec
        check_options(spec, OPTIONS)
        nodes = spec.group.nodes if spec.group else 1
        return EngineCommand(
            arguments=(
                *(sys.executable, "-m", "sglang.launch_server"),
                *("--model-path", str(launch.model_path)),
                *("--host", "127.0.0.1", "--port", str(launch.port)),
                *("--served-model-name", spec.name),
                *("--context-length", str(spec.context_tokens)),
                *("--tp-size", str(len(spec.device_ids) * nodes)),
                *_over_nodes(spec),
                *("--enable-metrics", "--enable-cache-report"),
                *flags(spec.engine.options),
            ),
            base_url=f"http://127.0.0.1:{launch.port}" if spec.leads else "",
            environment={**visible_devices(spec), "HF_HUB_OFFLINE": "1"},
        )

    def read_stats(self, body: bytes) -> EngineStats:
        """Read requests running and queued, token use, and token counters."""
        found = read_prometheus(body)
        used = found.get("sglang:token_usage", 0.0)
        tokens_out = int(found.get("sglang:generation_tokens_total", 0))
        return EngineStats(
            running=int(found.get("sglang:num_running_reqs", 0)),
            waiting=int(found.get("sglang:num_queue_reqs", 0)),
            kv_blocks_used=int(used * 1000),
            kv_blocks_total=1000,
            decode_tokens_per_s=found.get("sglang:gen_throughput", 0.0),
            tokens_out_total=tokens_out,
            prompt_tokens_total=int(found.get("sglang:prompt_tokens_total", 0)),
            prefix_hit_tokens_total=int(found.get("sglang:cached_tokens_total", 0)),
            # Tokens are counted as a request ends; what it holds until then moves as it goes on.
            steps_total=tokens_out + int(found.get("sglang:num_used_tokens", 0)),
        )


def _over_nodes(spec: ReplicaSpec) -> tuple[str, ...]:
    """Return what each of several nodes' servers is told of the others."""
    group = spec.group
    if group is None:
        return ()
    return (
        *("--nnodes", str(group.nodes), "--node-rank", str(group.place)),
        *("--dist-init-addr", f"{group.host}:{group.port}"),
    )

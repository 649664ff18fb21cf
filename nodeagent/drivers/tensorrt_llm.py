"""TensorRT-LLM (`trtllm-serve serve`). Metric names: its Prometheus endpoint."""

from typing import Final

from isochrone.wire.engine import EngineStats
from nodeagent.drivers.driver import (
    CHAT,
    EngineCommand,
    EngineLaunch,
    check_options,
    no_program,
    on_one_node,
    read_prometheus,
    visible_devices,
)

OPTIONS: Final = frozenset(
    {
        "backend",
        "max_batch_size",
        "max_num_tokens",
        "kv_cache_free_gpu_memory_fraction",
        "pp_size",
        "ep_size",
        "reasoning_parser",
        "tool_parser",
    }
)

# Metrics are off unless asked for, and asked for only by file.
EXTRA: Final = b"return_perf_metrics: true\nenable_iter_perf_stats: true\n"


class TensorRtLlmDriver:
    """Starts TensorRT-LLM's OpenAI server on a loopback port."""

    health_path = "/health"
    stats_path = metrics_path = "/prometheus/metrics"
    resumes = ""
    salted = frozenset({CHAT})

    def lacks(self) -> str:
        """Say where it is not installed."""
        return no_program("trtllm-serve")

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Split the model over the replica's devices by tensor parallelism."""
        spec = launch.spec
        check_options(spec, OPTIONS)
        on_one_node(
            spec,
            "its ranks are started together by mpirun or srun, which is not for one node's agent; "
            "use vllm or sglang, or devices of one node",
        )
        return EngineCommand(
            arguments=(
                *("trtllm-serve", "serve", str(launch.model_path)),
                *("--host", "127.0.0.1", "--port", str(launch.port)),
                *("--max_seq_len", str(spec.context_tokens)),
                *("--tp_size", str(len(spec.device_ids))),
                *("--extra_llm_api_options", str(launch.folder / "extra.yaml")),
                *(
                    word
                    for name, value in sorted(spec.engine.options.items())
                    for word in (f"--{name}", value)
                ),
            ),
            base_url=f"http://127.0.0.1:{launch.port}",
            environment={**visible_devices(spec), "HF_HUB_OFFLINE": "1"},
            files={"extra.yaml": EXTRA},
        )

    def read_stats(self, body: bytes) -> EngineStats:
        """Read KV use and request counters."""
        found = read_prometheus(body)
        used = found.get("trtllm_kv_cache_utilization", 0.0)
        done = int(found.get("trtllm_request_success_total", 0))
        return EngineStats(
            running=int(found.get("trtllm_num_requests_running", 0)),
            waiting=int(found.get("trtllm_num_requests_waiting", 0)),
            kv_blocks_used=int(used * 1000),
            kv_blocks_total=1000,
            # No counter moves before a request ends; what it holds of the KV does, block by block.
            steps_total=done + int(used * 1_000_000),
        )

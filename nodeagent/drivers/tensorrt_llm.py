"""TensorRT-LLM (`trtllm-serve serve`). Metric names: its Prometheus endpoint."""

from typing import Any, Final

from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.peers.assignment import ReplicaSpec, Role
from nodeagent.drivers import installed_version
from nodeagent.drivers.driver import (
    CHAT_PATH,
    EngineCommand,
    EngineDriver,
    EngineLaunch,
    UnknownOption,
    check_options,
    flags,
    given_number,
    read_prometheus,
    require_one_node,
    visible_devices,
)
from nodeagent.drivers.guided_decoding import GuidedDecoding
from nodeagent.drivers.handshake import Handshake, TensorRtLlmHandshake
from nodeagent.drivers.installed_version import VersionRange
from nodeagent.drivers.output_parsers import REASONING_OPTION, output_parsers

EXTRA_CONFIG: Final = (
    b"return_perf_metrics: true\nenable_iter_perf_stats: true\nguided_decoding_backend: xgrammar\n"
)
"""Enables what has no command-line flag: the metrics, and that answers follow a schema. Without a
backend the server accepts `response_format` and ignores it."""

FRACTION_OPTION: Final = "kv_cache_free_gpu_memory_fraction"
FREE_FRACTION: Final = 0.9
"""The share of a replica's memory for weights and KV cache; TensorRT-LLM's own default."""

VERSIONS: Final = VersionRange(first=(1, 2), before=(2, 0))
"""1.1 has no `--tool_parser`. tests/engines/tensorrt_llm_options.json has the options of both."""


STAGES_OPTION: Final = "pp_size"
CHUNKED_OPTION: Final = "enable_chunked_prefill"
"""On, unless a deployment says false: without it the server refuses each prompt that is longer than
a step (`max_num_tokens`). `trtllm-serve` 1.2 has it off."""
TOOLS_OPTION: Final = "tool_parser"
"""Without a parser a model's calls stay in the text of its answers."""
RENAMED: Final = frozenset({"deepseekv3", "deepseekv3.1"})
"""Parsers that versions after 1.2 call deepseek_v3 and deepseek_v31. An engine does not start with
a name that it does not know, so they are chosen for 1.2 alone."""
RENAMED_AFTER: Final = VersionRange(first=(1, 2), before=(1, 3))
BACKEND_OPTION: Final = "cache_transceiver_backend"
"""Our own: the `backend` of `cache_transceiver_config` in its configuration file."""
HANDSHAKE: Final = TensorRtLlmHandshake()


class TensorRtLlmDriver(EngineDriver):
    """Starts TensorRT-LLM's OpenAI server on a loopback port."""

    stats_path = metrics_path = "/prometheus/metrics"
    counts_tokens = True
    salted_paths = frozenset({CHAT_PATH})
    sequences_option = "max_batch_size"

    def missing(self) -> str:
        """Return an error message if trtllm-serve is not installed, or too old, else ""."""
        return installed_version.problem("trtllm-serve", VERSIONS, "tensorrt_llm")

    def version(self) -> str:
        """Return the engine's installed version, "" if it is unknown."""
        return installed_version.program_version("trtllm-serve", "tensorrt_llm")

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the server's command, split by tensor and pipeline parallelism."""
        spec = launch.spec
        check_options(spec)
        require_one_node(
            spec,
            "mpirun or srun must start its ranks on all nodes, which a node's agent cannot do; "
            "use vllm or sglang, or devices of one node",
        )
        options = {CHUNKED_OPTION: "true", **spec.engine.options}
        parser = options.pop(TOOLS_OPTION, self._chosen_parser(launch))
        if parser.lower() in ("", "none"):
            parser = ""
        else:
            options[TOOLS_OPTION] = parser
        backend = options.pop(BACKEND_OPTION, "")
        return EngineCommand(
            arguments=(
                *("trtllm-serve", "serve", str(launch.model_path)),
                *("--host", "127.0.0.1", "--port", str(launch.port)),
                *("--max_seq_len", str(spec.context_tokens)),
                *("--tp_size", str(_tensor_parallel(spec))),
                *("--extra_llm_api_options", str(launch.folder / "extra.yaml")),
                *flags("tensorrt_llm", options, separator="_"),
            ),
            base_url=f"http://127.0.0.1:{launch.port}",
            environment={
                **visible_devices(spec),
                "HF_HUB_OFFLINE": "1",
                "TRTLLM_NO_USAGE_STATS": "1",
            },
            files={
                "extra.yaml": EXTRA_CONFIG
                + _kv_cache_config(launch)
                + (_transfer_config(spec.role, backend) if backend else b"")
            },
            guided=GuidedDecoding(parser.lower(), reasons=REASONING_OPTION in options),
        )

    def _chosen_parser(self, launch: EngineLaunch) -> str:
        """Return the parser for the model's calls that the installed version has, else "". Blocks.

        An unknown version may have another name for it.
        """
        parser = output_parsers("tensorrt_llm", launch.model_path).tools
        is_other_name = parser in RENAMED and RENAMED_AFTER.problem(self.version())
        return "" if is_other_name else parser

    def handshake(self, spec: ReplicaSpec) -> Handshake | None:
        """Return the protocol of an engine that was started with a cache transceiver."""
        return HANDSHAKE if BACKEND_OPTION in spec.engine.options else None

    def body_fields(self, command: EngineCommand, salt: str, priority: int) -> dict[str, Any]:
        """Return the salt."""
        return {"cache_salt": salt}

    def read_stats(self, body: bytes) -> EngineStats:
        """Read the KV cache use, and the counters of requests and tokens.

        The server writes all of them when a request ends. 1.2 has that of requests alone, without
        the prefix of later versions.
        """
        found = read_prometheus(body)
        used = found.get("trtllm_kv_cache_utilization", 0.0)
        finished = found.get("trtllm_request_success_total", found.get("request_success_total", 0))
        return EngineStats(
            running=int(found.get("trtllm_num_requests_running", 0)),
            waiting=int(found.get("trtllm_num_requests_waiting", 0)),
            kv_blocks_used=int(used * 1000),
            kv_blocks_total=1000,
            tokens_out_total=int(found.get("trtllm_generation_tokens_total", 0)),
            prompt_tokens_total=int(found.get("trtllm_prompt_tokens_total", 0)),
            prefix_hit_tokens_total=int(found.get("trtllm_prompt_cached_tokens_total", 0)),
            steps_total=int(finished),
        )


def _tensor_parallel(spec: ReplicaSpec) -> int:
    """Return into how many parts each stage is split. Raises UnknownOption."""
    devices, stages = len(spec.device_ids), given_number(spec.engine.options, STAGES_OPTION) or 1
    if devices % stages:
        raise UnknownOption(
            f"cannot use {STAGES_OPTION} {stages} with {devices} devices: it must divide their"
            " number"
        )
    return devices // stages


def _transfer_config(role: Role, backend: str) -> bytes:
    """Return the part of the configuration with which the engine sends and fetches KV.

    The context phase alone does not work with overlapped scheduling (its documentation of
    disaggregated serving).
    """
    overlap = "disable_overlap_scheduler: true\n" if role is Role.PREFILL else ""
    return f"{overlap}cache_transceiver_config:\n  backend: {backend}\n".encode()


def _kv_cache_config(launch: EngineLaunch) -> bytes:
    """Return the part of the configuration that limits the KV cache to the planned memory.

    TensorRT-LLM takes the smaller one of `max_gpu_total_bytes` and the fraction of the memory that
    is free after loading. This section replaces the one of the command line, so it is left out if
    the deployment sets the fraction by itself.
    """
    engine = launch.spec.engine
    if FRACTION_OPTION in engine.options or not launch.has_memory_plan:
        return b""
    left_bytes = int(FREE_FRACTION * launch.spec.memory_bytes) - launch.weights_bytes
    kv_bytes = engine.kv_memory_bytes or left_bytes
    if kv_bytes <= 0:
        raise UnknownOption(
            f"cannot start tensorrt_llm: {launch.spec.memory_bytes} bytes on each device leave "
            f"nothing for the KV cache beside {launch.weights_bytes} bytes of weights; raise "
            "memory_bytes"
        )
    return (
        f"kv_cache_config:\n  max_gpu_total_bytes: {kv_bytes}\n"
        f"  free_gpu_memory_fraction: {FREE_FRACTION}\n"
    ).encode()

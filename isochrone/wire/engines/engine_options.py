"""The options that each engine driver accepts, as data for the CLI, the scheduler and the agent.

A deployment's `options` are names of the engine's own command-line options, with `_` for `-`.
Options that the driver sets itself, such as the model, the port and the parallelism, are not
listed. Options that would let a deployment run code of its own on a node are left out, too.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, Literal, get_args, get_origin

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine import EngineConfig

_SUFFIXES: Final[Mapping[str, int]] = {
    "k": 10**3,
    "K": 2**10,
    "m": 10**6,
    "M": 2**20,
}

TRUE: Final = frozenset({"", "true"})
"""The values that turn a flag on. `--option enforce_eager=` is one of them."""
FALSE: Final = frozenset({"false"})

OPTIONS_CHARS_MAX: Final = 16_384
"""The limit on all options of an engine together. The options are part of each assignment with such
a replica, and are read with each plan."""


NUMBER_DIGITS_MAX: Final = 15
"""The digits of a number above 0. A number of 400 digits would make every plan fail, because no
float is so large, and Python refuses one of 5,000."""


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of one driver: `values` need a value; `flags` are true or false.

    `negatable` are the flags that the engine can turn off with `--no-NAME`, because some versions
    have them on by default. A false one of the other flags is left out. `numbers` are values that
    must be whole numbers above 0. Values that are fields of `config` must be of their types.
    """

    values: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    config: type[msgspec.Struct] | None = None
    flags: frozenset[str] = frozenset()
    negatable: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All options of the driver."""
        return self.values | self.flags | self.negatable

    def is_flag(self, name: str) -> bool:
        """Return whether an option is true or false, without a value of its own."""
        return name in self.flags or name in self.negatable

    def problem(self, options: Mapping[str, str]) -> str:
        """Return what is wrong with a deployment's options, or "" if nothing is."""
        size = sum(len(name) + len(value) for name, value in options.items())
        if size > OPTIONS_CHARS_MAX:
            return f"the options have {size} characters, the limit is {OPTIONS_CHARS_MAX}"
        for name, value in sorted(options.items()):
            if name not in self.names:
                near = get_close_matches(name.replace("-", "_"), sorted(self.names), 1)
                known = ", ".join(sorted(self.names)) or "none"
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {known}"
                return f"unknown option {name!r}; {hint}"
            if self.is_flag(name) and value.lower() not in TRUE | FALSE:
                return f"option {name!r} is a flag: use true or false, not {value!r}"
            if name in self.values and not value:
                return f"option {name!r} needs a value"
            if name in self.numbers and not parse_digits(value, NUMBER_DIGITS_MAX):
                return f"option {name!r} is a whole number above 0, not {value[:40]!r}"
        return self._type_problem(options)

    def _type_problem(self, options: Mapping[str, str]) -> str:
        fields = msgspec.structs.fields(self.config) if self.config else ()
        for field in fields:
            if field.name in self.values and field.name in options:
                value = options[field.name]
                try:
                    msgspec.convert(value, field.type, strict=False)
                except msgspec.ValidationError as error:
                    is_choice = get_origin(field.type) is Literal
                    choices = ", ".join(filter(None, get_args(field.type))) if is_choice else ""
                    expected = f"use one of {choices}" if choices else str(error)
                    return f"cannot use {value!r} for option {field.name!r}: {expected}"
        return ""


def read_size(text: str) -> int:
    """Return a number that may be written as 8k or 2.5k, as vLLM reads it; 0 if it is none."""
    factor = _SUFFIXES.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    try:
        return max(0, int(float(digits) * factor))
    except (ValueError, OverflowError):
        return 0


ENGINE_OPTIONS: Final[Mapping[str, EngineOptions]] = {
    "embedded": EngineOptions(
        values=frozenset(
            {
                "dtype",
                "quantisation",
                "batch_tokens_max",
                "interval_ms",
                "sequences_max",
                "draft_tokens_max",
                "draft_path",
                "waiting_max",
                "threads",
                "tensor_parallel",
                "pipeline_parallel",
                "expert_parallel",
                "kv_dtype",
                "kv_host_bytes",
                "kv_file_bytes",
                "kv_folder",
                "kv_store_bytes",
                "memory_max_bytes",
                "adapters_max",
                "adapter_memory_bytes",
            }
        ),
        numbers=frozenset({"kv_store_bytes"}),
        config=EngineConfig,
    ),
    "mock": EngineOptions(
        values=frozenset(
            {
                "ttft_ms",
                "itl_ms",
                "kv_tokens",
                "sequences",
                "fail_load",
                "out_of_memory_beside",
                "crash_at_token",
                "hang_at_token",
                "garbage_at_token",
                "error_status",
                "memory_full",
                "zombie",
            }
        )
    ),
    # `vllm serve --help=all` of 0.32. `kv_connector` and `kv_store_bytes` are our driver's
    # own.
    "vllm": EngineOptions(
        values=frozenset(
            {
                "dtype",
                "quantization",
                "load_format",
                "kv_cache_dtype",
                "kv_cache_memory_bytes",
                "gpu_memory_utilization",
                "block_size",
                "cpu_offload_gb",
                "kv_offloading_size",
                "kv_offloading_backend",
                "pipeline_parallel_size",
                "data_parallel_size",
                "max_num_seqs",
                "max_num_batched_tokens",
                "max_cudagraph_capture_size",
                "scheduling_policy",
                "attention_backend",
                "compilation_config",
                "speculative_config",
                "tool_call_parser",
                "reasoning_parser",
                "structured_outputs_config",
                "max_loras",
                "max_lora_rank",
                "max_cpu_loras",
                "lora_dtype",
                "kv_connector",
                "kv_transfer_config",
                "kv_store_bytes",
                "kv_events_config",
                "otlp_traces_endpoint",
                "seed",
            }
        ),
        # Others, such as max_num_batched_tokens, may be written as 8k.
        numbers=frozenset(
            {
                "max_num_seqs",
                "block_size",
                "pipeline_parallel_size",
                "data_parallel_size",
                "max_loras",
                "max_lora_rank",
                "max_cpu_loras",
                "kv_store_bytes",
            }
        ),
        flags=frozenset(
            {
                "enforce_eager",
                "enable_auto_tool_choice",
                "enable_lora",
                "fully_sharded_loras",
                "enable_expert_parallel",
                "enable_eplb",
                "enable_sleep_mode",
                "disable_custom_all_reduce",
                "disable_sliding_window",
            }
        ),
        negatable=frozenset(
            {"enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"}
        ),
    ),
    # `llama-server --help`. `shared_prompt_cache` is our driver's own.
    "llama_cpp": EngineOptions(
        values=frozenset(
            {
                "parallel",
                "batch_size",
                "ubatch_size",
                "threads",
                "threads_batch",
                "poll",
                "numa",
                "load_mode",
                "cache_type_k",
                "cache_type_v",
                "cache_reuse",
                "flash_attn",
                "n_gpu_layers",
                "n_cpu_moe",
                "split_mode",
                "tensor_split",
                "main_gpu",
                "reasoning_format",
                "reasoning_budget",
                "spec_type",
                "spec_draft_model",
                "spec_draft_n_max",
            }
        ),
        numbers=frozenset({"parallel", "batch_size", "ubatch_size"}),
        flags=frozenset({"cpu_moe", "swa_full", "shared_prompt_cache"}),
        negatable=frozenset({"kv_unified", "cont_batching", "repack", "jinja", "kv_offload"}),
    ),
    # sglang/srt/server_args.py of 0.5.23, which renamed cuda_graph_max_bs.
    "sglang": EngineOptions(
        values=frozenset(
            {
                "dtype",
                "quantization",
                "kv_cache_dtype",
                "mem_fraction_static",
                "max_total_tokens",
                "max_running_requests",
                "chunked_prefill_size",
                "max_prefill_tokens",
                "schedule_policy",
                "attention_backend",
                "sampling_backend",
                "grammar_backend",
                "cuda_graph_max_bs_decode",
                "cuda_graph_max_bs_prefill",
                "ep_size",
                "speculative_algorithm",
                "speculative_draft_model_path",
                "speculative_num_steps",
                "speculative_eagle_topk",
                "speculative_num_draft_tokens",
                "tool_call_parser",
                "reasoning_parser",
                "max_loras_per_batch",
                "max_lora_rank",
                "disaggregation_transfer_backend",
                "disaggregation_ib_device",
            }
        ),
        numbers=frozenset({"max_running_requests", "max_loras_per_batch", "ep_size"}),
        flags=frozenset(
            {
                "enable_lora",
                "enable_dp_attention",
                "enable_mixed_chunk",
                "disable_cuda_graph",
                "disable_radix_cache",
                "disable_custom_all_reduce",
            }
        ),
    ),
    # tensorrt_llm/commands/serve.py of 1.2. `cache_transceiver_backend` is our driver's own: a part
    # of its configuration file.
    "tensorrt_llm": EngineOptions(
        values=frozenset(
            {
                "backend",
                "max_batch_size",
                "max_num_tokens",
                "kv_cache_free_gpu_memory_fraction",
                "pp_size",
                "ep_size",
                "reasoning_parser",
                "tool_parser",
                "cache_transceiver_backend",
            }
        ),
        numbers=frozenset({"max_batch_size", "max_num_tokens", "pp_size", "ep_size"}),
        flags=frozenset({"enable_chunked_prefill"}),
    ),
    # Our driver's own: the server's options are those of the node's [commands.NAME].
    "command": EngineOptions(
        values=frozenset({"command", "surfaces", "concurrency"}),
        numbers=frozenset({"concurrency"}),
        flags=frozenset({"shared_prompt_cache"}),
    ),
}
"""The options by driver. The agent's registry of drivers has the same keys."""

"""What each engine can do, as data for the CLI, the router, the scheduler and the agent."""

from collections.abc import Mapping
from typing import Final

import msgspec


class EngineCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine can do.

    `sequences_option`, `step_tokens_option` and `waiting_option` name the options with the limits
    of concurrent sequences, of tokens in one step and of waiting requests; "" if there is none.
    `has_kv_cache` is false for an engine that needs no memory for KV.
    """

    sequences_option: str = ""
    step_tokens_option: str = ""
    waiting_option: str = ""
    has_kv_cache: bool = True


ENGINE_CAPABILITIES: Final[Mapping[str, EngineCapabilities]] = {
    "embedded": EngineCapabilities(
        sequences_option="sequences_max",
        step_tokens_option="batch_tokens_max",
        waiting_option="waiting_max",
    ),
    "mock": EngineCapabilities(has_kv_cache=False),
    "vllm": EngineCapabilities(
        sequences_option="max_num_seqs", step_tokens_option="max_num_batched_tokens"
    ),
    "llama_cpp": EngineCapabilities(sequences_option="parallel", step_tokens_option="batch_size"),
    "sglang": EngineCapabilities(
        sequences_option="max_running_requests", step_tokens_option="chunked_prefill_size"
    ),
    "tensorrt_llm": EngineCapabilities(
        sequences_option="max_batch_size", step_tokens_option="max_num_tokens"
    ),
}
"""By driver. `ENGINE_OPTIONS` has the same keys."""

UNKNOWN_ENGINE: Final = EngineCapabilities()
"""Assumed of an engine that a newer version of the other side knows."""


def capabilities_of(driver: str) -> EngineCapabilities:
    """Return what an engine can do."""
    return ENGINE_CAPABILITIES.get(driver, UNKNOWN_ENGINE)

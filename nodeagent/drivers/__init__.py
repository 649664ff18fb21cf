"""One driver per kind of engine: how to start it and how to read its statistics."""

from typing import Final

from nodeagent.drivers.driver import EngineDriver
from nodeagent.drivers.embedded import EmbeddedDriver
from nodeagent.drivers.mock import MockDriver
from nodeagent.drivers.sglang import SglangDriver
from nodeagent.drivers.tensorrt_llm import TensorRtLlmDriver
from nodeagent.drivers.vllm import VllmDriver

DRIVERS: Final[dict[str, EngineDriver]] = {
    "embedded": EmbeddedDriver(),
    "mock": MockDriver(),
    "vllm": VllmDriver(),
    "sglang": SglangDriver(),
    "tensorrt_llm": TensorRtLlmDriver(),
}

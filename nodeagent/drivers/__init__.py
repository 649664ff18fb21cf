"""One file an engine: how it is started, asked and watched."""

from typing import Final

from nodeagent.drivers.driver import Driver
from nodeagent.drivers.embedded import Embedded
from nodeagent.drivers.mock import Mock
from nodeagent.drivers.sglang import Sglang
from nodeagent.drivers.tensorrt_llm import TensorRtLlm
from nodeagent.drivers.vllm import Vllm

DRIVERS: Final[dict[str, Driver]] = {
    "embedded": Embedded(),
    "mock": Mock(),
    "vllm": Vllm(),
    "sglang": Sglang(),
    "tensorrt_llm": TensorRtLlm(),
}

"""One driver per kind of engine: how to start it and how to read its statistics."""

from typing import Final

from isochrone.wire.digits import parse_digits
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.decide.requests.seats import spare_seats
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.driver import EngineDriver
from nodeagent.drivers.embedded import EmbeddedDriver
from nodeagent.drivers.llama_cpp import LlamaCppDriver
from nodeagent.drivers.mock import MockDriver
from nodeagent.drivers.sglang import SglangDriver
from nodeagent.drivers.tensorrt_llm import TensorRtLlmDriver
from nodeagent.drivers.vllm import VllmDriver

DRIVERS: Final[dict[str, EngineDriver]] = {
    "embedded": EmbeddedDriver(),
    "mock": MockDriver(),
    "vllm": VllmDriver(),
    "llama_cpp": LlamaCppDriver(),
    "sglang": SglangDriver(),
    "tensorrt_llm": TensorRtLlmDriver(),
    "command": CommandDriver(),
}


def sequences_max(spec: ReplicaSpec) -> int:
    """Return how many sequences a replica's engine runs at once, or 0 if that is unknown."""
    driver = DRIVERS.get(spec.engine.driver)
    if driver is None:
        return 0
    # The driver itself refuses to start with any value that is not a number.
    limit = parse_digits(spec.engine.options.get(driver.sequences_option, ""))
    return driver.sequences_default if limit is None else limit


def is_queue_fair(spec: ReplicaSpec) -> bool:
    """Return True if the queue of a replica's engine is fair between tenants."""
    driver = DRIVERS.get(spec.engine.driver)
    return driver is not None and driver.is_queue_fair


def spare_seats_of(spec: ReplicaSpec) -> int:
    """Return how many seats a replica's engine has beyond `sequences_max`."""
    driver, seats = DRIVERS.get(spec.engine.driver), sequences_max(spec)
    return spare_seats(seats) if seats and driver is not None and driver.has_spare_seats else 0

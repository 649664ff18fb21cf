"""One driver per kind of engine: how to start it and how to read its statistics."""

from collections.abc import Mapping
from typing import Final

from isochrone.wire.engines.command_engine import COMMAND_DRIVER
from isochrone.wire.engines.engine_capabilities import copies_of
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.drivers.command import CommandDriver
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.driver import EngineDriver, given_number
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


def missing_by_driver(commands: Mapping[str, ConfiguredCommand]) -> dict[str, str]:
    """Return what each engine lacks on this node, "" if it can start. Blocks.

    `commands` are the operator's own servers.
    """
    missing = {name: driver.missing() for name, driver in DRIVERS.items()}
    return missing if commands else {**missing, COMMAND_DRIVER: "this node has no [commands]"}


def sequences_max(spec: ReplicaSpec) -> int:
    """Return how many sequences a replica's engine runs at once, or 0 if that is unknown.

    Each copy of the model has the limit for itself.
    """
    driver = DRIVERS.get(spec.engine.driver)
    if driver is None:
        return 0
    of_copy = given_number(spec.engine.options, driver.sequences_option) or driver.sequences_default
    return copies_of(spec.engine) * of_copy


def is_queue_fair(spec: ReplicaSpec) -> bool:
    """Return True if the queue of a replica's engine is fair between tenants."""
    driver = DRIVERS.get(spec.engine.driver)
    return driver is not None and driver.is_queue_fair


def spare_seats_of(spec: ReplicaSpec) -> int:
    """Return how many seats a replica's engine has beyond `sequences_max`."""
    driver = DRIVERS.get(spec.engine.driver)
    return driver.spare_seats(spec.engine.options) if driver is not None else 0


def version_of(driver: str) -> str:
    """Return the installed version of an engine, "" if it is unknown. Blocks."""
    return DRIVERS[driver].version() if driver in DRIVERS else ""

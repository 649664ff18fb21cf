"""The interface of an engine driver, and helpers that the drivers share."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec

from isochrone.wire.digits import parse_digits
from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.engines.engine_capabilities import transfer_problem
from isochrone.wire.engines.engine_options import ENGINE_OPTIONS, TRUE
from isochrone.wire.engines.shared_prompts import drafts_problem
from isochrone.wire.kv.kv_store import sharing_problem
from isochrone.wire.kv.kv_transfer import KvAddress
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.drivers.configured_command import ConfiguredCommand
from nodeagent.drivers.guided_decoding import GuidedDecoding
from nodeagent.drivers.handshake import Handshake


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The physical memory of a replica's smallest device, and the part free at its start."""

    total_bytes: int
    free_bytes: int


class StorePorts(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of a vendor's store of KV on this node.

    Engines find its master at `master` on loopback, wherever it runs in the PoP. They listen for
    each other at `first` to `last`, in plaintext and on every address of the machine.
    """

    master: int
    first: int
    last: int


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of an engine's start: the replica's spec, and resources of this machine."""

    spec: ReplicaSpec
    model_path: Path
    folder: Path
    port: int
    threads: int
    memory: DeviceMemory | None = None
    host: str = "127.0.0.1"
    """The address at which engines of the PoP's other nodes reach this node."""
    transfer_port: int = 0
    """A free port for the transfer of KV."""
    store_ports: StorePorts | None = None
    """The ports of the PoP's store of KV on this node; None if it takes no part in one."""
    start_id: str = ""
    """Differs at each start of an engine."""
    commands: Mapping[str, ConfiguredCommand] = {}
    """The operator's own servers, by name."""

    @property
    def has_memory_plan(self) -> bool:
        """True if the deployment says how much memory its replicas or their KV caches take.

        If it does not, the engine takes its own share of the device.
        """
        return bool(self.spec.engine.kv_memory_bytes or self.spec.engine.memory_bytes)

    @property
    def weights_bytes(self) -> int:
        """The bytes of weights on each device, as the planner counts them."""
        return self.spec.artifact.size_bytes // self.spec.engine.devices


class EngineCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start: its arguments, environment and files, and the URL of its HTTP server.

    The server is on loopback, except with an `api_key`. A part of a replica that another node leads
    has no HTTP server.
    """

    arguments: tuple[str, ...]
    base_url: str
    """`http://localhost` with a Unix `socket`, else `http://127.0.0.1:port`; "" without one."""
    socket: str = ""
    """A part without a server creates an empty file here, if one is given, once all parts are
    connected."""
    environment: dict[str, str] = {}
    files: dict[str, bytes] = {}
    keep_alive: bool = True  # else each request has a connection of its own
    standby: tuple[str, ...] = ()
    """The command of a spare process that can become this engine: `arguments` up to their first
    option, and `--standby`."""
    kv_address: KvAddress | None = None  # where engines of other nodes transfer KV with it
    kv_events: str = ""  # the socket where it publishes what its prefix cache stores and evicts
    api_key: str = ""  # all requests must have it
    model_link: str = ""  # it works in its own folder, where a link of this name leads to the model
    ready_path: str = ""  # replaces the driver's
    metrics_path: str = ""  # replaces the driver's
    model_name: str = ""  # the `model` of requests to the engine
    stall_s: float = 0.0
    """A request may go on for this long without a byte of its answer, and the server may answer
    nothing else meanwhile."""
    may_force_tools: bool = True  # else requests that require a call of a tool are refused
    may_be_strict: bool = True
    """If false, requests with `strict` functions that the model need not call are refused."""
    strict_forced_tools: bool = False  # mark the tools `strict` of requests that require a call
    guided: GuidedDecoding | None = None  # translate the schemas of requests
    schema_recursion_max: int = 0
    """Refuse schemas and grammars with more (schema_recursion.py), dead_grammars.py's, and strict
    ones with unread_keywords.py's; 0 for an engine that needs no such check."""
    grammar_error: bytes = b""
    """A part of its error of status 500 if no token can follow a request's grammar, b"" if that is
    no error of its own."""
    functions_only: bool = False  # refuse tools that are no functions: it would answer 500
    fills_refusals: bool = False  # give messages that are a refusal alone their text as content
    field_limits: dict[str, int] = {}
    """The most that a field of a request may be, or have if it is a list or a text. With more the
    engine would keep its other requests waiting, or take memory without bound."""

    @property
    def port(self) -> int:
        """The port of its HTTP server, 0 if it has none or listens on a socket."""
        text = self.base_url.rpartition(":")[2]
        return int(text) if text.isdigit() and not self.socket else 0


CHAT_PATH: Final = "/v1/chat/completions"
COMPLETIONS_PATH: Final = "/v1/completions"
TOKENIZE_PATH: Final = "/tokenize"
LOAD_ADAPTER_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER_PATH: Final = "/v1/unload_lora_adapter"


class UnknownOption(Exception):
    """A deployment has an option, or a value of one, that its driver cannot use."""


class EngineDriver(ABC):
    """How to start one kind of engine and read its statistics.

    The defaults are those of an engine that can do none of these things.
    """

    health_path: str = "/health"
    stats_path: str = ""
    metrics_path: str = ""
    resumes: str = ""
    """The interrupted answers that it can resume: `headers.INEXACT` (all, with another text),
    `headers.GREEDY`, `headers.SEEDED` (greedy and seeded), or "" for none."""
    tokenize_path: str = ""
    """The path at which it counts the tokens of a chat, as vLLM does; "" if it cannot."""
    salted_paths: frozenset[str] = frozenset()
    """The paths whose request bodies get `body_fields`. The embedded engine reads the salt and the
    priority from headers instead."""

    sequences_option: str = ""
    """The option with the limit of concurrent sequences, "" if there is none."""
    sequences_default: int = 0
    """The limit without that option, 0 if it depends on the machine."""

    counts_tokens: bool = False
    """Whether events of its streams say how many tokens there are, if CONTINUOUS_USAGE is set
    (request_body.py)."""

    kv_transfer: bool = False
    """Whether it sends the KV of a prompt over the nodes' API, and takes it."""

    is_queue_fair: bool = False
    """Whether the engine's own queue is fair between tenants."""

    load_adapter_path: str = ""
    unload_adapter_path: str = ""
    """Paths that load a LoRA adapter into the running engine and forget it, as vLLM's; "" if it
    cannot."""
    sleep_path: str = ""
    wake_path: str = ""
    """Paths that drop the engine's model and load it again; "" if it cannot sleep."""
    is_asleep_path: str = ""
    """The path that returns `{"is_sleeping": true}` while the model is dropped; "" if none does."""

    @abstractmethod
    def missing(self) -> str:
        """Return what the engine lacks on this node, or "" if it can start. Blocks."""

    def version(self) -> str:
        """Return the engine's installed version, "" if it is unknown. Blocks."""
        return ""

    @abstractmethod
    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the process to start. Raises UnknownOption."""

    def handshake(self, spec: ReplicaSpec) -> Handshake | None:
        """Return the engine's own protocol for sending KV; None if it has, or uses, none."""
        return None

    def spare_seats(self, options: Mapping[str, str]) -> int:
        """Return how many seats it has beyond its `sequences_option` (requests/seats.py)."""
        return 0

    def body_fields(self, command: EngineCommand, salt: str, priority: int) -> dict[str, Any]:
        """Return the fields of a request body that the agent sets, or removes (None).

        `salt` separates the prefix caches of tenants. `priority` is from 0 to 100. `command` is
        what the engine was started with.
        """
        return {}

    @abstractmethod
    def read_stats(self, body: bytes) -> EngineStats:
        """Parse the engine's statistics. Raises msgspec.DecodeError."""


def missing_program(name: str) -> str:
    """Return an error message if a program is not on the PATH, else ""."""
    return "" if shutil.which(name) else f"{name} is not on the PATH of the agent"


def missing_package(name: str) -> str:
    """Return an error message if a Python package is not installed, else ""."""
    return "" if find_spec(name) else f"{name} is not installed in the agent's environment"


def require_one_node(spec: ReplicaSpec, reason: str) -> None:
    """Raise UnknownOption if a replica spans several nodes."""
    if spec.group is not None:
        driver, nodes = spec.engine.driver, spec.group.nodes
        raise UnknownOption(f"cannot start {driver} over {nodes} nodes: {reason}")


def require_store_ports(launch: EngineLaunch) -> StorePorts:
    """Return the ports of the PoP's store of KV. Raises UnknownOption if this node has none."""
    if launch.store_ports is None:
        raise UnknownOption("cannot share KV: plaintext_kv_store_ports is not set on this node")
    return launch.store_ports


def check_options(spec: ReplicaSpec) -> None:
    """Raise UnknownOption if a deployment has options that its driver cannot use.

    The scheduler refuses such a deployment. This check is for a scheduler of another version.
    """
    problem = ENGINE_OPTIONS[spec.engine.driver].problem(spec.engine.options)
    problem = problem or transfer_problem(spec.engine) or sharing_problem(spec.engine)
    problem = problem or drafts_problem(spec.engine)
    if problem:
        raise UnknownOption(f"cannot start {spec.engine.driver}: {problem}")


def given_number(options: Mapping[str, str], name: str) -> int:
    """Return the whole number that an option is given; 0 if it is given none."""
    # The driver itself refuses to start with any other value.
    return parse_digits(options.get(name, "")) or 0


def with_spare_seats(driver: EngineDriver, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with the spare seats added to the limit of concurrent sequences."""
    spare = driver.spare_seats(options)
    if not spare:
        return dict(options)
    name = driver.sequences_option
    return {**options, name: str(given_number(options, name) + spare)}


def visible_devices(spec: ReplicaSpec) -> dict[str, str]:
    """Return the environment that limits an engine to the replica's GPUs."""
    gpus = [device.removeprefix("gpu") for device in spec.device_ids if device != "cpu"]
    # NVML numbers GPUs by their bus. CUDA's own order begins with the fastest one.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def cpu_threads(launch: EngineLaunch) -> dict[str, str]:
    """Return the environment of an engine that computes with OpenMP's threads on a CPU.

    Threads that wait for each other must sleep: those that spin, the default, take the cores from
    the threads that they wait for as soon as a machine has other work. On two cores with a load of
    16 both vLLM and llama.cpp then generated 0.6 to 1.3 tokens/s, and 17 to 80 with this setting. A
    variable that the agent's own environment sets is left to the operator.
    """
    if launch.spec.device_ids != ("cpu",):
        return {}
    variables = {
        "OMP_NUM_THREADS": str(launch.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }
    return {name: value for name, value in variables.items() if name not in os.environ}


def flags(driver: str, options: Mapping[str, str], separator: str = "-") -> tuple[str, ...]:
    """Return options as command-line arguments: `--name value`, or `--name` for a flag.

    A flag that is false is left out, or given as `--no-name` where the engine knows that form.
    """
    known = ENGINE_OPTIONS[driver]
    arguments: list[str] = []
    for name, value in sorted(options.items()):
        argument = name.replace("_", separator)
        if not known.is_flag(name):
            arguments += (f"--{argument}", value)
        elif value.lower() in TRUE:
            arguments.append(f"--{argument}")
        elif name in known.negatable:
            arguments.append(f"--no-{argument}")
    return tuple(arguments)


def read_prometheus(body: bytes) -> dict[str, float]:
    """Return the sum of each metric over all labels, from a Prometheus page; skip NaN and inf."""
    sums: dict[str, float] = {}
    for line in body.decode(errors="replace").splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, text = line.rpartition(" ")
        name = name.partition("{")[0]
        with suppress(ValueError):
            value = float(text)
            if isfinite(value):
                sums[name] = sums.get(name, 0.0) + value
    return sums

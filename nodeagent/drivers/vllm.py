"""vLLM (`vllm serve`). Metric names: vLLM's Prometheus endpoint, V1 engine."""

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import msgspec

from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.engines.engine_capabilities import sleep_problem_on
from isochrone.wire.engines.engine_options import TRUE, read_size
from isochrone.wire.http import headers
from isochrone.wire.kv.kv_store import (
    STORE_BUFFER_BYTES,
    STORE_BYTES_OPTION,
    store_bytes,
    uses_kv_store,
)
from isochrone.wire.kv.kv_transfer import KvAddress
from isochrone.wire.peers.assignment import ReplicaSpec
from nodeagent.decide.requests.seats import spare_seats
from nodeagent.drivers import installed_version
from nodeagent.drivers.driver import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    LOAD_ADAPTER_PATH,
    TOKENIZE_PATH,
    UNLOAD_ADAPTER_PATH,
    EngineCommand,
    EngineDriver,
    EngineLaunch,
    UnknownOption,
    check_options,
    cpu_threads,
    flags,
    given_number,
    read_prometheus,
    require_store_ports,
    visible_devices,
    with_spare_seats,
)
from nodeagent.drivers.handshake import Handshake, MooncakeHandshake, NixlHandshake
from nodeagent.drivers.installed_version import VersionRange
from nodeagent.drivers.output_parsers import may_be_strict, with_parsers

SORTED_QUEUE: Final = ("--scheduling-policy", "priority")
BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
TRACES_OPTION: Final = "otlp_traces_endpoint"
STAGES_OPTION: Final = "pipeline_parallel_size"
COPIES_OPTION: Final = "data_parallel_size"
STEP_TOKENS_OPTION: Final = "max_num_batched_tokens"
MEMORY_OPTIONS: Final = frozenset({"kv_cache_memory_bytes", "gpu_memory_utilization"})
VERSIONS: Final = VersionRange(first=(0, 11), before=(1, 0))
"""0.11 is the first version with `--kv-cache-memory-bytes` and `--nnodes`. Tested with 0.32. The
parser of 0.33 takes the same command lines."""

CONNECTOR_OPTION: Final = "kv_connector"
CONNECTORS: Final[Mapping[str, str]] = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector"}
HANDSHAKES: Final[Mapping[str, Handshake]] = {
    "nixl": NixlHandshake(),
    "mooncake": MooncakeHandshake(),
}
KV_LEASE_S: Final = 30
"""KV of a prompt that no other engine fetches is released after this time. While a request waits in
the decode engine's queue, NIXL extends it."""
MOONCAKE_ABORT_S: Final = 60
"""The same for Mooncake, which does not extend it. vLLM's own default is 480 s."""


STORE_CONFIG: Final = "mooncake.json"

EVENTS_OPTION: Final = "kv_events_config"
EVENTS_SOCKET: Final = "kv-events.sock"
EVENTS_VERSIONS: Final = VersionRange(first=(0, 32), before=VERSIONS.before)
"""With events, releases long before these keep the KV of all layers alike, so that models with
sliding windows need more memory."""
KEEPS_EVICTED: Final = frozenset({"kv_transfer_config", "kv_offloading_size"})
"""Options with which what the prefix cache evicts may still be found in a tier below it."""


class VllmDriver(EngineDriver):
    """Starts vLLM's OpenAI server on a loopback port."""

    stats_path = metrics_path = "/metrics"
    # In bf16 the result of a step depends on the batch, so that greedy answers do, too.
    resumes = headers.INEXACT
    counts_tokens = True
    tokenize_path = TOKENIZE_PATH
    salted_paths = frozenset({CHAT_PATH, COMPLETIONS_PATH})
    sequences_option = "max_num_seqs"
    load_adapter_path = LOAD_ADAPTER_PATH
    unload_adapter_path = UNLOAD_ADAPTER_PATH
    sleep_path = "/sleep?level=1"
    wake_path = "/wake_up"
    is_asleep_path = "/is_sleeping"

    def missing(self) -> str:
        """Return an error message if vLLM is not installed, or is too old, else ""."""
        return installed_version.problem("vllm", VERSIONS)

    def version(self) -> str:
        """Return the engine's installed version, "" if it is unknown."""
        return installed_version.program_version("vllm")

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the server's command, split by tensor, pipeline and data parallelism."""
        spec = launch.spec
        check_options(spec)
        problem = sleep_problem_on(spec.engine, spec.device_ids[0])
        if spec.overcommit > 1 and problem:
            raise UnknownOption(problem)
        chosen = with_parsers("vllm", spec.engine.options, launch.model_path)
        defaults = {"scheduling_policy": "priority", **_device_options(spec)}
        options = {**defaults, **_memory_options(launch), **chosen}
        options = with_spare_seats(self, options)
        connector = options.pop(CONNECTOR_OPTION, "")
        options.pop(STORE_BYTES_OPTION, None)
        shares_kv = uses_kv_store(spec.engine)
        if shares_kv:
            options["kv_transfer_config"] = _store_transfer_config(launch)
        if connector:
            options["kv_transfer_config"] = _transfer_config(launch, connector)
        events = _events_socket(launch, options)
        if events:
            options[EVENTS_OPTION] = _events_config(events)
        # Engines exchange KV only if their models' paths are the same (NIXL's compatibility hash),
        # and the names of blocks in a store begin with the last part of that path.
        link = f"model-{spec.artifact.digest[:16]}" if connector or shares_kv else ""
        split = _device_split(spec)
        options.pop(STAGES_OPTION, None)
        can_sleep = options.get("enable_sleep_mode", "false").lower() in TRUE
        return EngineCommand(
            arguments=(
                *("vllm", "serve", f"./{link}" if link else str(launch.model_path)),
                *(("--host", "127.0.0.1", "--port", str(launch.port)) if spec.leads else ()),
                *("--served-model-name", spec.name),
                *("--max-model-len", str(spec.context_tokens)),
                *("--tensor-parallel-size", str(split.tensor)),
                *("--pipeline-parallel-size", str(split.pipeline)),
                *_multi_node_flags(spec),
                # Adds cached_tokens to every usage, from which routers learn cache hits.
                "--enable-prompt-tokens-details",
                *flags("vllm", options),
            ),
            base_url=f"http://127.0.0.1:{launch.port}" if spec.leads else "",
            environment={
                **visible_devices(spec),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                # The server has its sleep endpoints in this mode only; it listens on loopback.
                **({"VLLM_SERVER_DEV_MODE": "1"} if can_sleep else {}),
                **_environment(launch, options),
                **(_transfer_environment(launch, connector) if connector else {}),
                **(_store_environment(launch) if shares_kv else {}),
            },
            files={STORE_CONFIG: _store_config(launch)} if shares_kv else {},
            kv_address=_kv_address(launch) if connector else None,
            kv_events=events,
            model_link=link,
            may_be_strict=may_be_strict("vllm", options),
            # Without this, most of its parsers hold a required call to the tool's name only, not to
            # the schema of its parameters (--tool-strict-level).
            strict_forced_tools=True,
        )

    def handshake(self, spec: ReplicaSpec) -> Handshake | None:
        """Return the protocol of the connector that the deployment names."""
        return HANDSHAKES.get(spec.engine.options.get(CONNECTOR_OPTION, ""))

    def spare_seats(self, options: Mapping[str, str]) -> int:
        """Return the spare seats: vLLM does not start with more sequences than tokens of a step."""
        seats = given_number(options, self.sequences_option)
        tokens = read_size(options.get(STEP_TOKENS_OPTION, ""))
        spare = spare_seats(seats)
        return min(spare, max(0, tokens - seats)) if tokens else spare

    def body_fields(self, command: EngineCommand, salt: str, priority: int) -> dict[str, Any]:
        """Return the salt and the priority: its queue is in ascending order, with 0 the default."""
        arguments = command.arguments
        is_sorted = SORTED_QUEUE in pairwise(arguments)
        position = headers.PRIORITY_DEFAULT - priority if is_sorted else 0
        return {"cache_salt": salt, "priority": position}

    def read_stats(self, body: bytes) -> EngineStats:
        """Read the requests running and waiting, the KV cache use, and the token counters."""
        found = read_prometheus(body)
        # Releases before 0.9 use the second name. The values are ratios from 0 to 1.
        used = found.get("vllm:kv_cache_usage_perc", found.get("vllm:gpu_cache_usage_perc", 0.0))
        return EngineStats(
            running=int(found.get("vllm:num_requests_running", 0)),
            waiting=int(found.get("vllm:num_requests_waiting", 0)),
            kv_blocks_used=int(used * 1000),
            kv_blocks_total=1000,
            tokens_out_total=int(found.get("vllm:generation_tokens_total", 0)),
            prompt_tokens_total=int(found.get("vllm:prompt_tokens_total", 0)),
            # Tokens that a KV connector (NIXL, Mooncake) fetched are counted apart.
            prefix_hit_tokens_total=int(
                found.get("vllm:prefix_cache_hits_total", 0)
                + found.get("vllm:external_prefix_cache_hits_total", 0)
            ),
            store_hit_tokens_total=int(found.get("vllm:external_prefix_cache_hits_total", 0)),
            steps_total=int(found.get("vllm:iteration_tokens_total_count", 0)),
        )


def _events_socket(launch: EngineLaunch, options: Mapping[str, str]) -> str:
    """Return where the engine says what its prefix cache stores and evicts; "" if it does not."""
    spec = launch.spec
    below = KEEPS_EVICTED.intersection(options) and CONNECTOR_OPTION not in spec.engine.options
    is_off = options.get("enable_prefix_caching", "true").lower() not in TRUE
    if not spec.leads or EVENTS_OPTION in options or below or is_off:
        return ""
    # With several ranks of data, each would need a socket of its own.
    if options.get("data_parallel_size", "1") != "1":
        return ""
    if installed_version.problem("vllm", EVENTS_VERSIONS):
        return ""
    return str(launch.folder / EVENTS_SOCKET)


def _events_config(socket: str) -> str:
    """Return the configuration of events. Those that are not read in time are dropped soon."""
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{socket}",
            "buffer_steps": 1,
            "hwm": 1000,
        }
    )


def _device_options(spec: ReplicaSpec) -> dict[str, str]:
    """Return the options that suit the replica's device.

    On a CPU a start with compilation and an empty cache takes minutes of all cores.
    """
    return {"enforce_eager": "true"} if spec.device_ids == ("cpu",) else {}


def _environment(launch: EngineLaunch, options: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for settings that vLLM has no option for.

    On a CPU vLLM binds its threads to the cores, all but one: every replica on the node to the same
    ones, and on a machine of two cores to a single one. Here the kernel places them. And although
    the model is not compiled there, its sampler would be at the first request for log
    probabilities: all requests wait for that, and without a C++ compiler the engine core dies.
    """
    variables = {}
    is_on_cpu = launch.spec.device_ids == ("cpu",)
    if options.get("enable_lora", "false").lower() in TRUE:
        # Adapters are loaded and unloaded while the engine runs.
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if TRACES_OPTION in options:
        # It records the requests that the node records, and starts no traces of its own.
        variables["OTEL_TRACES_SAMPLER"] = "parentbased_always_off"
        variables["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    if is_on_cpu and options.get("enforce_eager", "false").lower() in TRUE:
        variables["TORCH_COMPILE_DISABLE"] = "1"
    if is_on_cpu and BINDING not in os.environ:
        variables[BINDING] = "nobind"
    return {**variables, **cpu_threads(launch)}


def _kv_address(launch: EngineLaunch) -> KvAddress:
    engine_id = f"{launch.spec.replica_id}-{launch.start_id}"
    return KvAddress(host=launch.host, port=launch.transfer_port, engine_id=engine_id)


def _transfer_config(launch: EngineLaunch, connector: str) -> str:
    """Return the configuration with which the engine sends and fetches KV, whatever its role.

    So a replica changes its role without a restart. The decode engine computes what it cannot
    fetch. Another engine id after each start keeps others from using the addresses of the last one.
    """
    extra: dict[str, Any] = {"kv_lease_duration": KV_LEASE_S}
    if connector == "mooncake":
        is_cpu = launch.spec.device_ids == ("cpu",)
        extra = {"mooncake_protocol": "tcp" if is_cpu else "rdma"}
    return json.dumps(
        {
            "kv_connector": CONNECTORS[connector],
            "kv_role": "kv_both",
            "engine_id": _kv_address(launch).engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    )


def _transfer_environment(launch: EngineLaunch, connector: str) -> dict[str, str]:
    """Return where the engine listens for others, and how it reaches them."""
    port = str(launch.transfer_port)
    if connector == "mooncake":
        return {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": port,
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(MOONCAKE_ABORT_S),
            "VLLM_HOST_IP": launch.host,
        }
    variables = {"VLLM_NIXL_SIDE_CHANNEL_HOST": launch.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port}
    if launch.spec.device_ids == ("cpu",) and "UCX_TLS" not in os.environ:
        variables["UCX_TLS"] = "tcp,self,sm"
    return variables


def _store_transfer_config(launch: EngineLaunch) -> str:
    """Return the configuration with which the engine reads and writes the PoP's store.

    Blocks are named by deployment and version, too: their KV is of one format. Each engine of a
    machine needs a socket of its own for its look-ups, whose name contains `lookup_rpc_port`. A
    look-up does not hold up other requests, and KV that cannot be loaded is computed.
    """
    spec = launch.spec
    return json.dumps(
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lookup_rpc_port": launch.port,
                "lookup_async": True,
                "cache_prefix": f"{spec.deployment_id}-{spec.version}",
            },
        }
    )


def _store_config(launch: EngineLaunch) -> bytes:
    """Return Mooncake's configuration: the engines find each other through the master alone."""
    return msgspec.json.encode(
        {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": f"127.0.0.1:{require_store_ports(launch).master}",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": store_bytes(launch.spec.engine) - STORE_BUFFER_BYTES,
            "local_buffer_size": STORE_BUFFER_BYTES,
        }
    )


def _store_environment(launch: EngineLaunch) -> dict[str, str]:
    """Return where the engine finds the configuration, and the ports at which it listens.

    Without a fixed hash seed each engine would name the same blocks in another way.
    """
    ports = require_store_ports(launch)
    first, last = str(ports.first), str(ports.last)
    return {
        "MOONCAKE_CONFIG_PATH": str(launch.folder / STORE_CONFIG),
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": launch.host,
        "VLLM_HOST_IP": launch.host,
        "PYTHONHASHSEED": "0",
        **{"MC_MIN_RPC_PORT": first, "MC_MAX_RPC_PORT": last},
        **{"MC_STORE_CLIENT_MIN_PORT": first, "MC_STORE_CLIENT_MAX_PORT": last},
    }


def _memory_options(launch: EngineLaunch) -> dict[str, str]:
    """Return the options that keep the engine within its planned memory on each device.

    vLLM does not start if less than `gpu_memory_utilization` of the device is free, also where
    `kv_cache_memory_bytes` is the size of its KV cache: therefore both are given.
    """
    engine = launch.spec.engine
    if not launch.has_memory_plan or not engine.options.keys().isdisjoint(MEMORY_OPTIONS):
        return {}
    options = {}
    if engine.kv_memory_bytes:
        options["kv_cache_memory_bytes"] = str(engine.kv_memory_bytes)
    if launch.memory is not None and launch.memory.total_bytes and launch.spec.memory_bytes:
        share = min(1.0, launch.spec.memory_bytes / launch.memory.total_bytes)
        options["gpu_memory_utilization"] = f"{max(share, 0.0001):.4f}"
    return options


class DeviceSplit(NamedTuple):
    """Into how many parts a model's layers and its stages are split."""

    tensor: int
    pipeline: int


def _device_split(spec: ReplicaSpec) -> DeviceSplit:
    """Return the split of each copy of the model: the deployment's stages, else one per node.

    On CPUs there is one stage, and heads are split over the nodes: vLLM's workers there fail with
    an assertion at the first request of a pipeline. Raises UnknownOption if the devices or nodes
    cannot be divided.
    """
    nodes = spec.group.nodes if spec.group else 1
    options, devices = spec.engine.options, len(spec.device_ids) * nodes
    stages = given_number(options, STAGES_OPTION)
    if spec.device_ids == ("cpu",):
        if stages > 1:
            raise UnknownOption(
                f"cannot use {STAGES_OPTION} {stages} on a CPU: vLLM has none there"
            )
        return DeviceSplit(devices, 1)
    stages, copies = stages or nodes, given_number(options, COPIES_OPTION) or 1
    if devices % (stages * copies) or stages % nodes:
        raise UnknownOption(
            f"cannot use {STAGES_OPTION} {stages} and {COPIES_OPTION} {copies} with {devices}"
            f" devices on {nodes} nodes: their product must divide the number of devices, and the"
            " stages be a multiple of the number of nodes"
        )
    return DeviceSplit(devices // (stages * copies), stages)


def _multi_node_flags(spec: ReplicaSpec) -> tuple[str, ...]:
    """Return the flags with which the servers of several nodes find each other."""
    group = spec.group
    if group is None:
        return ()
    return (
        *("--distributed-executor-backend", "mp"),
        *("--nnodes", str(group.nodes), "--node-rank", str(group.place)),
        *("--master-addr", group.host, "--master-port", str(group.port)),
        *(("--headless",) if group.place else ()),
    )

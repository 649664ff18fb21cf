"""SGLang (`python -m sglang.launch_server`). Metric names: SGLang's Prometheus endpoint."""

import secrets
import sys
from collections.abc import Mapping
from typing import Any, Final

from isochrone.wire.engines.engine import EngineStats
from isochrone.wire.http import headers
from isochrone.wire.kv.kv_transfer import KvAddress
from isochrone.wire.peers.assignment import ReplicaSpec, Role
from nodeagent.decide.requests.seats import spare_seats
from nodeagent.drivers import installed_version
from nodeagent.drivers.driver import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    EngineCommand,
    EngineDriver,
    EngineLaunch,
    check_options,
    flags,
    given_number,
    read_prometheus,
    visible_devices,
    with_spare_seats,
)
from nodeagent.drivers.handshake import Handshake, SglangHandshake
from nodeagent.drivers.installed_version import VersionRange
from nodeagent.drivers.output_parsers import may_be_strict, with_parsers

STATIC_SHARE: Final = 0.9
"""The largest share of a replica's memory for weights and KV cache. The rest is for activations and
CUDA graphs; SGLang's own default is close to it."""

VERSIONS: Final = VersionRange(first=(0, 5), before=(0, 6))
"""Options are those of 0.5.23, whose own parser is given our command lines in a test."""


BACKEND_OPTION: Final = "disaggregation_transfer_backend"
TRANSFER_OPTIONS: Final = frozenset({BACKEND_OPTION, "disaggregation_ib_device"})
HANDSHAKE: Final = SglangHandshake()


class SglangDriver(EngineDriver):
    """Starts SGLang's OpenAI server on a loopback port."""

    stats_path = metrics_path = "/metrics"
    resumes = headers.INEXACT
    counts_tokens = True
    salted_paths = frozenset({CHAT_PATH, COMPLETIONS_PATH})
    sequences_option = "max_running_requests"

    def missing(self) -> str:
        """Return an error message if SGLang is not installed, or of another version, else ""."""
        return installed_version.package_problem("sglang", VERSIONS)

    def version(self) -> str:
        """Return the engine's installed version, "" if it is unknown."""
        return installed_version.package_version("sglang")

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the server's command, with tensor parallelism over the replica's devices."""
        spec = launch.spec
        check_options(spec)
        nodes = spec.group.nodes if spec.group else 1
        options = with_spare_seats(
            self, with_parsers("sglang", spec.engine.options, launch.model_path)
        )
        if not _is_split(spec):
            options = {name: options[name] for name in options if name not in TRANSFER_OPTIONS}
        # The bootstrap server listens where the HTTP server does, and other nodes must reach it.
        is_reached = _is_split(spec) and spec.role is Role.PREFILL
        host = launch.host if is_reached else "127.0.0.1"
        key = secrets.token_hex(16) if is_reached else ""
        address = KvAddress(host=launch.host, port=launch.transfer_port) if is_reached else None
        return EngineCommand(
            arguments=(
                *(sys.executable, "-m", "sglang.launch_server"),
                *("--model-path", str(launch.model_path)),
                *("--host", host, "--port", str(launch.port)),
                *(("--api-key", key) if key else ()),
                *_role_flags(launch),
                *("--served-model-name", spec.name),
                *("--context-length", str(spec.context_tokens)),
                *("--tp-size", str(len(spec.device_ids) * nodes)),
                *_multi_node_flags(spec),
                *("--enable-metrics", "--enable-cache-report"),
                *flags("sglang", {**_memory_options(launch), **options}),
            ),
            base_url=f"http://{host}:{launch.port}" if spec.leads else "",
            environment={**visible_devices(spec), "HF_HUB_OFFLINE": "1"},
            kv_address=address,
            api_key=key,
            may_be_strict=may_be_strict("sglang", options),
        )

    def handshake(self, spec: ReplicaSpec) -> Handshake | None:
        """Return the protocol of a replica that was started for one phase."""
        return HANDSHAKE if _is_split(spec) else None

    def spare_seats(self, options: Mapping[str, str]) -> int:
        """Return the spare seats for its limit of requests."""
        return spare_seats(given_number(options, self.sequences_option))

    def body_fields(self, command: EngineCommand, salt: str, priority: int) -> dict[str, Any]:
        """Return the salt."""
        return {"cache_salt": salt}

    def read_stats(self, body: bytes) -> EngineStats:
        """Read the requests running and queued, the KV cache use, and the token counters."""
        found = read_prometheus(body)
        used = found.get("sglang:token_usage", 0.0)
        tokens_out = int(found.get("sglang:generation_tokens_total", 0))
        return EngineStats(
            running=int(found.get("sglang:num_running_reqs", 0)),
            waiting=int(found.get("sglang:num_queue_reqs", 0)),
            kv_blocks_used=int(used * 1000),
            kv_blocks_total=1000,
            decode_tokens_per_s=found.get("sglang:gen_throughput", 0.0),
            tokens_out_total=tokens_out,
            prompt_tokens_total=int(found.get("sglang:prompt_tokens_total", 0)),
            prefix_hit_tokens_total=int(found.get("sglang:cached_tokens_total", 0)),
            # The token counter moves only when a request ends. Tokens in use move at every step.
            steps_total=tokens_out + int(found.get("sglang:num_used_tokens", 0)),
        )


def _is_split(spec: ReplicaSpec) -> bool:
    """Return whether the engine runs one phase only, which its own role says."""
    return BACKEND_OPTION in spec.engine.options and spec.role is not Role.UNIFIED


def _role_flags(launch: EngineLaunch) -> tuple[str, ...]:
    """Return the flags of an engine that runs one phase only."""
    spec = launch.spec
    if not _is_split(spec):
        return ()
    port = ("--disaggregation-bootstrap-port", str(launch.transfer_port))
    is_prefill = spec.role is Role.PREFILL
    return ("--disaggregation-mode", spec.role.value, *(port if is_prefill else ()))


def _memory_options(launch: EngineLaunch) -> dict[str, str]:
    """Return the option that keeps weights and KV cache within the planned memory.

    `mem_fraction_static` is a share of the memory that is free on the device when SGLang starts
    (`profile_available_bytes` in its source), so it accounts for other replicas on the device.
    """
    memory = launch.memory
    if memory is None or not memory.free_bytes or not launch.has_memory_plan:
        return {}
    kv_bytes = launch.spec.engine.kv_memory_bytes
    static = (
        launch.weights_bytes + kv_bytes if kv_bytes else STATIC_SHARE * launch.spec.memory_bytes
    )
    share = min(STATIC_SHARE, static / memory.free_bytes)
    return {"mem_fraction_static": f"{share:.4f}"}


def _multi_node_flags(spec: ReplicaSpec) -> tuple[str, ...]:
    """Return the flags with which the servers of several nodes find each other."""
    group = spec.group
    if group is None:
        return ()
    return (
        *("--nnodes", str(group.nodes), "--node-rank", str(group.place)),
        *("--dist-init-addr", f"{group.host}:{group.port}"),
    )

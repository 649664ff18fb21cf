"""The driver of the embedded PyTorch engine (nodeagent/engine), which runs on any device."""

import sys
from typing import Final

import msgspec

from isochrone import __version__
from isochrone.wire.engines.engine import EngineConfig, EngineStats, KvStorePlace
from isochrone.wire.engines.engine_options import ENGINE_OPTIONS
from isochrone.wire.http import headers
from isochrone.wire.kv.kv_store import uses_kv_store
from nodeagent.drivers import installed_version
from nodeagent.drivers.driver import (
    LOAD_ADAPTER_PATH,
    TOKENIZE_PATH,
    UNLOAD_ADAPTER_PATH,
    EngineCommand,
    EngineDriver,
    EngineLaunch,
    UnknownOption,
    check_options,
    missing_package,
    require_store_ports,
    visible_devices,
)

KV_BYTES_UNPLANNED: Final = 512 * 1024 * 1024
"""The KV cache of a replica without a planned size: the mock engine's, which needs none, or one
that a scheduler of an older release placed."""

STORE_PACKAGE: Final = "mooncake"
"""The package that the engine imports to join a store of KV."""


class EmbeddedDriver(EngineDriver):
    """Starts `python -m nodeagent.engine`."""

    stats_path = "/stats"
    metrics_path = "/metrics"
    resumes = headers.SEEDED
    tokenize_path = TOKENIZE_PATH
    sequences_option = "sequences_max"
    sequences_default = EngineConfig(model_path="", served_name="", socket="").sequences_max
    is_queue_fair = True
    kv_transfer = True
    load_adapter_path = LOAD_ADAPTER_PATH
    unload_adapter_path = UNLOAD_ADAPTER_PATH
    sleep_path = "/sleep"
    wake_path = "/wake_up"
    is_asleep_path = "/is_sleeping"
    module = "nodeagent.engine"
    has_standby = True
    """Whether a spare process of this engine can wait for its configuration."""

    def missing(self) -> str:
        """Return an error message if torch is not installed, else ""."""
        return missing_package("torch")

    def version(self) -> str:
        """Return the version of this release and of torch."""
        return f"{__version__} {installed_version.package_version('torch')}"

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the engine's command and its config file; it listens on a socket in its folder."""
        spec = launch.spec
        check_options(spec)
        socket = str(launch.folder / "engine.sock")
        path = str(launch.folder / "config.json")
        return EngineCommand(
            arguments=(sys.executable, "-m", self.module, "--config", path),
            base_url="http://localhost" if spec.leads else "",
            socket=socket,
            environment=visible_devices(spec),
            standby=(sys.executable, "-m", self.module, "--standby") if self.has_standby else (),
            files={"config.json": msgspec.json.encode(self._config(launch, socket))},
        )

    def read_stats(self, body: bytes) -> EngineStats:
        """Decode the statistics, which the engine reports as EngineStats."""
        return msgspec.json.decode(body, type=EngineStats)

    def _config(self, launch: EngineLaunch, socket: str) -> EngineConfig:
        device = launch.spec.device_ids[0] if launch.spec.device_ids else "cpu"
        values: dict[str, object] = {
            "model_path": str(launch.model_path),
            "served_name": launch.spec.name,
            "socket": socket,
            # The process sees only its own devices, numbered from 0.
            "device": "cpu" if device == "cpu" else "cuda:0",
            "dtype": "fp32" if device == "cpu" else "bf16",
            "threads": launch.threads,
            "kv_memory_bytes": launch.spec.engine.kv_memory_bytes or KV_BYTES_UNPLANNED,
            "context_tokens_max": launch.spec.context_tokens,
            "sleeps": launch.spec.overcommit > 1,
            "options": self._engine_options(launch),
        }
        if uses_kv_store(launch.spec.engine):
            values["kv_store"] = _store_place(launch)
        known = ENGINE_OPTIONS["embedded"].names
        values.update(
            {name: value for name, value in launch.spec.engine.options.items() if name in known}
        )
        try:
            config = msgspec.convert(values, EngineConfig, strict=False)
        except msgspec.ValidationError as error:
            raise UnknownOption(f"cannot start {launch.spec.engine.driver}: {error}") from error
        return _with_parallelism(config, launch) if device != "cpu" or launch.spec.group else config

    def _engine_options(self, launch: EngineLaunch) -> dict[str, str]:
        return {}


def _store_place(launch: EngineLaunch) -> KvStorePlace:
    ports = require_store_ports(launch)
    return KvStorePlace(
        master_port=ports.master, host=launch.host, first_port=ports.first, last_port=ports.last
    )


def _with_parallelism(config: EngineConfig, launch: EngineLaunch) -> EngineConfig:
    """Return the config with a parallelism that uses all of the replica's devices.

    The default is one pipeline stage per node, and tensor parallelism within each node.
    Raises UnknownOption if the given parallelism does not match the devices.
    """
    spec = launch.spec
    nodes = spec.group.nodes if spec.group else 1
    devices = len(spec.device_ids) * nodes
    if "pipeline_parallel" not in spec.engine.options:
        config = msgspec.structs.replace(config, pipeline_parallel=nodes)
    pipeline = config.pipeline_parallel
    if "tensor_parallel" not in spec.engine.options:
        config = msgspec.structs.replace(config, tensor_parallel=max(1, devices // pipeline))
    ranks = config.tensor_parallel * pipeline
    if pipeline % nodes or (ranks != devices and config.device != "cpu"):
        where = f" of {nodes} nodes, with whole stages on each" if nodes > 1 else ""
        raise UnknownOption(
            f"cannot start {spec.engine.driver} on {devices} devices{where}: tensor_parallel"
            f" {config.tensor_parallel} times pipeline_parallel {pipeline} must equal the number"
            " of devices"
        )
    return msgspec.structs.replace(config, group=spec.group)

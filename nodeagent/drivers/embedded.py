"""The embedded PyTorch engine: our own, on any device."""

import sys
from typing import Final

import msgspec

from isochrone.wire import headers
from isochrone.wire.engine import EngineConfig, EngineStats
from nodeagent.drivers.driver import (
    EngineCommand,
    EngineLaunch,
    UnknownOption,
    check_options,
    no_package,
    visible_devices,
)

OPTIONS: Final = frozenset(
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
        "memory_max_bytes",
        "adapters_max",
        "adapter_memory_bytes",
    }
)


class EmbeddedDriver:
    """Starts `python -m nodeagent.engine`."""

    health_path = "/health"
    stats_path = "/stats"
    metrics_path = "/metrics"
    resumes = headers.SEEDED
    salted: frozenset[str] = frozenset()
    module = "nodeagent.engine"
    options = OPTIONS
    can_wait = True
    """Whether a process of it can wait on standby."""

    def lacks(self) -> str:
        """Say where it is not installed."""
        return no_package("torch")

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Write the engine's config and point it at a socket in its folder."""
        spec = launch.spec
        check_options(spec, self.options)
        socket = str(launch.folder / "engine.sock")
        path = str(launch.folder / "config.json")
        return EngineCommand(
            arguments=(sys.executable, "-m", self.module, "--config", path),
            base_url="http://localhost" if spec.leads else "",
            socket=socket,
            environment=visible_devices(spec),
            standby=(sys.executable, "-m", self.module, "--standby") if self.can_wait else (),
            files={"config.json": msgspec.json.encode(self._config(launch, socket))},
        )

    def read_stats(self, body: bytes) -> EngineStats:
        """The engine speaks our own words."""
        return msgspec.json.decode(body, type=EngineStats)

    def _config(self, launch: EngineLaunch, socket: str) -> EngineConfig:
        device = launch.spec.device_ids[0] if launch.spec.device_ids else "cpu"
        values: dict[str, object] = {
            "model_path": str(launch.model_path),
            "served_name": launch.spec.name,
            "socket": socket,
            # The process sees its own devices alone, numbered from 0.
            "device": "cpu" if device == "cpu" else "cuda:0",
            "dtype": "fp32" if device == "cpu" else "bf16",
            "threads": launch.threads,
            "kv_memory_bytes": launch.spec.engine.kv_memory_bytes,
            "context_tokens_max": launch.spec.context_tokens,
            "options": self._engine_options(launch),
        }
        values.update(
            {name: value for name, value in launch.spec.engine.options.items() if name in OPTIONS}
        )
        try:
            config = msgspec.convert(values, EngineConfig, strict=False)
        except msgspec.ValidationError as error:
            raise UnknownOption(f"cannot start {launch.spec.engine.driver}: {error}") from error
        return _split(config, launch) if device != "cpu" or launch.spec.group else config

    def _engine_options(self, launch: EngineLaunch) -> dict[str, str]:
        return {}


def _split(config: EngineConfig, launch: EngineLaunch) -> EngineConfig:
    """Have each of the replica's devices hold a part of the model.

    Unless told: a stage a node, and within it by tensors.
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
        over = f" of {nodes} nodes, each with whole stages" if nodes > 1 else ""
        raise UnknownOption(
            f"cannot start {spec.engine.driver} on {devices} devices{over}: tensor_parallel"
            f" {config.tensor_parallel} times pipeline_parallel {pipeline} must be as many"
        )
    return msgspec.structs.replace(config, group=spec.group)

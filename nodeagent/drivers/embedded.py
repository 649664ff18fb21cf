"""The embedded PyTorch engine: our own, on any device."""

import sys
from typing import Final

import msgspec

from isochrone.wire.engine import EngineConfig, EngineStats
from nodeagent.drivers.driver import Command, Launch, check_options, visible_devices

OPTIONS: Final = frozenset({"dtype", "batch_tokens_max", "sequences_max", "waiting_max", "threads"})


class Embedded:
    """Starts `python -m nodeagent.engine`."""

    health_path = "/health"
    stats_path = "/stats"
    module = "nodeagent.engine"
    options = OPTIONS

    def command(self, launch: Launch) -> Command:
        """Write the engine's config and point it at a socket in its folder."""
        spec = launch.spec
        check_options(spec.engine.driver, spec.engine.options, self.options)
        socket = str(launch.folder / "engine.sock")
        path = str(launch.folder / "config.json")
        return Command(
            arguments=(sys.executable, "-m", self.module, "--config", path),
            base_url="http://localhost",
            socket=socket,
            environment=visible_devices(spec),
            files={"config.json": msgspec.json.encode(self._config(launch, socket))},
        )

    def read_stats(self, body: bytes) -> EngineStats:
        """The engine speaks our own words."""
        return msgspec.json.decode(body, type=EngineStats)

    def _config(self, launch: Launch, socket: str) -> EngineConfig:
        options = launch.spec.engine.options
        numbers = {
            name: int(options[name])
            for name in ("batch_tokens_max", "sequences_max", "waiting_max")
            if name in options
        }
        device = launch.spec.device_ids[0] if launch.spec.device_ids else "cpu"
        return EngineConfig(
            model_path=str(launch.model_path),
            served_name=launch.spec.name,
            socket=socket,
            # The process sees its own devices alone, numbered from 0.
            device="cpu" if device == "cpu" else "cuda:0",
            threads=int(options.get("threads", launch.threads)),
            kv_memory_bytes=launch.spec.engine.kv_memory_bytes,
            context_tokens_max=launch.spec.context_tokens,
            dtype=options.get("dtype", "float32" if device == "cpu" else "bfloat16"),
            options=self._engine_options(launch),
            **numbers,
        )

    def _engine_options(self, launch: Launch) -> dict[str, str]:
        return {}

"""An operator's own server that speaks OpenAI's API, as `[commands.NAME]` of the node says."""

from isochrone.wire.engines.command_engine import CONCURRENCY_OPTION, NAME_OPTION, command_problem
from isochrone.wire.engines.engine import EngineStats
from nodeagent.drivers.configured_command import PLACEHOLDERS, filled
from nodeagent.drivers.driver import (
    EngineCommand,
    EngineDriver,
    EngineLaunch,
    UnknownOption,
    check_options,
    cpu_threads,
    require_one_node,
    visible_devices,
)


class CommandDriver(EngineDriver):
    """Starts a server on a loopback port, of which only its configured command is known."""

    sequences_option = CONCURRENCY_OPTION
    sequences_default = 4

    def missing(self) -> str:
        """Return "": missing programs are found for each command."""
        return ""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the process to start. Raises UnknownOption."""
        spec = launch.spec
        check_options(spec)
        if problem := command_problem(spec.engine):
            raise UnknownOption(f"cannot start a command: {problem}")
        require_one_node(spec, "a command runs on one node")
        name = spec.engine.options[NAME_OPTION]
        configured = launch.commands.get(name)
        if configured is None:
            raise UnknownOption(f"cannot start {name!r}: this node has no [commands.{name}]")
        texts = (str(launch.port), str(launch.model_path), spec.name, str(launch.threads))
        values = dict(zip(PLACEHOLDERS, texts, strict=True))
        return EngineCommand(
            arguments=tuple(filled(argument, values) for argument in configured.arguments),
            base_url=f"http://127.0.0.1:{launch.port}",
            environment={
                **visible_devices(spec),
                **cpu_threads(launch),
                **configured.environment,
            },
            ready_path=configured.ready_path,
            metrics_path=configured.metrics_path,
            model_name=filled(configured.model_name, values),
            stall_s=configured.stall_s,
        )

    def read_stats(self, body: bytes) -> EngineStats:
        """Return empty statistics: that the server answers is all that is known."""
        return EngineStats()

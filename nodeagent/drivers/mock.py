"""The driver of the mock engine: numbered tokens and faults on request, for tests."""

from nodeagent.drivers.driver import EngineCommand, EngineLaunch, require_one_node
from nodeagent.drivers.embedded import EmbeddedDriver


class MockDriver(EmbeddedDriver):
    """Starts `python -m nodeagent.mock` and passes every option to it."""

    module = "nodeagent.mock"
    has_standby = False
    sequences_option = "sequences"
    sequences_default = 0
    is_queue_fair = False
    kv_transfer = False
    load_adapter_path = unload_adapter_path = ""

    def missing(self) -> str:
        """Return "": the mock engine is part of the agent's package."""
        return ""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return the embedded engine's command with this module. Raises UnknownOption."""
        require_one_node(launch.spec, "the mock runs on one node; use the embedded engine")
        return super().command(launch)

    def _engine_options(self, launch: EngineLaunch) -> dict[str, str]:
        return dict(launch.spec.engine.options)

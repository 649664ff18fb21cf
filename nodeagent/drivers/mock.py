"""The mock engine: numbered tokens and faults, for tests and drills."""

from nodeagent.drivers.driver import EngineCommand, EngineLaunch, on_one_node
from nodeagent.drivers.embedded import EmbeddedDriver


class MockDriver(EmbeddedDriver):
    """Starts `python -m nodeagent.mock`, handing every option on."""

    module = "nodeagent.mock"
    can_wait = False
    options = frozenset(
        {
            "ttft_ms",
            "itl_ms",
            "kv_tokens",
            "sequences",
            "fail_load",
            "crash_at_token",
            "hang_at_token",
            "garbage_at_token",
            "error_status",
            "memory_full",
            "zombie",
        }
    )

    def lacks(self) -> str:
        """It is of the agent's own package."""
        return ""

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """As the embedded engine, on one node."""
        on_one_node(launch.spec, "it has no parts; use the embedded engine")
        return super().command(launch)

    def _engine_options(self, launch: EngineLaunch) -> dict[str, str]:
        return dict(launch.spec.engine.options)
